"""How many draft tokens a request gets in the next step.

Knows counts and loads; knows no torch, no model and no drafter. A policy is pure: the same state
gives the same width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from foredraft.core.counts import AcceptanceCounts


@dataclass(frozen=True, slots=True)
class Load:
    """What the step carries before any draft."""

    num_requests: int
    num_rows: int  # prompt chunks and pending tokens of all requests


class Policy(Protocol):
    """Chooses widths; the engine clips them to the row budget and to what may still be said."""

    def width(self, load: Load, counts: AcceptanceCounts) -> int:
        """Draft tokens for a request with these `counts` in a step with this `load`; 0 = none."""


@dataclass(frozen=True, slots=True)
class FixedWidth:
    """The same number of draft tokens, whatever happens."""

    num_speculative_tokens: int

    def width(self, load: Load, counts: AcceptanceCounts) -> int:
        return self.num_speculative_tokens
