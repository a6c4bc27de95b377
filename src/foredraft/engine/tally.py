"""What an engine has done so far, in plain numbers that only grow: tokens, drafts, seconds.

Knows steps that are committed and requests that have ended; knows no metric's name and no format.
Acceptance is counted by the same function that counts it for each request, from the same numbers,
so the sums agree.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from foredraft.core.counts import AcceptanceCounts
from foredraft.engine.observing import Commit
from foredraft.engine.request import Request
from foredraft.planning.confident import learning
from foredraft.planning.policy import (
    MAX_TYPES,
    OTHER_TYPES,
    Judged,
    Load,
    Policy,
    StepRecord,
)

SHORT_SECONDS = (
    *(0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
LONG_SECONDS = (
    *(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
TOKENS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 24, 32, 64)


class Distribution:
    """Counts of values up to each bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last: beyond every bound
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass(slots=True)
class TypeTally:
    """Requests of one type."""

    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    prompt_tokens: int = 0  # of requests that have got a token
    lossy_tokens: int = 0  # emitted under a rule that changes the target's law
    ended: Counter[str] = field(default_factory=Counter)  # by finish reason
    first_token: Distribution = field(default_factory=lambda: Distribution(LONG_SECONDS))
    # As tokens are emitted: those of one step come together, 0 seconds apart.
    inter_token: Distribution = field(default_factory=lambda: Distribution(SHORT_SECONDS))
    burst: Distribution = field(default_factory=lambda: Distribution(TOKENS))  # tokens of a step
    queue: Distribution = field(default_factory=lambda: Distribution(LONG_SECONDS))
    end_to_end: Distribution = field(default_factory=lambda: Distribution(LONG_SECONDS))
    widths: dict[str, Distribution] = field(default_factory=dict)  # asked of the drafter, by why


@dataclass(slots=True)
class StepTally:
    """Steps of the engine, whoever shared them."""

    num_steps: int = 0
    drafter_seconds: float = 0.0
    other_seconds: float = 0.0
    # Of steps that read no prompt and whose plain cost is known: what they took, and what plain
    # decoding would have.
    decode_seconds: float = 0.0
    plain_seconds: float = 0.0

    @property
    def busy_seconds(self) -> float:
        return self.drafter_seconds + self.other_seconds

    @property
    def mean_step_cost(self) -> float | None:
        """A step's cost in plain passes of the target; None: not known yet."""
        return self.decode_seconds / self.plain_seconds if self.plain_seconds else None


class PlainCosts:
    """What plain steps take: by a policy that knows costs, else the mean of those that were seen
    with as many requests.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}  # steps, seconds

    def add(self, record: StepRecord) -> None:
        if not record.num_draft_rows:
            steps, seconds = self._seen.get(record.load.num_requests, (0, 0.0))
            self._seen[record.load.num_requests] = steps + 1, seconds + record.seconds

    def of(self, load: Load, policy: Policy) -> float | None:
        learns = learning(policy)
        if learns is not None:
            curve = learns.costs.curve
            return curve.of_step(load.num_rows, load.num_requests, load.num_positions)
        steps, seconds = self._seen.get(load.num_requests, (0, 0.0))
        return seconds / steps if steps else None


class Tally:
    """Watches one engine. Its numbers are read under `lock`."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.lock = threading.Lock()
        self.types: dict[str, TypeTally] = {}
        self.steps = StepTally()
        self._most = num_speculative_tokens
        self._plain = PlainCosts()
        self._last_token_at: dict[str, float] = {}  # of requests that were in a step

    def committed(self, commits: Sequence[Commit]) -> None:
        with self.lock:
            for commit in commits:
                self._add_commit(self._of_type(commit.request.request_type), commit)

    def _of_type(self, request_type: str) -> TypeTally:
        if request_type not in self.types and len(self.types) >= MAX_TYPES:
            request_type = OTHER_TYPES
        return self.types.setdefault(request_type, TypeTally())

    def _add_commit(self, tally: TypeTally, commit: Commit) -> None:
        request, emitted = commit.request, commit.num_emitted
        if request.id not in self._last_token_at:
            tally.queue.add(request.admitted_at - request.arrived_at)
            self._last_token_at[request.id] = 0.0
        if not emitted:
            return
        tally.counts.record(
            commit.num_draft_tokens, commit.num_accepted, emitted, depth=commit.depth
        )
        if request.verification.changes_law(request.sampler.greedy):
            tally.lossy_tokens += emitted
        tally.burst.add(emitted)
        if request.num_output == emitted:
            tally.prompt_tokens += request.num_prompt
            tally.first_token.add(request.first_token_at - request.arrived_at)
        else:
            tally.inter_token.add(request.last_token_at - self._last_token_at[request.id])
        tally.inter_token.add(0.0, emitted - 1)
        self._last_token_at[request.id] = request.last_token_at

    def stepped(self, record: StepRecord, policy: Policy) -> None:
        """`policy`: whose choice it was, not told of it yet."""
        with self.lock:
            why = policy.explain(record)
            for judged in record.requests:
                self._add_width(judged, why)
            self._add_seconds(record, policy)

    def plain_seconds(self, load: Load, policy: Policy) -> float | None:
        """What a plain step with this load takes; None: not known yet."""
        with self.lock:
            return self._plain.of(load, policy)

    def _add_width(self, judged: Judged, why: str) -> None:
        # A request that is near its end, but not so near that it mattered.
        limited = judged.limit and judged.asked < self._most
        reason = judged.limit if limited else why
        widths = self._of_type(judged.request_type).widths
        if reason not in widths:
            widths[reason] = Distribution(TOKENS)
        widths[reason].add(judged.asked)

    def _add_seconds(self, record: StepRecord, policy: Policy) -> None:
        steps, load = self.steps, record.load
        steps.num_steps += 1
        steps.drafter_seconds += record.drafter_seconds
        steps.other_seconds += record.seconds
        if load.num_rows != load.num_requests:
            return
        self._plain.add(record)
        plain = self._plain.of(load, policy)
        if plain is not None:
            steps.plain_seconds += plain
            steps.decode_seconds += record.seconds + record.drafter_seconds

    def ended(self, requests: Sequence[Request]) -> None:
        now = time.perf_counter()
        with self.lock:
            for request in requests:
                tally = self._of_type(request.request_type)
                tally.ended["abort" if request.stop is None else request.stop.finish_reason] += 1
                tally.end_to_end.add(now - request.arrived_at)
                self._last_token_at.pop(request.id, None)
