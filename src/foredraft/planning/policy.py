"""How many draft tokens each request gets in the next step: the seam, and the choices made
beforehand.

Knows counts and loads; knows no torch, no model and no drafter. `widths` is pure: between two
calls of `observe` the same question has the same answer, so that it may also be asked of a step
that is only being considered.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from foredraft.core.counts import AcceptanceCounts

MAX_TYPES = 64  # request types that are told apart: clients choose them
OTHER_TYPES = "other"  # all further ones


@dataclass(frozen=True, slots=True)
class Load:
    """What a step carries before any draft."""

    num_requests: int
    num_rows: int  # prompt chunks and pending tokens of all requests
    num_positions: int = 0  # cached positions that the step reads, of all requests


@dataclass(frozen=True, slots=True)
class RequestState:
    """One request that is to be drafted for, as far as a policy may look."""

    id: str
    request_type: str = ""  # requests of one type are expected to be accepted alike
    max_width: int = 1 << 30  # draft tokens it has any use for: it is near its max_tokens
    num_positions: int = 0  # in its cache
    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)


@dataclass(frozen=True, slots=True)
class Offer:
    """The draft that a drafter has for one request, before any of it is verified."""

    id: str
    request_type: str
    num_positions: int  # in the request's cache
    parents: Sequence[int]  # of the nodes, a parent before its children; -1 = the pending token
    # P(a node is accepted | its parent is), as the drafter believes; None: it doesn't say
    confidence: Sequence[float] | None = None
    # Whether nodes may be left out by what they are. A token drawn at random is not to be dropped
    # for its own value.
    may_cut: bool = True


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a drafter that pays for each token is to stop by itself, in its own confidence.

    Draft token i is worth its cost if the path to it is accepted with at least the probability
    `least_path[i]` (empty: no rule); one that is less likely than `confidence_threshold`, once its
    parent is accepted, is not wanted.
    """

    confidence_threshold: float = 0.0
    least_path: Sequence[float] = ()


NEVER = Stopping()


@dataclass(frozen=True, slots=True)
class Tried:
    """A draft node that was verified, its parent being accepted."""

    depth: int  # 0 = a child of the pending token
    confidence: float | None
    accepted: bool


@dataclass(frozen=True, slots=True)
class Judged:
    """What a step did with one request's draft. `drafted` is the depth really verified; of that,
    `accepted` were kept, whatever a stop cut off afterwards.
    """

    id: str
    request_type: str
    asked: int  # draft tokens that the drafter was asked for
    drafted: int
    accepted: int
    ended: bool
    limit: str = ""  # what kept `asked` from being what the policy would have chosen
    offer: Offer | None = None  # the whole draft, as it was before it was cut
    tried: Sequence[Tried] = ()
    num_own: int = 0  # rows that the drafter wanted for its own use
    num_nodes: int | None = None  # verified; None: a chain, of `drafted`

    @property
    def speculates(self) -> bool:
        """Whether it was to be drafted for: it was asked, and not all that came was left out."""
        left_out = self.num_found > 0 and not self.num_rows
        return self.asked > 0 and not left_out

    @property
    def num_rows(self) -> int:
        """Rows of the pass that were taken for it beside its pending token."""
        return self.num_own + (self.drafted if self.num_nodes is None else self.num_nodes)

    @property
    def num_found(self) -> int:
        """Rows that what the drafter had would have taken."""
        return self.num_rows if self.offer is None else self.num_own + len(self.offer.parents)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that was committed, and where its seconds went."""

    load: Load
    requests: Sequence[Judged]  # those that could have had a draft
    num_draft_rows: int
    drafter_seconds: float
    seconds: float  # of all the rest: scheduling, the target's pass, verification, commit

    @property
    def num_rows(self) -> int:
        """Of the target's pass."""
        return self.load.num_rows + self.num_draft_rows


def known_type(types: Collection[str], request_type: str) -> str:
    """The type, or the one for all further ones where enough are told apart."""
    full = len(types) >= MAX_TYPES
    return OTHER_TYPES if full and request_type not in types else request_type


class Policy(Protocol):
    """Chooses widths; the engine clips them to the row budget, to pages and to what may still be
    said. When drafts are there it chooses again, among their nodes.
    """

    def widths(self, load: Load, requests: Sequence[RequestState]) -> Sequence[int]:
        """Draft tokens for each of `requests`, in order, in a step with this `load`; 0 = none."""

    def stopping(self, load: Load) -> Stopping:
        """When drafts of a step with this `load` should end."""

    def keep(self, load: Load, offers: Sequence[Offer]) -> Sequence[Sequence[int]]:
        """The nodes of each draft that are to be verified, in rising order, with their parents."""

    def explain(self, record: StepRecord) -> str:
        """Why a step, not observed yet, drafted as it did: a word or two, of a few."""

    def observe(self, record: StepRecord) -> None:
        """Learn from a step. The only call that changes anything."""

    def release(self, request_id: str) -> None:
        """The request has ended; forget it."""


class StaticPolicy:
    """A choice made beforehand: nothing is learnt."""

    def stopping(self, load: Load) -> Stopping:
        return NEVER

    def keep(self, load: Load, offers: Sequence[Offer]) -> Sequence[Sequence[int]]:
        return [range(len(offer.parents)) for offer in offers]

    def explain(self, record: StepRecord) -> str:
        return "fixed"

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn."""

    def release(self, request_id: str) -> None:
        """Nothing to forget."""


@dataclass(frozen=True, slots=True)
class FixedWidth(StaticPolicy):
    """The same number of draft tokens, whatever happens."""

    num_speculative_tokens: int

    def widths(self, load: Load, requests: Sequence[RequestState]) -> Sequence[int]:
        return [self.num_speculative_tokens] * len(requests)


@dataclass(frozen=True, slots=True)
class NoDrafts(StaticPolicy):
    """Plain decoding: what is left where a drafter had to be given up."""

    def widths(self, load: Load, requests: Sequence[RequestState]) -> Sequence[int]:
        return [0] * len(requests)

    def explain(self, record: StepRecord) -> str:
        return "disabled"


@dataclass(frozen=True, slots=True)
class WidthByBatchSize(StaticPolicy):
    """A width for each number of requests: `[start, end, K]`, both ends included (vLLM's
    `num_speculative_tokens_per_batch_size`). Beyond the last range, nothing is drafted.

    Raises ValueError unless the ranges begin at 1 and follow one another without a gap.
    """

    ranges: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        expected = 1
        for start, end, width in self.ranges:
            if start != expected or end < start or width < 0:
                raise ValueError(
                    f"[{start}, {end}, {width}] must be [start, end, K] with start {expected} (the "
                    "ranges begin at 1 and follow one another), end >= start and K >= 0"
                )
            expected = end + 1
        if not self.ranges:
            raise ValueError("at least one [start, end, K] is needed")

    def widths(self, load: Load, requests: Sequence[RequestState]) -> Sequence[int]:
        width = next((k for _, end, k in self.ranges if load.num_requests <= end), 0)
        return [width] * len(requests)

    def explain(self, record: StepRecord) -> str:
        return "batch size"
