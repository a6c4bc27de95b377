"""What an engine does now, for the page that shows it: counts, gauges and the last step.

Knows an engine's tally and its policy's choices; knows no route. Counts only grow, so whoever asks
twice has the rates between; nothing is kept for those who ask, and a step costs nothing while
nobody does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from foredraft.core.counts import AcceptanceCounts
from foredraft.engine.async_engine import AsyncEngine
from foredraft.engine.observing import Commit
from foredraft.engine.request import Request
from foredraft.planning.policy import StepRecord
from foredraft.server.replies import Reply

WATCHED_SECONDS = 10.0  # that steps are noted after somebody has asked


class DraftedRequest(Reply):
    """A request of a step: draft tokens asked for, verified and accepted; `limit` left it less."""

    asked: int
    drafted: int
    accepted: int
    limit: str


class LastStep(Reply):
    """A step, why it drafted as it did, and what it took; `plain_seconds`: without drafts."""

    reason: str
    num_requests: int
    num_prompt_rows: int
    num_draft_rows: int
    num_positions: int
    drafter_seconds: float
    seconds: float
    plain_seconds: float | None
    requests: list[DraftedRequest]


class Pages(Reply):
    used: int
    cached: int
    free: int


class Counts(Reply):
    """Since the start; each only grows. Arrays are by position in a draft."""

    steps: int
    step_seconds: float
    generated_tokens: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    draft_emitted_tokens: int
    choices: int
    chosen_tokens: int
    reached_per_position: list[int]
    accepted_per_position: list[int]


class Live(Reply):
    """Seconds are of a clock without a date."""

    seconds: float
    models: list[str]
    method: str | None
    policy: str
    num_speculative_tokens: int
    running: int
    waiting: int
    pages: Pages
    counts: Counts
    last_step: LastStep | None


class Watch:
    """Observes one engine while somebody asks."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._until = 0.0
        self._last: LastStep | None = None
        engine.engine.observers.append(self)

    def committed(self, commits: Sequence[Commit]) -> None:
        """The tally counts those."""

    def ended(self, requests: Sequence[Request]) -> None:
        """The tally counts those."""

    def stepped(self, record: StepRecord) -> None:
        """Note a step that could draft, while somebody watches."""
        if not record.requests or time.monotonic() > self._until:
            return
        load, policy = record.load, self._engine.engine.scheduler.policy
        most = self._engine.num_speculative_tokens
        self._last = LastStep(
            reason=policy.explain(record),
            num_requests=load.num_requests,
            num_prompt_rows=load.num_rows - len(record.requests),
            num_draft_rows=record.num_draft_rows,
            num_positions=load.num_positions,
            drafter_seconds=record.drafter_seconds,
            seconds=record.seconds,
            plain_seconds=self._engine.metrics.tally.plain_seconds(load, policy),
            requests=[
                DraftedRequest(
                    asked=each.asked, drafted=each.num_rows, accepted=each.accepted,
                    limit=each.limit if each.asked < most else "",
                )
                for each in record.requests
            ],
        )  # fmt: skip

    def live(self, models: Sequence[str]) -> Live:
        """All of it, at one moment between two steps' commits."""
        self._until = time.monotonic() + WATCHED_SECONDS
        engine = self._engine
        scheduler, pool = engine.engine.scheduler, engine.engine.pool
        drafts = engine.engine.drafter is not None
        policy = "" if engine.speculative is None else engine.speculative.policy
        return Live(
            seconds=time.monotonic(),
            models=list(models),
            method=engine.method if drafts else None,
            policy=str(policy) if drafts else "",
            num_speculative_tokens=engine.num_speculative_tokens if drafts else 0,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages=Pages(used=scheduler.pages_in_use, cached=pool.num_idle, free=pool.num_free),
            counts=self._counts(),
            last_step=self._last,
        )

    def _counts(self) -> Counts:
        tally, sums = self._engine.metrics.tally, AcceptanceCounts()
        with tally.lock:
            for each in tally.types.values():
                sums.merge(each.counts)
            widths = [width for each in tally.types.values() for width in each.widths.values()]
            choices = sum(sum(width.counts) for width in widths)
            chosen = sum(width.total for width in widths)
            steps, seconds = tally.steps.num_steps, tally.steps.busy_seconds
        return Counts(
            steps=steps,
            step_seconds=seconds,
            generated_tokens=sums.num_emitted_tokens,
            drafts=sums.num_drafts,
            draft_tokens=sums.num_draft_tokens,
            accepted_tokens=sums.num_accepted_tokens,
            draft_emitted_tokens=sums.num_draft_emitted_tokens,
            choices=choices,
            chosen_tokens=int(chosen),
            reached_per_position=sums.reached_per_position,
            accepted_per_position=sums.accepted_per_position,
        )
