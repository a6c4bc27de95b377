"""The two pure halves of a step around the target's pass: rows in, verdicts out. Nothing here
changes a request.

Knows plans, drafts and logits; knows neither pages' ownership, nor text, nor any drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from foredraft.core import coins
from foredraft.core.acceptance import Verdict, draw_from, match, rejection
from foredraft.core.errors import UserError
from foredraft.core.row_math import RowMath
from foredraft.core.sampling import History
from foredraft.core.trees import Topology, topology
from foredraft.drafters.interface import Draft
from foredraft.engine.request import Request
from foredraft.engine.scheduler import Scheduled
from foredraft.kernels.interface import Segment
from foredraft.models.interface import FlatBatch


class DrafterError(RuntimeError):
    """A drafter broke its contract; nothing of the step was committed."""


@dataclass(frozen=True, slots=True)
class Window:
    """One request's rows in the pass: where its logits lie, and the draft they verify."""

    scheduled: Scheduled
    draft: Draft
    tree: Topology
    first_row: int  # flat row of its first chain token
    # row of the logits that belongs to its pending token; of its first chain row for prompt
    # logprobs
    first_logits: int

    @property
    def request(self) -> Request:
        return self.scheduled.request

    @property
    def num_nodes(self) -> int:
        return len(self.draft.tokens)

    @property
    def wants_prompt_logprobs(self) -> bool:
        request = self.request
        return (
            request.params.prompt_logprobs is not None and request.num_computed < request.num_prompt
        )

    @property
    def root_logits(self) -> int:
        """Row of the logits after the pending token."""
        skipped = self.scheduled.chain - 1 if self.wants_prompt_logprobs else 0
        return self.first_logits + skipped


@dataclass(frozen=True, slots=True)
class Outcome:
    """What verification decided for one request; `error` ends that request alone."""

    verdict: Verdict | None  # None: the prompt is not finished, or an error
    error: str | None = None


def check_draft(draft: Draft, max_nodes: int, vocab_size: int) -> Topology:
    """The draft's topology. Raises DrafterError for a draft the engine can't verify."""
    tokens, parents = draft.tokens, tuple(draft.parents)
    if len(tokens) != len(parents):
        raise DrafterError(f"draft of {len(tokens)} tokens has {len(parents)} parents")
    if len(tokens) > max_nodes:
        raise DrafterError(f"draft has {len(tokens)} nodes, {max_nodes} were asked for")
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise DrafterError(f"draft token {token} is outside the vocabulary 0..{vocab_size - 1}")
    if draft.probs is not None and tuple(draft.probs.shape) != (len(tokens), vocab_size):
        raise DrafterError(
            f"draft probs have shape {tuple(draft.probs.shape)}, "
            f"expected {(len(tokens), vocab_size)}"
        )
    try:
        return topology(parents)
    except ValueError as error:
        raise DrafterError(f"draft is no tree: {error}") from error


def build_windows(
    rows: Sequence[Scheduled], drafts: dict[str, Draft], vocab_size: int
) -> tuple[list[Window], FlatBatch]:
    """Lay all requests' rows end to end: prompt chunks, pending tokens and draft nodes in one flat
    batch.
    """
    windows: list[Window] = []
    token_ids: list[int] = []
    segments: list[Segment] = []
    logit_rows: list[int] = []
    for scheduled in rows:
        request, chain = scheduled.request, scheduled.chain
        draft = drafts.get(request.id, _NO_DRAFT)
        tree = check_draft(draft, scheduled.max_nodes, vocab_size)
        window = Window(scheduled, draft, tree, len(token_ids), len(logit_rows))
        windows.append(window)
        start = request.num_computed
        token_ids += request.tokens[start : start + chain]
        token_ids += draft.tokens
        segments.append(Segment(start, chain, tuple(draft.parents), request.pages))
        if scheduled.emits or window.wants_prompt_logprobs:
            skipped = 0 if window.wants_prompt_logprobs else chain - 1
            logit_rows += range(window.first_row + skipped, len(token_ids))
    return windows, FlatBatch(token_ids, segments, logit_rows)


_NO_DRAFT = Draft()


def verify(windows: Sequence[Window], logits: Tensor, row_math: RowMath) -> list[Outcome]:
    """One outcome per window. `logits` `[R, V]` as asked for by `build_windows`; never modified."""
    outcomes: list[Outcome] = []
    for window in windows:
        if not window.scheduled.emits:
            outcomes.append(Outcome(None))
            continue
        root = window.root_logits
        rows = logits[root : root + 1 + window.num_nodes]
        try:
            outcomes.append(Outcome(_verify_one(window, rows, row_math)))
        except (
            UserError,
            FloatingPointError,
        ) as error:  # bans that leave no token, logits that are not numbers
            outcomes.append(Outcome(None, str(error)))
    return outcomes


def _verify_one(window: Window, rows: Tensor, row_math: RowMath) -> Verdict:
    """`rows` `[n + 1, V]`: the pending token's logits, then each draft node's."""
    request, draft, tree = window.request, window.draft, window.tree
    sampler, tokens = request.sampler, draft.tokens
    if sampler.plain_argmax:
        return match(tree, tokens, _greedy_draw(window, rows, row_math))
    if sampler.greedy or request.coupled:
        return match(tree, tokens, _target_draw(window, rows))
    if not tree.is_chain and draft.probs is not None:
        raise DrafterError("a sampled draft must be a chain: no rule for sampled siblings yet")
    if not tree.is_chain:
        return match(tree, tokens, _independent_draw(window, rows, row_math))
    root = request.num_tokens
    return rejection(
        tokens,
        lambda node: sampler.law(rows[node + 1], _history(window, node)),
        draft.probs,
        lambda i: coins.coin(request.seed, root, coins.ACCEPT, i),
        coins.coin(request.seed, root, coins.RESIDUAL, 0),
        row_math,
    )


def _history(window: Window, node: int) -> History:
    history = window.request.history
    if node < 0:
        return history
    path = window.tree.path(node)
    return history.extended([window.draft.tokens[i] for i in path])


def _greedy_draw(window: Window, rows: Tensor, row_math: RowMath) -> Callable[[int], int]:
    """The argmax of every row at once: no processor can change it."""
    try:
        best = row_math.argmax_rows(rows)
    except FloatingPointError:  # in a row that the accepted path may never reach
        return _target_draw(window, rows)
    sampler, history = window.request.sampler, window.request.history

    def draw(node: int) -> int:
        sampler.check_chosen(rows[node + 1], best[node + 1], history)
        return best[node + 1]

    return draw


def _target_draw(window: Window, rows: Tensor) -> Callable[[int], int]:
    """The target's own token at a node: a function of (seed, absolute position) alone."""
    request, tree = window.request, window.tree

    def draw(node: int) -> int:
        position = request.num_tokens + (tree.depths[node] if node >= 0 else 0)
        return request.sampler.token(rows[node + 1], _history(window, node), request.seed, position)

    return draw


def _independent_draw(window: Window, rows: Tensor, row_math: RowMath) -> Callable[[int], int]:
    """Sample-and-match on deterministic siblings (algorithms 1c-ii): a fresh draw at each visited
    node.
    """
    request = window.request

    def draw(node: int) -> int:
        coin = coins.coin(request.seed, request.num_tokens, coins.RESIDUAL, node + 1)
        return draw_from(
            request.sampler.law(rows[node + 1], _history(window, node)), coin, row_math
        )

    return draw
