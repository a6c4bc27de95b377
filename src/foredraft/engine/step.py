"""The two pure halves of a step around the target's pass: rows in, outcomes out. Nothing here
changes a request.

Knows plans, drafts and logits; knows neither pages' ownership, nor text, nor any drafter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from foredraft.core import coins
from foredraft.core.acceptance import BadRow, Origin, Verdict, Walk, decide_all, match
from foredraft.core.block_verification import block
from foredraft.core.errors import UserError
from foredraft.core.rejection import rejection
from foredraft.core.row_math import RowMath
from foredraft.core.sampling import Row, answers, failure
from foredraft.core.synthetic import synthetic
from foredraft.core.typical import typical
from foredraft.engine.config import Rule
from foredraft.engine.drafting import NO_DRAFT, CheckedDraft
from foredraft.engine.request import Request
from foredraft.engine.scheduler import Scheduled
from foredraft.grammar.guide import Guide, guide_of
from foredraft.kernels.interface import Segment
from foredraft.models.interface import FlatBatch, LayerResume

Reply = int | Tensor | BadRow  # what the target says at a node: its own token, or its law


@dataclass(frozen=True, slots=True)
class Window:
    """One request's rows in the pass, and where their logits lie; settled before the pass."""

    request: Request
    first_row: int  # of the pass
    start: int  # position of the first chain row
    chain: int
    emits: bool  # the chain ends at the pending token, so a new token follows
    speculates: bool  # drafted for, now or once its prompt is read
    draft: CheckedDraft
    prompt_logits: int | None  # row of the first chain row's logits, where the prompt's are asked
    root_logits: int  # row of the pending token's logits; the draft nodes' follow it
    guide: Guide | None  # of the output's grammar, where there is one

    @property
    def num_nodes(self) -> int:
        """Draft tokens to be verified."""
        return len(self.draft.tokens)

    @property
    def num_own(self) -> int:
        """Rows behind them that are the drafter's own."""
        return 0 if self.draft.own is None else len(self.draft.own.tokens)

    @property
    def num_rows(self) -> int:
        return self.chain + self.num_nodes + self.num_own

    def path(self, node: int) -> list[int]:
        """The draft tokens from the pending token down to `node`."""
        return [self.draft.tokens[i] for i in self.draft.tree.path(node)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What verification decided for one request.

    `error` ends that request alone, after the draft tokens accepted before the row that failed.
    """

    accepted: tuple[int, ...] = ()  # draft nodes of the accepted path
    next_token: int | None = None  # None: the prompt is not finished, or an error
    origin: Origin = Origin.PLAIN  # of next_token
    error: str | None = None


def build_windows(
    rows: Sequence[Scheduled],
    drafts: Mapping[str, CheckedDraft],
    feature_layers: Sequence[int] = (),
) -> tuple[list[Window], FlatBatch]:
    """Lay all requests' rows end to end in one flat batch: prompt chunks, pending tokens, draft
    nodes, and rows of the drafter's own.
    """
    windows: list[Window] = []
    token_ids: list[int] = []
    segments: list[Segment] = []
    logit_rows: list[int] = []
    resumes: dict[int, LayerResume] = {}
    for scheduled in rows:
        request, chain = scheduled.request, scheduled.chain
        draft = drafts.get(request.id, NO_DRAFT)
        start, first_row, first_logits = request.num_computed, len(token_ids), len(logit_rows)
        token_ids += request.tokens[start : start + chain]
        token_ids += draft.tokens
        parents = draft.tree.parents
        if draft.resume is not None:
            # Of a chain that was cut short, as much as is left.
            hidden = draft.resume.hidden[: chain + len(draft.tokens)]
            resumes[len(segments)] = LayerResume(draft.resume.layer, hidden)
        if draft.own is not None:
            token_ids += draft.own.tokens
            parents = draft.own.parents
        segments.append(Segment(start, chain, parents, request.pages))
        of_prompt = request.params.prompt_logprobs is not None and start < request.num_prompt
        skipped = 0 if of_prompt else chain - 1
        if scheduled.emits or of_prompt:
            logit_rows += range(first_row + skipped, len(token_ids))
        windows.append(
            Window(
                request=request,
                first_row=first_row,
                start=start,
                chain=chain,
                emits=scheduled.emits,
                speculates=scheduled.speculates,
                draft=draft,
                prompt_logits=first_logits if of_prompt else None,
                root_logits=first_logits + chain - 1 - skipped,
                guide=guide_of(request.matcher if scheduled.emits else None),
            )
        )
    return windows, FlatBatch(token_ids, segments, logit_rows, resumes, feature_layers)


def verify(windows: Sequence[Window], logits: Tensor, row_math: RowMath) -> list[Outcome]:
    """One outcome per window. `logits` `[R, V]` as asked for by `build_windows`; never modified."""
    emitting = [window for window in windows if window.emits]
    verdicts = iter(
        decide_all(
            [_walk(window, row_math) for window in emitting],
            partial(_answer, emitting, logits, row_math, _best_ids(emitting, logits, row_math)),
        )
    )
    return [_outcome(window, next(verdicts)) if window.emits else Outcome() for window in windows]


def _outcome(window: Window, verdict: Verdict | BadRow) -> Outcome:
    if isinstance(verdict, BadRow):
        return Outcome(accepted=window.draft.tree.path(verdict.node), error=str(verdict))
    if window.guide is not None:
        tokens = [window.draft.tokens[node] for node in verdict.accepted]
        if not window.guide.follows([*tokens, verdict.next_token]):
            error = f"the grammar can't go on from token {verdict.next_token}, which it allowed"
            return Outcome(accepted=verdict.accepted, error=error)
    return Outcome(verdict.accepted, verdict.next_token, verdict.origin)


def _walk(window: Window, row_math: RowMath) -> Walk[Any]:
    """The rule that judges this window's draft.

    Coins of all rules but the coupled one are keyed by the position of the step's first new token:
    whether one is used depends on others, so it must not come up again in a later step.
    """
    request, draft, config = window.request, window.draft, window.request.verification
    if _by_own_token(window):
        return match(draft.tree, draft.tokens)
    accept_coin = partial(coins.coin, request.seed, request.num_tokens, coins.ACCEPT)
    residual_coin = coins.coin(request.seed, request.num_tokens, coins.RESIDUAL)
    if config.rule is Rule.BLOCK:
        return block(draft.tokens, draft.probs, accept_coin, residual_coin, row_math)
    if config.rule is Rule.TYPICAL:
        bar = config.posterior_threshold, config.posterior_alpha
        return typical(draft.tree, draft.tokens, residual_coin, row_math, *bar)
    if config.rule is Rule.SYNTHETIC:
        rates = config.synthetic_acceptance_rates
        return synthetic(draft.tree, rates, accept_coin(0), residual_coin, row_math)
    return rejection(draft.tree, draft.tokens, draft.probs, accept_coin, residual_coin, row_math)


def _by_own_token(window: Window) -> bool:
    """Whether drafts are compared with the target's own token: greedy and coupled."""
    request = window.request
    if request.verification.rule is Rule.SYNTHETIC:
        return False
    return request.sampler.greedy or request.coupled


def _best_ids(windows: Sequence[Window], logits: Tensor, row_math: RowMath) -> Sequence[int]:
    """The argmax of every row of the pass at once, where some request is decided by it alone."""
    if any(window.request.sampler.plain_argmax for window in windows):
        return row_math.argmax_rows(logits)
    return ()


def _answer(
    windows: Sequence[Window],
    logits: Tensor,
    row_math: RowMath,
    best: Sequence[int],
    asked: Sequence[tuple[int, int]],
) -> list[Reply]:
    """What the target says at (window, node), as the window's rule asks for it; all rows at once.

    What makes a row unusable is an answer; every other failure is raised.
    """
    replies: dict[int, Reply | UserError] = {}
    rows: dict[int, tuple[Row, bool]] = {}
    for number, (index, node) in enumerate(asked):
        window = windows[index]
        request, at = window.request, window.root_logits + 1 + node
        depth = window.draft.tree.depths[node] if node >= 0 else 0
        by_own_token = _by_own_token(window)
        if by_own_token and request.sampler.plain_argmax:
            value = logits[at, best[at]].item()
            error = failure(value, best[at], request.history.num_output + depth)
            replies[number] = best[at] if error is None else error
            continue
        position = request.num_tokens + depth
        path = window.path(node)
        try:
            mask = None if window.guide is None else window.guide.mask(path)
        except UserError as error_of_grammar:
            replies[number] = error_of_grammar
            continue
        row = Row(
            request.sampler,
            logits[at],
            request.history.extended(path),
            request.seed,
            position,
            None if mask is None else mask.to(logits.device),
        )
        rows[number] = row, by_own_token
    if rows:
        replies |= zip(rows, answers(list(rows.values()), row_math), strict=True)
    return [
        BadRow(node, str(reply)) if isinstance(reply := replies[number], UserError) else reply
        for number, (_, node) in enumerate(asked)
    ]
