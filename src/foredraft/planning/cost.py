"""What a step costs, as a function of its rows, requests and context: measured, or from a machine's
data sheet.

Knows seconds, rows and bytes; knows no model, no clock and no request. Measured costs are a
staircase (tiles of a kernel) that never falls: known points, and straight lines between them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

# So many times the rows of the last pass measured a point lies on the line through the last two.
# Without it, whatever is learnt of that pass would tilt the line that goes on behind it.
REACH = 4


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of pass and its seconds (a median of several)."""

    rows: int
    requests: int
    positions: int  # cached positions read, of all requests together
    seconds: float


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds of a step: `rows(n) + requests + positions read + positions each further row reads`.

    Raises ValueError for points that are no staircase.
    """

    rows: tuple[int, ...]  # the points, rising
    seconds: tuple[float, ...]  # of one request at no context; never falling, above 0
    request_seconds: float = 0.0  # of each request beside the first
    position_seconds: float = 0.0  # of a cached position that is read
    row_position_seconds: float = 0.0  # ... and of each further row of its request that reads it

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.seconds) or not self.rows:
            raise ValueError(f"{len(self.rows)} row counts with {len(self.seconds)} costs")
        if list(self.rows) != sorted(set(self.rows)) or self.rows[0] < 1:
            raise ValueError(f"row counts must rise from 1 or more, got {list(self.rows)}")
        if list(self.seconds) != sorted(self.seconds) or not self.seconds[0] > 0:
            raise ValueError(f"costs must be above 0 and never fall, got {list(self.seconds)}")

    def of_rows(self, rows: float) -> float:
        """Seconds of one request with so many rows; 0 for none. Beyond the last point the line
        through the last two goes on.
        """
        if rows <= self.rows[0]:
            return self.seconds[0] if rows > 0 else 0.0
        if len(self.rows) == 1:
            return self.seconds[0] * rows / self.rows[0]
        at = self.segment(rows)
        left, right = self.rows[at - 1], self.rows[at]
        low, high = self.seconds[at - 1], self.seconds[at]
        return low + (high - low) * (rows - left) / (right - left)

    def of_each(self, first: int, count: int) -> list[float]:
        """`[count]` seconds of `first` rows, of one more, and so on."""
        if len(self.rows) == 1 or first < self.rows[0]:
            return [self.of_rows(rows) for rows in range(first, first + count)]
        found: list[float] = []
        rows, end = first, first + count
        while rows < end:  # line by line
            at = self.segment(rows)
            stop = end if at == len(self.rows) - 1 else min(end, self.rows[at])
            left, low = self.rows[at - 1], self.seconds[at - 1]
            slope = (self.seconds[at] - low) / (self.rows[at] - left)
            found += [low + slope * (each - left) for each in range(rows, stop)]
            rows = stop
        return found

    def segment(self, rows: float) -> int:
        """The point at the right end of the line that `rows` lie on."""
        return min(bisect_right(self.rows, rows), len(self.rows) - 1)

    def beside_rows(self, requests: int, positions: int) -> float:
        """Seconds that requests and context add."""
        return self.request_seconds * max(0, requests - 1) + self.position_seconds * positions

    def of_step(self, rows: float, requests: int, positions: int) -> float:
        """Seconds of a step, but for what its further rows read."""
        return self.of_rows(rows) + self.beside_rows(requests, positions)

    def as_json(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CostCurve:
        """Raises ValueError or TypeError for what `as_json` never wrote."""
        rows, seconds = values["rows"], values["seconds"]
        rest = {
            key: float(value) for key, value in values.items() if key not in ("rows", "seconds")
        }
        return cls(tuple(map(int, rows)), tuple(map(float, seconds)), **rest)


def fit(points: Sequence[Measured]) -> CostCurve:
    """The curve through measured passes.

    Needs passes of one request at the least context; those of several requests, or more context,
    tell what these add. The last point, far behind all passes, continues the line through the two
    before it. Raises ValueError without a pass of one row.
    """
    least = min((p.positions for p in points if p.requests == 1), default=0)
    alone = {p.rows: p for p in points if p.requests == 1 and p.positions == least}
    if 1 not in alone:
        raise ValueError("a pass of one row is needed, at the least context")
    deep = [p for p in points if p.requests == 1 and p.positions > least and p.rows in alone]
    slopes = {
        p.rows: (p.seconds - alone[p.rows].seconds) / (p.positions - least)
        for p in sorted(deep, key=lambda p: p.positions)
    }
    position = max(0.0, slopes.pop(1, 0.0))
    row_position = _mean([max(0.0, (s - position) / (rows - 1)) for rows, s in slopes.items()])
    many = [p for p in points if p.requests > 1]
    request = max(0.0, _mean(_beside_each_other([*alone.values(), *many], position)))
    curve = {rows: p.seconds - position * least for rows, p in alone.items()}
    together: dict[int, list[float]] = {}
    for p in many:
        rest = p.seconds - position * p.positions - request * (p.requests - 1)
        together.setdefault(p.rows, []).append(rest)
    curve = {rows: _mean(rests) for rows, rests in together.items()} | curve
    rows = tuple(sorted(curve))
    floor = 0.01 * alone[1].seconds  # noise may eat a whole pass
    seconds = never_falling([max(floor, curve[n]) for n in rows])
    far = REACH * rows[-1]
    beyond = CostCurve(rows, tuple(seconds)).of_rows(far)
    return CostCurve((*rows, far), (*seconds, beyond), request, position, row_position)


def _beside_each_other(points: Sequence[Measured], position: float) -> list[float]:
    """What one request more adds to a pass of as many rows, for every number of rows that was
    measured with different numbers of requests.
    """
    by_rows: dict[int, list[Measured]] = {}
    for p in points:
        by_rows.setdefault(p.rows, []).append(p)
    found = []
    for group in by_rows.values():
        few, most = min(group, key=_requests), max(group, key=_requests)
        if most.requests > few.requests:
            more = most.seconds - few.seconds - position * (most.positions - few.positions)
            found.append(more / (most.requests - few.requests))
    return found


def _requests(p: Measured) -> int:
    return p.requests


def never_falling(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """The closest sequence that never falls, by weighted squares (pool adjacent violators);
    `weights`, one a value, are alike where None.
    """
    blocks: list[tuple[float, float, int]] = []
    for i, value in enumerate(values):
        mean, weight, size = value, 1.0 if weights is None else weights[i], 1
        while blocks and blocks[-1][0] > mean:
            before, its_weight, count = blocks.pop()
            total = weight + its_weight
            mean = (mean * weight + before * its_weight) / total
            weight, size = total, size + count
        blocks.append((mean, weight, size))
    return [mean for mean, _, size in blocks for _ in range(size)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def distinct_experts(num_experts: int, experts_per_token: int, rows: float) -> float:
    """`E (1 - (1 - K/E)^t)`: experts of a layer that `rows` tokens read, each routed by chance.

    Real routing is correlated and reads fewer (algorithms.md 3e, MoESD 2505.19645).
    Raises ValueError unless 1 <= experts_per_token <= num_experts.
    """
    if not 1 <= experts_per_token <= num_experts:
        raise ValueError(
            f"experts_per_token must be in 1..{num_experts} (num_experts), got {experts_per_token}"
        )
    unread: float = (1.0 - experts_per_token / num_experts) ** rows
    return num_experts * (1.0 - unread)


@dataclass(frozen=True, slots=True)
class Roofline:
    """A machine and a model by their data sheets, for what-if questions: no kernel is so good.

    `seconds = max(bytes / bandwidth, flops / rate) + overhead`, with the bytes of the dense
    weights, of the experts that the rows read, and of keys and values once a request
    (algorithms.md 3a and 3e).

    Raises ValueError, naming the field and its value.
    """

    weights_gb: float  # all weights, experts included
    bandwidth_gb_s: float
    tflops: float
    parameters_b: float | None = None  # billions that a token uses; None: 2 bytes each, all used
    overhead_ms: float = 0.0
    requests: int = 1
    context: int = 0  # positions of each request
    kv_kb_per_position: float = 0.0
    experts: int = 1
    experts_per_token: int = 1
    expert_share: float = 0.0  # of the weights that are experts

    def __post_init__(self) -> None:
        for name in ("weights_gb", "bandwidth_gb_s", "tflops", "requests"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("overhead_ms", "context", "kv_kb_per_position"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if not 0.0 <= self.expert_share <= 1.0:
            raise ValueError(f"expert_share must be in [0, 1], got {self.expert_share}")
        if self.parameters_b is not None and not self.parameters_b > 0:
            raise ValueError(f"parameters_b must be above 0, got {self.parameters_b}")
        distinct_experts(self.experts, self.experts_per_token, 1)

    def seconds(self, rows: float) -> float:
        """Of a pass over `rows` rows of all requests together."""
        read = distinct_experts(self.experts, self.experts_per_token, rows) / self.experts
        weights = self.weights_gb * (1.0 - self.expert_share + self.expert_share * read)
        kv_gb = self.requests * self.context * self.kv_kb_per_position * 1e-6
        used = self.parameters_b
        if used is None:
            active = self.experts_per_token / self.experts
            used = self.weights_gb / 2 * (1.0 - self.expert_share + self.expert_share * active)
        return (
            max((weights + kv_gb) / self.bandwidth_gb_s, 2e-3 * used * rows / self.tflops)
            + self.overhead_ms * 1e-3
        )

    def verify_cost(self, num_draft_tokens: int) -> list[float]:
        """`[num_draft_tokens + 1]` passes that verify 0, 1, ... draft tokens of every request, in
        plain passes.
        """
        plain = self.seconds(self.requests)
        return [self.seconds(self.requests * n) / plain for n in range(1, num_draft_tokens + 2)]
