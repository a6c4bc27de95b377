"""What an engine's steps were like in a stretch of time: widths, acceptance, seconds.

Knows records of steps; knows neither clients nor files. An observer of an engine: it runs in the
thread of the steps and only appends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from statistics import median
from typing import Any

from foredraft.bench.serve.traces import Window
from foredraft.bench.serve.turns import Clock
from foredraft.engine.observing import Commit
from foredraft.engine.request import Request
from foredraft.planning.policy import Judged, StepRecord


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A step, when it was over, and how long after the one before it that was: all that a step
    costs a busy server, what happens between two of them included. By the server's own clock.
    """

    record: StepRecord
    at: float
    cycle: float | None = None  # seconds; None: no step was before it

    @property
    def middle(self) -> float:
        """A time inside the step. Its tokens bear a time shortly before `at`."""
        return self.at - (self.record.seconds + self.record.drafter_seconds) / 2


class StepLog:
    """Remembers every step of the engine that it observes. After each it does what a measurement
    does `between` two, in the engine's thread, while `clock` stands still.
    """

    def __init__(self, clock: Clock, between: Callable[[], None] = lambda: None) -> None:
        self.steps: list[LoggedStep] = []
        self._clock, self._between = clock, between

    def committed(self, commits: Sequence[Commit]) -> None:
        """Nothing that the step's record doesn't say."""

    def stepped(self, record: StepRecord) -> None:
        # Drafts themselves are not looked at again, and would be many for collections to look at.
        judged = [replace(each, offer=None, tried=()) for each in record.requests]
        record = replace(record, requests=judged)
        now = self._clock.now()
        cycle = now - self.steps[-1].at if self.steps else None
        self.steps.append(LoggedStep(record, now, cycle))
        with self._clock.stopped():
            self._between()

    def ended(self, requests: Sequence[Request]) -> None:
        """Nothing: clients see how requests end."""

    def take(self, window: Window) -> list[LoggedStep]:
        """The steps of a window; all are forgotten then."""
        steps, self.steps = self.steps, []
        return [each for each in steps if window.holds(each.middle)]


@dataclass(frozen=True, slots=True)
class Counters:
    """An engine's totals at one moment."""

    part_seconds: Mapping[str, float]  # of steps that read no prompt: drafter, target, rest
    preemptions: int

    def since(self, before: Counters) -> Counters:
        parts = {
            name: seconds - before.part_seconds[name] for name, seconds in self.part_seconds.items()
        }
        return Counters(parts, self.preemptions - before.preemptions)


@dataclass(slots=True)
class StepCounts:
    """Sums over steps; they add up."""

    steps: int = 0
    seconds: float = 0.0  # of whole steps
    drafter_seconds: float = 0.0
    deciding: int = 0  # steps in which a request could have had a draft
    undrafted: int = 0  # ... and no draft token was verified
    chances: int = 0  # requests that could have had a draft, over all steps
    asked: int = 0  # draft tokens
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    asked_at: list[int] = field(default_factory=list)  # [K] drafts asked to be so deep
    drafted_at: list[int] = field(default_factory=list)  # [K] ... that were
    reached_at: list[int] = field(default_factory=list)  # [K] ... all before was accepted
    accepted_at: list[int] = field(default_factory=list)  # [K]

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        self.seconds += record.seconds + record.drafter_seconds
        self.drafter_seconds += record.drafter_seconds
        if record.requests:
            self.deciding += 1
            self.undrafted += not any(judged.drafted for judged in record.requests)
        for judged in record.requests:
            self._add(judged)

    def _add(self, judged: Judged) -> None:
        self.chances += 1
        self.asked += judged.asked
        self.drafts += bool(judged.drafted)
        self.drafted += judged.drafted
        self.accepted += judged.accepted
        _count(self.asked_at, judged.asked)
        _count(self.drafted_at, judged.drafted)
        _count(self.reached_at, min(judged.accepted + 1, judged.drafted))
        _count(self.accepted_at, judged.accepted)

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> StepCounts:
        counts = cls()
        for record in records:
            counts.add(record)
        return counts

    @classmethod
    def sum(cls, many: Iterable[StepCounts]) -> StepCounts:
        """All of them together."""
        total = cls()
        for counts in many:
            for each in fields(cls):
                mine, theirs = getattr(total, each.name), getattr(counts, each.name)
                if isinstance(mine, list):
                    theirs = [a + b for a, b in zip_longest(mine, theirs, fillvalue=0)]
                    setattr(total, each.name, theirs)
                else:
                    setattr(total, each.name, mine + theirs)
        return total

    @property
    def width(self) -> float:
        """Draft tokens asked for, a request and step."""
        return self.asked / self.chances if self.chances else 0.0

    @property
    def undrafted_share(self) -> float:
        """Steps of width 0, of those that could have drafted: no draft token was verified, because
        none was asked for, found, or worth its row.
        """
        return self.undrafted / self.deciding if self.deciding else 1.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts; 1 where nothing was drafted."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def acceptance(self) -> list[float]:
        """`[K]` P(position i is accepted | it was drafted and all before it were accepted)."""
        reached = [each for each in self.reached_at if each]
        return [self.accepted_at[i] / n if i < len(self.accepted_at) else 0.0
                for i, n in enumerate(reached)]  # fmt: skip

    @property
    def filled(self) -> list[float]:
        """`[K]` P(the drafter has so many tokens | it is asked for them)."""
        asked = [each for each in self.asked_at if each]
        return [self.drafted_at[i] / n if i < len(self.drafted_at) else 0.0
                for i, n in enumerate(asked)]  # fmt: skip


def _count(totals: list[int], depth: int) -> None:
    """Add 1 to the first `depth` totals."""
    totals += [0] * (depth - len(totals))
    for i in range(depth):
        totals[i] += 1


class StepCosts:
    """Seconds of a busy server's steps by what they carried, those that read prompts apart; the
    drafter's are not among them.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], list[float]] = {}
        self._positions: dict[tuple[int, int], int] = {}
        self._reading: dict[tuple[int, int], tuple[int, float, int]] = {}

    def add(self, step: LoggedStep, slowness: float = 1.0) -> None:
        """`slowness`: of the machine at that time."""
        if step.cycle is None:
            return
        record, load = step.record, step.record.load
        spent = (step.cycle - record.drafter_seconds) / slowness
        key = (load.num_requests + record.num_draft_rows, load.num_requests)
        prompt_rows = load.num_rows - load.num_requests  # beside one row a request
        if prompt_rows:
            rows, seconds, steps = self._reading.get(key, (0, 0.0, 0))
            self._reading[key] = rows + prompt_rows, seconds + spent, steps + 1
            return
        self._seconds.setdefault(key, []).append(spent)
        self._positions[key] = self._positions.get(key, 0) + load.num_positions

    def decoding(self) -> list[dict[str, Any]]:
        """One entry a kind: median seconds; positions are those of all requests together."""
        return [
            {
                "rows": rows,
                "requests": requests,
                "positions": round(self._positions[rows, requests] / len(seconds)),
                "seconds": median(seconds),
                "steps": len(seconds),
            }
            for (rows, requests), seconds in sorted(self._seconds.items())
        ]

    def reading(self) -> list[dict[str, Any]]:
        """One entry a kind: sums. `rows` are those without the prompts'."""
        return [
            {
                "rows": rows,
                "requests": requests,
                "prompt_rows": prompt_rows,
                "seconds": seconds,
                "steps": steps,
            }
            for (rows, requests), (prompt_rows, seconds, steps) in sorted(self._reading.items())
        ]
