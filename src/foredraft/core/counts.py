"""Acceptance statistics: plain counts that add up, and the rates derived from them.

Knows numbers of tokens; knows no torch, no request and no clock. `num_accepted` never includes the
extra token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest


@dataclass(slots=True)
class AcceptanceCounts:
    """Counts over the steps of one request, or of many: `merge` adds them."""

    num_steps: int = 0  # steps that emitted something
    num_drafts: int = 0  # steps that verified at least one draft token
    num_draft_tokens: int = 0  # draft tokens really verified
    num_accepted_tokens: int = 0  # draft tokens kept
    num_emitted_tokens: int = 0
    num_draft_emitted_tokens: int = 0  # of those, by steps that verified a draft
    drafted_per_position: list[int] = field(default_factory=list)  # [K] steps that drafted so deep
    reached_per_position: list[int] = field(default_factory=list)  # [K] ... and accepted all before
    # [K] steps that accepted so deep
    accepted_per_position: list[int] = field(default_factory=list)
    histogram: list[int] = field(default_factory=list)  # [K + 1] drafts with exactly j accepted

    def record(self, drafted: int, accepted: int, emitted: int, depth: int | None = None) -> None:
        """Count one step.

        Args:
            drafted: draft tokens verified, 0 for a plain step.
            accepted: of those, kept.
            emitted: `accepted + 1`, or `accepted` when the output was cut on an accepted token.
            depth: of the draft tree; None: a chain, as deep as it has tokens.

        Raises:
            ValueError: the numbers contradict each other.
        """
        depth = drafted if depth is None else depth
        if not 0 <= accepted <= depth <= drafted:
            raise ValueError(
                f"accepted {accepted} of a draft of depth {depth} with {drafted} tokens: valid is"
                " 0 <= accepted <= depth <= drafted"
            )
        if emitted not in (accepted, accepted + 1):
            raise ValueError(
                f"emitted {emitted} with {accepted} accepted: valid are accepted and accepted + 1"
            )
        self.num_steps += 1
        self.num_emitted_tokens += emitted
        if drafted == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        self.num_draft_emitted_tokens += emitted
        _count(self.drafted_per_position, range(depth), depth)
        # Where the output was cut on an accepted token, the next position was never judged.
        _count(self.reached_per_position, range(min(emitted, depth)), depth)
        _count(self.accepted_per_position, range(accepted), depth)
        _count(self.histogram, (accepted,), depth + 1)

    def merge(self, other: AcceptanceCounts) -> None:
        """Add the counts of `other` to these."""
        self.num_steps += other.num_steps
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.num_emitted_tokens += other.num_emitted_tokens
        self.num_draft_emitted_tokens += other.num_draft_emitted_tokens
        self.drafted_per_position = _sum(self.drafted_per_position, other.drafted_per_position)
        self.reached_per_position = _sum(self.reached_per_position, other.reached_per_position)
        self.accepted_per_position = _sum(self.accepted_per_position, other.accepted_per_position)
        self.histogram = _sum(self.histogram, other.histogram)

    @property
    def mean_acceptance_length(self) -> float:
        """tau: tokens per step over the steps that drafted; 1 where none did.

        It is 1 + accepted / drafts, as others count it, less the extra tokens that a stop cut off.
        """
        return _ratio(self.num_draft_emitted_tokens, self.num_drafts) if self.num_drafts else 1.0

    @property
    def mean_emitted_tokens(self) -> float:
        """Tokens per step over all steps, the plain ones included."""
        return _ratio(self.num_emitted_tokens, self.num_steps)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted, in [0, 1]; 0 where nothing was drafted."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def acceptance_by_position(self) -> list[float]:
        """`[K]` P(the first i + 1 are accepted), of all drafts, as vLLM counts it."""
        return [_ratio(accepted, self.num_drafts) for accepted in self.accepted_per_position]

    @property
    def conditional_acceptance_by_position(self) -> list[float]:
        """`[K]` P(position i is accepted | all before it were, and it was drafted).

        Unbiased whatever the mix of draft lengths: a draft that ended before i says nothing about i
        (accepted / drafted would, and iid estimates from it are censored).
        """
        return [
            _ratio(accepted, reached)
            for accepted, reached in zip(
                self.accepted_per_position, self.reached_per_position, strict=True
            )
        ]


def _count(counts: list[int], which: Iterable[int], length: int) -> None:
    """Add one to some of the counts, of which there are `length` at least."""
    counts += [0] * (length - len(counts))
    for index in which:
        counts[index] += 1


def _sum(left: list[int], right: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else 0.0
