"""The two pure halves of a step around the target's pass: rows in, outcomes out. Nothing here
changes a request.

Knows plans, drafts and logits; knows neither pages' ownership, nor text, nor any drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from foredraft.core import coins
from foredraft.core.acceptance import Origin, Verdict, draw_from, match, rejection
from foredraft.core.errors import UserError
from foredraft.core.row_math import RowMath
from foredraft.core.sampling import History
from foredraft.engine.drafting import NO_DRAFT, CheckedDraft
from foredraft.engine.request import Request
from foredraft.engine.scheduler import Scheduled
from foredraft.kernels.interface import Segment
from foredraft.models.interface import FlatBatch

Decision = TypeVar("Decision")


@dataclass(frozen=True, slots=True)
class Window:
    """One request's rows in the pass, and where their logits lie; settled before the pass."""

    request: Request
    start: int  # position of the first chain row
    chain: int
    emits: bool  # the chain ends at the pending token, so a new token follows
    draft: CheckedDraft
    prompt_logits: int | None  # row of the first chain row's logits, where the prompt's are asked
    root_logits: int  # row of the pending token's logits; the draft nodes' follow it

    @property
    def num_nodes(self) -> int:
        return len(self.draft.tokens)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What verification decided for one request.

    `error` ends that request alone, after the draft tokens accepted before the row that failed.
    """

    accepted: tuple[int, ...] = ()  # draft nodes of the accepted path
    next_token: int | None = None  # None: the prompt is not finished, or an error
    origin: Origin = Origin.PLAIN  # of next_token
    error: str | None = None


class _BadRow(Exception):  # noqa: N818 - carries a node from a rule to `verify`
    """No token can be had at this node: bans that leave none, logits that are no numbers."""

    def __init__(self, node: int, message: str) -> None:
        super().__init__(message)
        self.node = node


def build_windows(
    rows: Sequence[Scheduled], drafts: Mapping[str, CheckedDraft]
) -> tuple[list[Window], FlatBatch]:
    """Lay all requests' rows end to end in one flat batch: prompt chunks, pending tokens, draft
    nodes.
    """
    windows: list[Window] = []
    token_ids: list[int] = []
    segments: list[Segment] = []
    logit_rows: list[int] = []
    for scheduled in rows:
        request, chain = scheduled.request, scheduled.chain
        draft = drafts.get(request.id, NO_DRAFT)
        start, first_row, first_logits = request.num_computed, len(token_ids), len(logit_rows)
        token_ids += request.tokens[start : start + chain]
        token_ids += draft.tokens
        segments.append(Segment(start, chain, draft.tree.parents, request.pages))
        of_prompt = request.params.prompt_logprobs is not None and start < request.num_prompt
        skipped = 0 if of_prompt else chain - 1
        if scheduled.emits or of_prompt:
            logit_rows += range(first_row + skipped, len(token_ids))
        windows.append(
            Window(
                request=request,
                start=start,
                chain=chain,
                emits=scheduled.emits,
                draft=draft,
                prompt_logits=first_logits if of_prompt else None,
                root_logits=first_logits + chain - 1 - skipped,
            )
        )
    return windows, FlatBatch(token_ids, segments, logit_rows)


def verify(windows: Sequence[Window], logits: Tensor, row_math: RowMath) -> list[Outcome]:
    """One outcome per window. `logits` `[R, V]` as asked for by `build_windows`; never modified."""
    return [_outcome(window, logits, row_math) for window in windows]


def _outcome(window: Window, logits: Tensor, row_math: RowMath) -> Outcome:
    if not window.emits:
        return Outcome()
    rows = logits[window.root_logits : window.root_logits + 1 + window.num_nodes]
    try:
        verdict = _verdict(window, rows, row_math)
    except _BadRow as bad:
        return Outcome(accepted=window.draft.tree.path(bad.node), error=str(bad))
    return Outcome(verdict.accepted, verdict.next_token, verdict.origin)


def _verdict(window: Window, rows: Tensor, row_math: RowMath) -> Verdict:
    """`rows` `[n + 1, V]`: the pending token's logits, then each draft node's."""
    request, draft = window.request, window.draft
    sampler, tokens, tree = request.sampler, draft.tokens, draft.tree
    root = request.num_tokens
    if sampler.plain_argmax:
        return match(tree, tokens, _greedy_draw(window, rows, row_math))
    if sampler.greedy or request.coupled:
        return match(tree, tokens, _target_draw(window, rows))

    def law(node: int) -> Tensor:
        return sampler.law(rows[node + 1], _history(window, node))

    def independent_draw(node: int) -> int:
        # Sample-and-match on deterministic siblings (algorithms 1c-ii): a fresh draw a node.
        coin = coins.coin(request.seed, root, coins.RESIDUAL, node + 1)
        return draw_from(law(node), coin, row_math)

    if not tree.is_chain:
        return match(tree, tokens, _judged(independent_draw))
    return rejection(
        tokens,
        _judged(law),
        draft.probs,
        lambda offset: coins.coin(request.seed, root, coins.ACCEPT, offset),
        coins.coin(request.seed, root, coins.RESIDUAL, 0),
        row_math,
    )


def _judged(decide: Callable[[int], Decision]) -> Callable[[int], Decision]:
    """`decide`, with what makes a row unusable told apart from every other failure."""

    def judged(node: int) -> Decision:
        try:
            return decide(node)
        except (UserError, FloatingPointError) as error:
            raise _BadRow(node, str(error)) from error

    return judged


def _history(window: Window, node: int) -> History:
    history, draft = window.request.history, window.draft
    return history.extended([draft.tokens[i] for i in draft.tree.path(node)])


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

    return _judged(draw)


def _target_draw(window: Window, rows: Tensor) -> Callable[[int], int]:
    """The target's own token at a node: a function of the seed and the position alone."""
    request, tree = window.request, window.draft.tree

    def draw(node: int) -> int:
        position = request.num_tokens + (tree.depths[node] if node >= 0 else 0)
        return request.sampler.token(rows[node + 1], _history(window, node), request.seed, position)

    return _judged(draw)
