"""What is known of acceptance: by request and position, leaning on requests of the same type.

Knows counts that fade; knows no cost, no model and no clock. A rate is conditional: of a position
that was reached. Evidence fades by drafts, and leans on what is known more widely (shrinkage): a
request on its type, a type's position on the position before it, the first on the prior. A drafter
that stops being right is noticed sooner than evidence fades: from a run of rejections that had one
chance in a thousand on, only the run counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foredraft.planning.policy import Judged, known_type

PRIOR_ACCEPTANCE = 0.75  # of a drafter that nothing is known of: worth trying
TYPE_MEMORY = 200.0  # drafts; evidence older than that counts little
REQUEST_MEMORY = 24.0
TYPE_WEIGHT = 3.0  # drafts that the prior is worth beside a type's own
UNLIKELY = 1e-3
REQUEST_WEIGHT = 16.0  # drafts that the type is worth beside a request's own


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a draft promises: `[K]` each."""

    survival: Sequence[float]  # P(the first i + 1 are accepted | so many are drafted)
    filled: Sequence[float]  # P(the drafter has so many | it is asked for them)


@dataclass(slots=True)
class _Evidence:
    """Fading counts by position. `hits / tries` are acceptances of what was reached; `found /
    asked` are drafts of what was asked for.
    """

    hits: list[float] = field(default_factory=list)
    tries: list[float] = field(default_factory=list)
    found: list[float] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)
    run: int = 0  # drafts since anything was accepted
    run_chance: float = 1.0

    def add(self, judged: Judged, memory: float) -> None:
        keep = 1.0 - 1.0 / memory
        # A row that leads nowhere, of a tree or of the drafter's own, counts as a position that
        # is not accepted: rows are what a width buys.
        reached = min(judged.accepted + 1, judged.num_rows)
        _note(self.asked, self.found, judged.asked, judged.num_found, keep)
        self._note_run(judged)
        _note(self.tries, self.hits, reached, judged.accepted, keep)
        if self.run_chance < UNLIKELY:
            self.tries[0], self.hits[0], self.run_chance = float(self.run), 0.0, 1.0

    def _note_run(self, judged: Judged) -> None:
        if judged.accepted:
            self.run, self.run_chance = 0, 1.0
        elif judged.num_rows:
            tries, hits = (self.tries[0], self.hits[0]) if self.tries else (0.0, 0.0)
            self.run += 1
            self.run_chance *= 1.0 - (hits + 0.5) / (tries + 1.0)


def _note(tries: list[float], hits: list[float], tried: int, hit: int, keep: float) -> None:
    """`tried` positions were tried, the first `hit` of them with success."""
    if len(tries) < tried:
        missing = [0.0] * (tried - len(tries))
        tries += missing
        hits += missing
    for i in range(tried):
        tries[i] = tries[i] * keep + 1.0
        hits[i] = hits[i] * keep + (1.0 if i < hit else 0.0)


def _rate(hits: Sequence[float], tries: Sequence[float], i: int, prior: float, w: float) -> float:
    if i >= len(tries):
        return prior
    return (hits[i] + w * prior) / (tries[i] + w)


_NOTHING = _Evidence()


class Estimates:
    """Acceptance of the requests of one drafter."""

    def __init__(self) -> None:
        self._types: dict[str, _Evidence] = {}
        self._requests: dict[str, _Evidence] = {}

    def add(self, judged: Judged) -> None:
        """Count one draft, or one question that found none."""
        if not judged.asked:
            return
        kind = known_type(self._types, judged.request_type)
        self._types.setdefault(kind, _Evidence()).add(judged, TYPE_MEMORY)
        if not judged.ended:
            self._requests.setdefault(judged.id, _Evidence()).add(judged, REQUEST_MEMORY)

    def release(self, request_id: str) -> None:
        """Forget a request; its type remembers."""
        self._requests.pop(request_id, None)

    def outlook(self, request_id: str, request_type: str, width: int) -> Outlook:
        """For a draft of up to `width` tokens."""
        kind = self._types.get(known_type(self._types, request_type), _NOTHING)
        own = self._requests.get(request_id, _NOTHING)
        survival, filled = [], []
        alive, there = 1.0, 1.0
        rate, share = PRIOR_ACCEPTANCE, 1.0
        for i in range(width):
            rate = _rate(kind.hits, kind.tries, i, rate, TYPE_WEIGHT)
            share = _rate(kind.found, kind.asked, i, share, TYPE_WEIGHT)
            alive *= _rate(own.hits, own.tries, i, rate, REQUEST_WEIGHT)
            there = min(there, _rate(own.found, own.asked, i, share, REQUEST_WEIGHT))
            survival.append(alive)
            filled.append(there)
        return Outlook(survival, filled)
