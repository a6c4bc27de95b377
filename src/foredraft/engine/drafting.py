"""Asking the drafter, and judging what it gives before the target's pass.

Knows the contract of `Drafter` and holds every drafter to it in one place; knows neither logits nor
any particular drafter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from foredraft.cache.tensors import KVCache
from foredraft.core.trees import ROOT, Topology, topology
from foredraft.drafters.interface import MOST_UNREAD, Draft, Drafter, DraftRequest
from foredraft.engine.request import Request
from foredraft.engine.scheduler import Scheduled
from foredraft.models.interface import LayerResume
from foredraft.planning.policy import NEVER, Stopping

# A law in float32 over a large vocabulary adds up to 1 within about this much.
LAW_TOLERANCE = 1e-3


class DrafterError(RuntimeError):
    """A drafter broke its contract; nothing of the step was committed."""


class TokenView(Sequence[int]):
    """The first `length` of a request's tokens, without a copy; slices are lists."""

    __slots__ = ("_length", "_tokens")

    def __init__(self, tokens: list[int], length: int) -> None:
        self._tokens = tokens
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            start, stop, step = at.indices(self._length)
            # Going down, `stop` may be -1, which in a slice is something else.
            if step > 0:
                return self._tokens[start:stop:step]
            return [self._tokens[i] for i in range(start, stop, step)]
        if not -self._length <= at < self._length:
            raise IndexError(f"token {at} of {self._length}")
        return self._tokens[at if at >= 0 else self._length + at]

    def __iter__(self) -> Iterator[int]:
        return islice(self._tokens, self._length)


class CheckedDraft(NamedTuple):
    """A draft that the engine can verify, in plain values; its nodes are those to be verified.

    The drafter's own rows are no nodes: in the pass they come behind them.
    """

    tokens: tuple[int, ...]
    tree: Topology
    probs: Tensor | None
    num_cached: int = 0
    confidence: tuple[float, ...] | None = None
    own: OwnRows | None = None
    resume: LayerResume | None = None  # of the chain's rows, then of the nodes


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Rows that a drafter wants computed for its own use, behind the `n` nodes of its draft."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # of the nodes, then of these rows: numbers among both together
    places: tuple[int, ...]  # the drafter's own number of each node, then of each of these rows


NO_DRAFT = CheckedDraft((), topology(()), None)


def ask(
    drafter: Drafter | None,
    rows: Sequence[Scheduled],
    vocab_size: int,
    cache: KVCache | None,
    stopping: Stopping = NEVER,
    target_cache: KVCache | None = None,
) -> dict[str, CheckedDraft]:
    """Drafts by request id, for the rows that may have one.

    A drafter with a cache of its own also reads along the prompts of requests to be drafted for,
    and what it was told of others that it may draft for again; one that runs layers of the target
    is given the target's.
    Raises DrafterError for anything that is not one well-formed draft per request.
    """
    if drafter is None:
        return {}
    reads = drafter.capabilities.cache is not None and bool(drafter.capabilities.feature_layers)
    wanted = [
        row
        for row in rows
        if row.max_nodes
        or (row.speculates and not row.emits and cache is not None)
        or (reads and _num_unread(row.request) >= MOST_UNREAD)
    ]
    if not wanted:
        return {}
    if not drafter.capabilities.target_layers:
        target_cache = None
    views = [_view(row, cache, target_cache, stopping) for row in wanted]
    drafts: Any = drafter.propose(views)
    try:
        checked = _check_all(drafts, wanted, drafter, vocab_size)
    except DrafterError:
        raise
    except Exception as error:  # reading it runs foreign code: a length, an item, a tensor's kind
        raise DrafterError(
            f"the drafter's drafts can't be read: {type(error).__name__}: {error}"
        ) from error
    return checked


def _num_unread(request: Request) -> int:
    """Computed positions whose features the drafter keeps."""
    return request.num_computed - request.num_draft_cached if request.max_draft_nodes > 0 else 0


