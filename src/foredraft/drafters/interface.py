"""The one seam between the engine and whoever proposes tokens.

Knows requests as read-only views and drafts as values; knows neither engine nor scheduler. A new
drafter is one new file that implements `Drafter` and one line in `catalog.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from foredraft.cache.tensors import CacheShape, KVCache
from foredraft.core.sampling import History, Sampler, SamplingParams
from foredraft.grammar.matcher import Matcher
from foredraft.models.interface import LayerResume

# Computed positions that a drafter that fills its cache from features may lack before it is asked
# to read them, drafting or not: what it is told of them it keeps until then.
MOST_UNREAD = 64


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a drafter is and wants; the engine reads this, never a drafter's name."""

    deterministic: bool = True  # Draft.probs is None
    tree: bool = False  # may propose siblings
    num_speculative_tokens: int | None = None  # draft tokens a step where the config says nothing
    # Keys and values of its own, by position: the engine pays for them out of its one budget and
    # hands them over with each request. A drafter that has them is also asked, for no nodes, while
    # a prompt is being read, so that it can read along.
    cache: CacheShape | None = None
    weight_bytes: int = 0  # of a model of its own, as kept in memory
    # Beside weights and keys and values, at most: what it remembers across requests.
    working_bytes: int = 0
    # Each draft token costs a pass of a model, or a part of one; else drafting is all but free.
    costs_passes: bool = False
    max_positions: int | None = None  # a longer context gets no drafts; None: any length
    # Of each row that a step verifies, so many ids of its largest logits, best first, are told in
    # `StepRow.top_ids`. They cost something: 0 is none.
    top_ids: int = 0
    prediction: bool = False  # reads `DraftRequest.prediction`; else such requests are refused
    # False: all it needs is in the requests' tokens. Steps are not told to it, and one that it has
    # no draft in costs what plain decoding does.
    observes: bool = True
    # Layers of the target, from the first, that the drafter runs itself: it is given the target's
    # own cache, and a pass can go on behind them (`Draft.resume`). 0: none.
    target_layers: int = 0
    # Depths of the target, as in `FlatBatch.feature_layers`, whose hidden states of every computed
    # row are told in `StepResult.features`. A drafter with a cache of its own fills it from them:
    # position p from the features at p and the token at p + 1.
    feature_layers: tuple[int, ...] = ()


class DraftRequest(NamedTuple):
    """A read-only view of one running request. Made for each request in every step, so it is a
    tuple: a frozen dataclass of so many fields takes three times as long to make.
    """

    id: str
    tokens: Sequence[int]  # prompt and output, the pending one last; read-only, good for this call
    num_prompt_tokens: int
    # 0: the prompt is being read, `tokens` end with this step's part of it; or a drafter that fills
    # its cache from features is to read what it has been told.
    max_nodes: int
    sampling: SamplingParams
    seed: int  # the request's own, for coins: stream DRAFT, or the target's noise when coupled
    coupled: bool  # the draft is verified by the coupled rule
    sampler: Sampler  # the request's processors
    history: History  # of the row after `tokens`; good for this call
    # The drafter's own cache and the request's table in it, where the capabilities ask for one. The
    # pages hold slots for all of `tokens` and `max_nodes` more. They stay the request's, and keep
    # what is written to them, until `release`.
    cache: KVCache | None = None
    pages: Sequence[int] = ()
    # The target's own cache, where the capabilities name layers of it, with the same table. It
    # holds `num_computed` positions in all layers. From there on the slots are free for keys and
    # values of those layers, until the step ends: what isn't accepted is written over.
    target_cache: KVCache | None = None
    num_computed: int = 0
    # Positions that the drafter's cache holds for `tokens` already: what `Draft.num_cached` has
    # told of this request, or of another that began alike and whose pages it shares.
    num_cached: int = 0
    # What is learned of one salt's requests is for requests of the same salt, unless it is said
    # that all may share.
    cache_salt: str = ""
    prediction: Sequence[int] = ()  # the output that the client expects; a hint
    # Where the output is held to a grammar: its state after `tokens`. To be read and forked, not
    # moved: several drafters may look at it. What it forbids is never accepted.
    matcher: Matcher | None = None
    # A node that is less likely than this to be accepted, once its parent is, is not wanted.
    confidence_threshold: float = 0.0
    # The rule of what pays: node number i of a draft is wanted if its whole path is accepted with
    # at least the probability `least_path[i]`. What is drafted at no cost is cut by the engine; a
    # drafter that pays for its nodes stops by itself, by what it has kept, before it draws more.
    least_path: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of proposed tokens. The default is the empty draft."""

    tokens: Sequence[int] = ()  # draft nodes, a parent before its children, siblings in draw order
    parents: Sequence[int] = ()  # -1 = the pending token; a chain is (-1, 0, 1, ...)
    # [n, V] the law each was really drawn from, given the siblings before it; None = deterministic
    probs: Tensor | None = None
    # P(a node is accepted | its parent is), as the drafter believes; None: it doesn't know.
    confidence: Sequence[float] | None = None
    # False: a row that is computed for the drafter's own use, told of like any other, never
    # accepted, never counted as drafted; so must the nodes below it be. None: all are drafts.
    verify: Sequence[bool] | None = None
    # The rows that are through the target's first layers: those of `tokens` from `num_computed` on,
    # then of the draft's nodes, in order. Keys and values of theirs are in the target's cache,
    # below that layer. Of a chain the rest is computed by the engine; a tree is covered as a whole.
    resume: LayerResume | None = None
    # Of the request's committed tokens, from the first: those whose keys and values the drafter's
    # own cache now holds. Later requests that begin alike are given them.
    num_cached: int = 0

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        probs: Tensor | None = None,
        num_cached: int = 0,
        confidence: Sequence[float] | None = None,
        resume: LayerResume | None = None,
    ) -> Draft:
        parents = tuple(range(-1, len(tokens) - 1))
        return cls(tuple(tokens), parents, probs, confidence, resume=resume, num_cached=num_cached)


@dataclass(frozen=True, slots=True)
class StepRow:
    """One computed row of a request in the step just committed."""

    position: int
    node: int  # draft node, -1 for rows of committed tokens (prompt and pending)
    token: int
    committed: bool
    # As many as the capabilities ask for, of the target's logits as they come, before any
    # processor. None of rows whose logits the step had no use for, which are those of a prompt
    # before its last token.
    top_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did for one request, told to the drafter after commit."""

    id: str
    rows: Sequence[StepRow]
    num_accepted: int
    next_token: int | None  # None while the prompt is still being computed
    cache_salt: str = ""  # as in `DraftRequest`
    # [rows, depths * H] of `rows` in their order, at the depths that the capabilities ask for. None
    # of a request that is not to be drafted for any more.
    features: Tensor | None = None


@runtime_checkable
class Drafter(Protocol):
    """Who proposes. Nothing it does is visible before commit."""

    capabilities: Capabilities

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """One draft per request, in order, with at most `max_nodes` nodes each."""

    def observe(self, results: Sequence[StepResult]) -> None:
        """What the step committed; called after every step, for every request in it, where the
        capabilities say that it observes.
        """

    def release(self, request_id: str) -> None:
        """The request ended, however it ended, or lost its pages; drop all state kept for it."""
