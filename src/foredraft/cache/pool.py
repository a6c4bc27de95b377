"""Which pages of the cache are in use, by how many holders, and which are kept though nobody holds
them.

Knows page ids and reference counts; knows no tensor, no request and no policy. Whoever schedules
decides before a step whether there are pages enough; `OutOfPages` inside a step is a bug.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NoReturn


class OutOfPages(RuntimeError):  # noqa: N818 - says what happened
    """More pages were asked for than are free. Nothing was allocated."""


class PagePool:
    """`num_pages` pages with ids `0 .. num_pages - 1`, each free, held by one or more holders, or
    idle: kept for what is in it when its last holder has left.

    Every method either does all it was asked or raises and changes nothing. The page released last
    is handed out first, so that a small working set stays warm.
    """

    def __init__(self, num_pages: int) -> None:
        """Raises ValueError for a negative `num_pages`."""
        if num_pages < 0:
            raise ValueError(f"num_pages must be 0 or more, got {num_pages}")
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._kept: set[int] = set()
        self._idle: dict[int, None] = {}  # in the order in which their last holders left

    @property
    def num_pages(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages held by at least one holder; a shared page counts once."""
        return len(self._references) - len(self._free) - len(self._idle)

    @property
    def num_idle(self) -> int:
        """Kept pages that nobody holds: `forget` makes them free."""
        return len(self._idle)

    @property
    def num_kept(self) -> int:
        """Pages marked by `keep`, held or idle."""
        return len(self._kept)

    @property
    def longest_idle(self) -> int | None:
        """The idle page whose last holder left first; None if no page is idle."""
        return next(iter(self._idle), None)

    def references(self, page: int) -> int:
        """How many holders `page` has; 0 = free or idle. Raises ValueError for an unknown page."""
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
            if self._references[page] == 0 and page not in self._kept:
                raise ValueError(f"page {page} is free and cannot be shared")
        for page in pages:
            self._references[page] += 1
            self._idle.pop(page, None)

    def release(self, pages: Iterable[int]) -> None:
        """One holder less for each of `pages`; a page without holders is free, or idle if kept.

        Raises ValueError if a page is free or unknown.
        """
        pages = list(pages)
        for page, times in Counter(pages).items():
            self._check_known(page)
            if times > self._references[page]:
                held = self._references[page]
                raise ValueError(f"page {page} released {times} times, but it is held {held} times")
        # In reverse, so that allocating again gives the same pages in the same order, and that of
        # a sequence's kept pages the last is idle for longest.
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._kept:
                self._idle[page] = None
            else:
                self._free.append(page)

    def is_kept(self, page: int) -> bool:
        """Whether `page` was marked by `keep`, and not forgotten since."""
        return page in self._kept

    def keep(self, page: int) -> None:
        """Keep a page that is held once its last holder has left, until `forget`.

        Raises ValueError if it is free, kept already or unknown.
        """
        self._check_known(page)
        if page in self._kept or self._references[page] == 0:
            state = "kept already" if page in self._kept else "free"
            raise ValueError(f"page {page} is {state} and cannot be kept")
        self._kept.add(page)

    def forget(self, page: int) -> None:
        """Keep a page no longer; it is free if nobody holds it. Raises ValueError if not kept."""
        if page not in self._kept:
            raise ValueError(f"page {page} is not kept")
        self._kept.remove(page)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def rebuild(self, holdings: Iterable[Iterable[int]]) -> None:
        """Make the counts those of `holdings`, the pages of each holder; all others are free, and
        none is kept.

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
        self._kept, self._idle = set(), {}

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every page is either free once, or idle, or held."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise RuntimeError("a page is twice in the free list")
        unheld = {page for page, references in enumerate(self._references) if not references}
        agree = free == unheld - self._kept and self._idle.keys() == unheld & self._kept
        if not agree or min(self._references, default=0) < 0:
            self._raise_contradiction(free)

    def _raise_contradiction(self, free: set[int]) -> NoReturn:
        """Name the first page that is not where its references say. All of them are looked at one
        by one: only where there is one.
        """
        if not free | self._idle.keys() <= set(range(self.num_pages)):
            raise RuntimeError("the free list or the idle pages name an unknown page")
        for page, references in enumerate(self._references):
            if references < 0:
                raise RuntimeError(f"page {page} has {references} references")
            kept, unheld = page in self._kept, references == 0
            for name, listed, due in (
                ("free list", page in free, unheld and not kept),
                ("idle pages", page in self._idle, unheld and kept),
            ):
                if listed != due:
                    where = "in" if listed else "missing from"
                    raise RuntimeError(
                        f"page {page} has {references} references and is {where} the {name}"
                    )
        raise AssertionError("the pages' sets differ, and no page does")

    def _check_known(self, page: int) -> None:
        if not 0 <= page < len(self._references):
            raise ValueError(f"unknown page {page}: the pool has pages 0 to {self.num_pages - 1}")
