"""A request's text beside an n-gram table: what both implementations offer, and which runs here.

Knows that the compiled one may be missing; knows no request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from foredraft.drafters.ngram_blend import (
    BlendLimits,
    BlendProposal,
    Cells,
    ReferenceText,
    Table,
)
from foredraft.drafters.ngram_table_file import NgramTableFile

if TYPE_CHECKING:
    from foredraft import _native

MAX_OCCURRENCES = 64  # places counted for each n-gram length: the work of a draft is bounded


class TextSource(Protocol):
    """One request's tokens and drafts behind them: `ngram_blend.ReferenceText` says what each call
    does.
    """

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def extend(self, tokens: Sequence[int]) -> None: ...
    def tokens(self, first: int) -> list[int]: ...
    def is_consistent(self) -> bool: ...
    def cells(self, table: Any, past: Any, own: int) -> Cells: ...
    def law(
        self, table: Any, path: Sequence[int], past: Any, own: int
    ) -> list[tuple[int, float]]: ...
    def draft(
        self,
        table: Any,
        first: int,
        tokens: Sequence[int],
        limits: BlendLimits,
        past: Any,
        own: int,
    ) -> BlendProposal | None: ...


class NativeText:
    """The compiled text (native/ngram_draft.cpp) and table; the same drafts as the reference's."""

    def __init__(self, table: _native.NgramTable, text: _native.NgramText) -> None:
        self._table = table
        self._text = text

    @property
    def num_tokens(self) -> int:
        return self._text.num_tokens

    @property
    def num_bytes(self) -> int:
        return self._text.num_bytes

    def extend(self, tokens: Sequence[int]) -> None:
        self._text.extend(tokens)

    def tokens(self, first: int) -> list[int]:
        return self._text.tokens(first)

    def is_consistent(self) -> bool:
        return self._text.is_consistent()

    def cells(self, table: Any, past: Any, own: int) -> Cells:
        return Cells(*self._text.cells(self._table, _index(past), own))

    def law(self, table: Any, path: Sequence[int], past: Any, own: int) -> list[tuple[int, float]]:
        tokens, probabilities = self._text.law(self._table, path, _index(past), own)
        return list(zip(tokens, probabilities, strict=True))

    def draft(
        self,
        table: Any,
        first: int,
        tokens: Sequence[int],
        limits: BlendLimits,
        past: Any,
        own: int,
    ) -> BlendProposal | None:
        made = self._text.draft(self._table, first, tokens, *limits, _index(past), own)
        return None if made is None else BlendProposal(*made)


def _index(past: Any) -> Any:
    return None if past is None else past.native


def text_maker(table: Table) -> Callable[[], TextSource]:
    """Makes empty texts of the implementation that runs here: native where it is compiled and the
    table is a file's.
    """
    depth = max((1, *table.layout.own_orders, table.layout.num_orders))
    try:
        from foredraft._native import NgramText
    except ImportError:
        return partial(ReferenceText, depth, MAX_OCCURRENCES)
    if not isinstance(table, NgramTableFile):
        return partial(ReferenceText, depth, MAX_OCCURRENCES)
    native = table.native()
    return lambda: NativeText(native, NgramText(depth, MAX_OCCURRENCES))