def _check_all(
    drafts: Any, wanted: Sequence[Scheduled], drafter: Drafter, vocab_size: int
) -> dict[str, CheckedDraft]:
    if not isinstance(drafts, Sequence) or len(drafts) != len(wanted):
        given = f"{len(drafts)} drafts" if isinstance(drafts, Sequence) else f"{drafts!r}"
        raise DrafterError(f"the drafter gave {given} for {len(wanted)} requests")
    return {
        row.request.id: _check(draft, row, drafter, vocab_size)
        for row, draft in zip(wanted, drafts, strict=True)
    }


def _view(
    row: Scheduled, cache: KVCache | None, target_cache: KVCache | None, stopping: Stopping
) -> DraftRequest:
    request = row.request
    return DraftRequest(
        id=request.id,
        tokens=TokenView(request.tokens, request.num_computed + row.chain),
        num_prompt_tokens=request.num_prompt,
        max_nodes=row.max_nodes,
        sampling=request.params,
        seed=request.seed,
        coupled=request.coupled,
        sampler=request.sampler,
        history=request.history,
        cache=cache,
        pages=() if cache is None and target_cache is None else tuple(request.pages),
        target_cache=target_cache,
        num_computed=request.num_computed,
        num_cached=request.num_draft_cached,
        cache_salt=request.cache_salt,
        prediction=request.prediction,
        matcher=request.matcher.fork() if request.matcher is not None and row.emits else None,
        confidence_threshold=stopping.confidence_threshold,
        least_path=stopping.least_path,
    )


def _check(draft: Any, row: Scheduled, drafter: Drafter, vocab_size: int) -> CheckedDraft:
    if not isinstance(draft, Draft):
        raise DrafterError(f"the drafter gave {draft!r}, which is no Draft")
    tokens, parents = _ids("tokens", draft.tokens), _ids("parents", draft.parents)
    if len(tokens) != len(parents):
        raise DrafterError(f"a draft of {len(tokens)} tokens has {len(parents)} parents")
    if len(tokens) > row.max_nodes:
        raise DrafterError(f"a draft has {len(tokens)} nodes, {row.max_nodes} were asked for")
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        token = next(token for token in tokens if not 0 <= token < vocab_size)
        raise DrafterError(f"draft token {token} is outside the vocabulary 0..{vocab_size - 1}")
    try:
        tree = topology(parents)
    except ValueError as error:
        raise DrafterError(f"a draft is no tree: {error}") from error
    verified = _verified(draft.verify, tree)
    if not (drafter.capabilities.tree or _is_chain(tree, verified)):
        raise DrafterError("a draft has siblings, but the drafter's capabilities say tree=False")
    if draft.probs is not None:
        _check_law(draft.probs, tokens, verified, row.request, drafter, vocab_size)
    checked = CheckedDraft(
        tokens,
        tree,
        draft.probs,
        _num_cached(draft.num_cached, row, drafter),
        _confidence(draft.confidence, len(tokens)),
        resume=_resume(draft, row, drafter, tree),
    )
    return checked if verified is None else _split(checked, verified)


def _verified(verify: Any, tree: Topology) -> tuple[bool, ...] | None:
    """Which nodes are drafts; None: all are."""
    if verify is None:
        return None
    given = tuple(verify)
    if len(given) != len(tree) or not all(type(each) is bool for each in given):
        raise DrafterError(
            f"a draft's verify must be {len(tree)} times True or False, one a node, got {given}"
        )
    for node, parent in enumerate(tree.parents):
        if given[node] and parent >= 0 and not given[parent]:
            raise DrafterError(
                f"draft node {node} is to be verified, but its parent {parent} is not"
            )
    return None if all(given) else given


def _is_chain(tree: Topology, verified: Sequence[bool] | None) -> bool:
    """Whether no two nodes that are verified have the same parent."""
    if verified is None:
        return tree.is_chain
    parents = [parent for parent, each in zip(tree.parents, verified, strict=True) if each]
    return len(set(parents)) == len(parents)


