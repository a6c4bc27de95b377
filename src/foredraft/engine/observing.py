"""What a policy is told of a step: lengths, times and what became of each draft.

Knows the parts of a step that is committed; changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.engine.scheduler import Plan, request_type
from foredraft.engine.step import Outcome, Window
from foredraft.planning.policy import Judged, StepRecord


def step_record(
    plan: Plan,
    windows: Sequence[Window],
    outcomes: Sequence[Outcome],
    *,
    drafter_seconds: float,
    seconds: float,
) -> StepRecord:
    """The record of a step; `seconds` are those that were not the drafter's.

    What verification accepted counts, whatever a stop cut off afterwards: a rate of acceptance is
    not to depend on where texts end.
    """
    judged = [
        Judged(
            row.request.id,
            request_type(row.request),
            asked=row.max_nodes,
            drafted=window.draft.tree.max_depth,
            accepted=len(outcome.accepted),
            ended=row.request.finished,
        )
        for row, window, outcome in zip(plan.rows, windows, outcomes, strict=True)
        if window.emits
    ]
    draft_rows = sum(window.num_nodes for window in windows)
    return StepRecord(plan.load, judged, draft_rows, drafter_seconds, seconds)
