"""Which pages of the cache are in use, and by how many holders.

Knows page ids and reference counts; knows no tensor, no request and no policy. Whoever schedules
decides before a step whether there are pages enough; `OutOfPages` inside a step is a bug.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class OutOfPages(RuntimeError):  # noqa: N818 - says what happened
    """More pages were asked for than are free. Nothing was allocated."""


class PagePool:
    """`num_pages` pages with ids `0 .. num_pages - 1`, each free or held by one or more holders.

    Every method either does all it was asked or raises and changes nothing. The page released last
    is handed out first, so that a small working set stays warm.
    """

    def __init__(self, num_pages: int) -> None:
        """Raises ValueError for a negative `num_pages`."""
        if num_pages < 0:
            raise ValueError(f"num_pages must be 0 or more, got {num_pages}")
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_pages(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages held by at least one holder; a shared page counts once."""
        return len(self._references) - len(self._free)

    def references(self, page: int) -> int:
        """How many holders `page` has; 0 = free. Raises ValueError for an unknown page."""
        self._check_known(page)
        return self._references[page]

    def allocate(self, n: int) -> list[int]:
        """`n` free pages, each now held once.

        Raises OutOfPages when fewer are free, ValueError for a negative `n`.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages: the number must be 0 or more")
        if n > len(self._free):
            raise OutOfPages(f"{n} pages asked for, {self.num_free} of {self.num_pages} are free")
        if n == 0:
            return []
        pages = self._free[-n:][::-1]
        del self._free[-n:]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of `pages`. Raises ValueError if one is free or unknown."""
        pages = list(pages)
        for page in pages:
            self._check_known(page)
            if self._references[page] == 0:
                raise ValueError(f"page {page} is free and cannot be shared")
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less for each of `pages`; a page without holders is free.

        Raises ValueError if a page is free or unknown.
        """
        pages = list(pages)
        for page, times in Counter(pages).items():
            self._check_known(page)
            if times > self._references[page]:
                held = self._references[page]
                raise ValueError(f"page {page} released {times} times, but it is held {held} times")
        # In reverse, so that allocating again gives the same pages in the same order.
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def rebuild(self, holdings: Iterable[Iterable[int]]) -> None:
        """Make the counts those of `holdings`, the pages of each holder; all others are free.

        For the time after an interrupt, which can fall between any two lines here or at a holder's.
        Raises ValueError for an unknown page, and changes nothing.
        """
        references = [0] * len(self._references)
        for pages in holdings:
            for page in pages:
                self._check_known(page)
                references[page] += 1
        free = [page for page in reversed(range(len(references))) if references[page] == 0]
        self._references, self._free = references, free

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every page is exactly once free or at least once held."""
        if len(set(self._free)) != len(self._free):
            raise RuntimeError("a page is twice in the free list")
        free = set(self._free)
        for page, references in enumerate(self._references):
            if references < 0:
                raise RuntimeError(f"page {page} has {references} references")
            if (references == 0) != (page in free):
                where = "in" if page in free else "missing from"
                raise RuntimeError(
                    f"page {page} has {references} references and is {where} the free list"
                )
        if not free <= set(range(self.num_pages)):
            raise RuntimeError("the free list names an unknown page")

    def _check_known(self, page: int) -> None:
        if not 0 <= page < len(self._references):
            raise ValueError(f"unknown page {page}: the pool has pages 0 to {self.num_pages - 1}")
