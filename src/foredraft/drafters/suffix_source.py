"""An index of suffixes with its drafts: what both implementations offer, and which one runs here.

Knows that the compiled one may be missing; knows no request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, Self

from foredraft.drafters.suffix_draft import DraftLimits, Proposal, ReferenceIndex

if TYPE_CHECKING:
    from foredraft import _native

NO_TEXT = -1
# Memory at most, of a token and of a text beside its tokens: in C++ 36 bytes of pages and, where no
# two n-grams are alike and tables are as empty as they get, 107 of tables; a text's last page may
# be all but empty.
NATIVE_BYTES = 145, 3200
REFERENCE_BYTES = 4000, 1000  # dictionaries, which do not shrink


class SuffixSource(Protocol):
    """Texts that grow at their ends and may be taken out, and drafts from their places:
    `suffix_index.SuffixIndex` and `suffix_draft.ReferenceIndex` say what each call does.
    """

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
    def draft(
        self,
        number: int,
        first: int,
        tokens: Sequence[int],
        limits: DraftLimits,
        estimates: Sequence[float],
        others: Self | None,
        own: int,
        other_estimates: Sequence[float],
    ) -> Proposal | None: ...
    def is_consistent(self) -> bool: ...


class NativeIndex:
    """The compiled index (native/suffix.cpp); the same drafts as the reference's."""

    def __init__(self, native: _native.SuffixIndex) -> None:
        self._native = native

    @property
    def native(self) -> _native.SuffixIndex:
        """For others that are compiled."""
        return self._native

    @property
    def num_tokens(self) -> int:
        return self._native.num_tokens

    @property
    def num_bytes(self) -> int:
        return self._native.num_bytes

    def add_text(self, context: Sequence[int] = ()) -> int:
        return self._native.add_text(context)

    def text(self, number: int) -> list[int]:
        return self._native.text(number)

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        self._native.extend(number, tokens)

    def remove(self, number: int) -> None:
        self._native.remove(number)

    def propose(
        self,
        context: Sequence[int],
        limits: DraftLimits,
        estimates: Sequence[float],
        growing: int | None = None,
        excluded: int | None = None,
    ) -> Proposal:
        return Proposal(
            *self._native.propose(
                context,
                limits.max_nodes,
                limits.max_spec_factor,
                limits.min_token_prob,
                limits.tree,
                estimates,
                NO_TEXT if growing is None else growing,
                NO_TEXT if excluded is None else excluded,
            )
        )

    def draft(
        self,
        number: int,
        first: int,
        tokens: Sequence[int],
        limits: DraftLimits,
        estimates: Sequence[float],
        others: Self | None,
        own: int,
        other_estimates: Sequence[float],
    ) -> Proposal | None:
        native = None if others is None else others._native
        made = self._native.draft(
            number, first, tokens, *limits, estimates, native, own, other_estimates
        )
        return None if made is None else Proposal(*made)

    def is_consistent(self) -> bool:
        return self._native.is_consistent()


def most_bytes(num_tokens: int, num_texts: int) -> int:
    """Memory, at most, of indexes of `num_texts` texts of `num_tokens` tokens together."""
    try:
        from foredraft._native import SuffixIndex  # noqa: F401
    except ImportError:
        of_token, of_text = REFERENCE_BYTES
    else:
        of_token, of_text = NATIVE_BYTES
    return of_token * num_tokens + of_text * num_texts


def index_maker(max_depth: int, max_occurrences: int) -> Callable[[], SuffixSource]:
    """Makes empty indexes of the implementation that runs here: native where it is compiled."""
    try:
        from foredraft._native import SuffixIndex
    except ImportError:
        return partial(ReferenceIndex, max_depth, max_occurrences)
    return lambda: NativeIndex(SuffixIndex(max_depth, max_occurrences))