def _split(draft: CheckedDraft, verified: Sequence[bool]) -> CheckedDraft:
    """`draft` without the nodes that are the drafter's own, and those as rows behind it."""
    nodes = [node for node, each in enumerate(verified) if each]
    places = (*nodes, *(node for node, each in enumerate(verified) if not each))
    number = {place: i for i, place in enumerate(places)} | {ROOT: ROOT}
    parents = tuple(number[draft.tree.parents[place]] for place in places)
    own = OwnRows(tuple(draft.tokens[place] for place in places[len(nodes) :]), parents, places)
    return CheckedDraft(
        tuple(draft.tokens[node] for node in nodes),
        topology(parents[: len(nodes)]),
        None if draft.probs is None else draft.probs[nodes],
        draft.num_cached,
        None if draft.confidence is None else tuple(draft.confidence[node] for node in nodes),
        own,
    )


def _confidence(values: Any, num_nodes: int) -> tuple[float, ...] | None:
    if values is None:
        return None
    given = tuple(map(float, values))
    if len(given) != num_nodes or not all(0.0 <= value <= 1.0 for value in given):
        raise DrafterError(
            f"a draft's confidence must be {num_nodes} numbers in 0..1, one a node, got {given}"
        )
    return given


def _resume(draft: Draft, row: Scheduled, drafter: Drafter, tree: Topology) -> LayerResume | None:
    """Whether the target's pass can go on from what a draft covers."""
    resume: Any = draft.resume
    if resume is None:
        return None
    layer, most = drafter.capabilities.target_layers, row.chain + len(tree)
    if not isinstance(resume, LayerResume) or not layer or resume.layer != layer:
        raise DrafterError(
            f"a draft goes on from {resume!r}, but the drafter's capabilities say "
            f"target_layers={layer}"
        )
    hidden: Any = resume.hidden
    if not isinstance(hidden, Tensor) or hidden.dim() != 2 or not 1 <= len(hidden) <= most:
        given = tuple(hidden.shape) if isinstance(hidden, Tensor) else hidden
        raise DrafterError(f"hidden states must be [1..{most} rows, width], got {given!r}")
    if draft.verify is not None and not all(draft.verify):
        raise DrafterError("a draft with rows of the drafter's own can't go on from hidden states")
    if row.chain <= len(hidden) < most and not tree.is_chain:
        raise DrafterError(
            f"a tree must be gone on from with all of its {most} rows, got {len(hidden)}"
        )
    return resume


def _num_cached(value: Any, row: Scheduled, drafter: Drafter) -> int:
    most = row.request.num_computed + row.chain
    if drafter.capabilities.cache is None:
        most = 0
    if type(value) is not int or not 0 <= value <= most:
        raise DrafterError(f"a draft's num_cached must be an integer in 0..{most}, got {value!r}")
    return value


def _ids(name: str, values: Any) -> tuple[int, ...]:
    try:
        return tuple(map(index, values))
    except TypeError as error:
        raise DrafterError(f"draft {name} must be integers, got {values!r}") from error


def _check_law(
    probs: Any,
    tokens: tuple[int, ...],
    verified: Sequence[bool] | None,
    request: Request,
    drafter: Drafter,
    vocab_size: int,
) -> None:
    """Whether `probs` can be the law that `tokens` were drawn from, where a rule reads it."""
    if drafter.capabilities.deterministic:
        raise DrafterError("a draft has probs, but the drafter's capabilities say deterministic")
    shape = (len(tokens), vocab_size)
    if not isinstance(probs, Tensor) or tuple(probs.shape) != shape:
        given = f"shape {tuple(probs.shape)}" if isinstance(probs, Tensor) else repr(probs)
        raise DrafterError(f"draft probs must be a tensor of shape {shape}, got {given}")
    if request.sampler.greedy or not request.verification.reads_draft_laws or not tokens:
        return
    nodes = [node for node in range(len(tokens)) if verified is None or verified[node]]
    laws = probs if verified is None else probs[nodes]
    totals = laws.sum(dim=1, dtype=torch.float64)
    if not (bool((laws >= 0).all()) and bool(((totals - 1).abs() <= LAW_TOLERANCE).all())):
        raise DrafterError("draft probs are no law: rows must be 0 or more and add up to 1")
    drawn = laws[range(len(nodes)), [tokens[node] for node in nodes]]
    if not bool((drawn > 0).all()):
        raise DrafterError(f"draft probs give a drawn token probability 0: {drawn.tolist()}")
