"""An index of suffixes with its drafts: what both implementations offer, and which one runs here.

Knows that the compiled one exists; knows no request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from foredraft.drafters.suffix_draft import DraftLimits, Proposal, ReferenceIndex


class SuffixSource(Protocol):
    """Texts that grow at their ends, and drafts from their places."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def add_text(self, context: Sequence[int] = ()) -> int: ...
    def text(self, number: int) -> list[int]: ...
    def extend(self, number: int, tokens: Sequence[int]) -> None: ...
    def remove(self, number: int) -> None: ...
    def propose(
        self,
        context: Sequence[int],
        limits: DraftLimits,
        estimates: Sequence[float],
        growing: int | None = None,
        excluded: int | None = None,
    ) -> Proposal: ...
    def is_consistent(self) -> bool: ...


def index_maker(max_depth: int, max_occurrences: int) -> Callable[[], SuffixSource]:
    """Makes empty indexes of the implementation that runs here."""
    return partial(ReferenceIndex, max_depth, max_occurrences)
