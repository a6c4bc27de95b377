"""What those who watch are told of a step: a policy, metrics.

Knows the parts of a step that is committed; changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from foredraft.core.trees import ROOT
from foredraft.engine.drafting import CheckedDraft
from foredraft.engine.request import Request
from foredraft.engine.scheduler import Plan
from foredraft.engine.step import Outcome, Window
from foredraft.planning.policy import Judged, Offer, StepRecord, Tried


@dataclass(frozen=True, slots=True)
class Commit:
    """What a step committed of one request; the numbers are those that its counts recorded."""

    request: Request
    num_draft_tokens: int  # verified
    depth: int  # of their tree
    num_accepted: int  # kept
    num_emitted: int  # 0: its prompt is still being read, or an error

    @classmethod
    def of(cls, window: Window, outcome: Outcome, num_emitted: int) -> Commit:
        """`num_emitted` tokens of the outcome were kept."""
        accepted = min(num_emitted, len(outcome.accepted))
        depth = window.draft.tree.max_depth
        return cls(window.request, window.num_nodes, depth, accepted, num_emitted)


class Observer(Protocol):
    """Watches an engine, in the thread that runs its steps; changes nothing."""

    def committed(self, commits: Sequence[Commit]) -> None:
        """A step was committed; told of every one, whatever fails after it."""

    def stepped(self, record: StepRecord) -> None:
        """... and where its seconds went; told after all else, of every one likewise."""

    def ended(self, requests: Sequence[Request]) -> None:
        """Requests that have ended, in whatever way; after an interrupt one may be told twice."""


def _tried(draft: CheckedDraft, outcome: Outcome) -> list[Tried]:
    """The verified nodes whose parents were accepted."""
    accepted = {ROOT, *outcome.accepted}
    tried = []
    for node, parent in enumerate(draft.tree.parents):
        if parent in accepted:
            stated = None if draft.confidence is None else draft.confidence[node]
            tried.append(Tried(draft.tree.depths[node] - 1, stated, node in accepted))
    return tried


def step_record(
    plan: Plan,
    windows: Sequence[Window],
    outcomes: Sequence[Outcome],
    offers: Mapping[str, Offer],
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
            row.request.request_type,
            asked=row.max_nodes,
            drafted=window.draft.tree.max_depth,
            accepted=len(outcome.accepted),
            ended=row.request.finished,
            limit=row.limit,
            offer=offers.get(row.request.id),
            tried=_tried(window.draft, outcome),
            num_own=window.num_own,
            num_nodes=window.num_nodes,
        )
        for row, window, outcome in zip(plan.rows, windows, outcomes, strict=True)
        if window.emits
    ]
    draft_rows = sum(window.num_nodes + window.num_own for window in windows)
    return StepRecord(plan.load, judged, draft_rows, drafter_seconds, seconds)
