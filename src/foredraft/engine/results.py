"""What a drafter is told of a step: every row that was computed, and what became of it.

Knows windows, outcomes and what the capabilities ask for; changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from torch import Tensor

from foredraft.core.row_math import RowMath
from foredraft.core.trees import topology
from foredraft.drafters.interface import Drafter, StepResult, StepRow
from foredraft.engine.scheduler import Scheduled
from foredraft.engine.step import Outcome, Window

Features = Tensor | None  # [T, F] of all rows of the pass; None: nobody asked
TopIds = Sequence[Sequence[int]]  # by row of logits; empty: nobody asked


def wanted_top_ids(
    drafter: Drafter | None, windows: Sequence[Window], logits: Tensor, row_math: RowMath
) -> TopIds:
    """The top ids of all rows of the pass at once, where the drafter asks for them and somebody is
    drafted for.
    """
    count = 0 if drafter is None else drafter.capabilities.top_ids
    if not count or not any(window.speculates for window in windows):
        return ()
    return row_math.top_ids(logits, count)


def wanted_features(drafter: Drafter | None, rows: Sequence[Scheduled]) -> tuple[int, ...]:
    """The depths that the drafter asks for, where somebody is still to be drafted for."""
    if drafter is None or not any(row.request.max_draft_nodes > 0 for row in rows):
        return ()
    return tuple(drafter.capabilities.feature_layers)


def step_result(
    window: Window,
    outcome: Outcome,
    committed: Sequence[int],
    tops: TopIds,
    features: Features = None,
) -> StepResult:
    """`committed` are the tokens of the outcome that were kept."""
    request, start, chain = window.request, window.start, window.chain
    accepted = set(outcome.accepted[: len(committed)])
    best = _by_row(window, tops)
    rows = [StepRow(start + i, -1, request.tokens[start + i], True, best[i]) for i in range(chain)]
    rows += _draft_rows(window, accepted, best[chain:])
    return StepResult(
        id=request.id,
        rows=rows,
        num_accepted=len(accepted),
        next_token=committed[-1] if committed else None,
        cache_salt=request.cache_salt,
        features=_features(window, features) if request.max_draft_nodes > 0 else None,
    )


def _features(window: Window, features: Features) -> Features:
    """Those of a window's rows, in the order in which the drafter is told of them."""
    if features is None:
        return None
    rows = features[window.first_row : window.first_row + window.num_rows]
    own = window.draft.own
    if own is None:
        return rows
    told = sorted(range(len(own.places)), key=own.places.__getitem__)
    return rows[[*range(window.chain), *(window.chain + i for i in told)]]


def _draft_rows(window: Window, accepted: Set[int], best: TopIds) -> Sequence[StepRow]:
    """Nodes, and rows of the drafter's own, as the drafter has numbered them."""
    draft, root = window.draft, window.start + window.chain - 1
    own = draft.own
    if own is None:
        return [
            StepRow(root + draft.tree.depths[node], node, token, node in accepted, best[node])
            for node, token in enumerate(draft.tokens)
        ]
    depths = topology(own.parents).depths
    rows = [
        StepRow(root + depths[i], place, token, i in accepted, best[i])
        for i, (place, token) in enumerate(
            zip(own.places, (*draft.tokens, *own.tokens), strict=True)
        )
    ]
    return sorted(rows, key=lambda row: row.node)


def _by_row(window: Window, tops: TopIds) -> TopIds:
    """The top ids of each row of a window, none where it has no logits or is not drafted for."""
    num_rows = window.num_rows
    if not tops or not window.speculates:
        return ((),) * num_rows
    if window.prompt_logits is not None:
        return tops[window.prompt_logits : window.prompt_logits + num_rows]
    without = ((),) * (window.chain - 1)
    if not window.emits:
        return (*without, ())
    end = window.root_logits + num_rows - len(without)
    return (*without, *tops[window.root_logits : end])
