"""The page pool: every page is free or held, whatever is asked of it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from foredraft.cache.pool import OutOfPages, PagePool


def test_pages_come_back_and_are_reused() -> None:
    pool = PagePool(4)
    first = pool.allocate(3)
    assert sorted(first) == [0, 1, 2]
    assert (pool.num_used, pool.num_free) == (3, 1)
    pool.release(first)
    assert pool.num_used == 0
    assert pool.allocate(3) == first


def test_running_out_allocates_nothing() -> None:
    pool = PagePool(3)
    pool.allocate(2)
    with pytest.raises(OutOfPages, match="2 pages asked for, 1 of 3 are free"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check_integrity()


def test_a_shared_page_is_free_after_its_last_release() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.share(pages)
    assert pool.references(pages[0]) == 2
    pool.release(pages)
    assert pool.num_used == 1
    pool.release(pages)
    assert pool.num_used == 0


def test_double_release_is_an_error_and_changes_nothing() -> None:
    pool = PagePool(3)
    a, b = pool.allocate(2)
    pool.release([a])
    with pytest.raises(ValueError, match=f"page {a} released 1 times, but it is held 0 times"):
        pool.release([b, a])
    with pytest.raises(ValueError, match=f"page {b} released 2 times"):
        pool.release([b, b])
    assert pool.references(b) == 1
    pool.check_integrity()


def test_sharing_a_free_page_is_an_error_and_changes_nothing() -> None:
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    with pytest.raises(ValueError, match="is free and cannot be shared"):
        pool.share([page, page + 1])
    assert pool.references(page) == 1


@pytest.mark.parametrize("page", [-1, 3])
def test_unknown_pages_are_errors(page: int) -> None:
    pool = PagePool(3)
    pool.allocate(3)
    for act in (pool.share, pool.release):
        with pytest.raises(ValueError, match=f"unknown page {page}"):
            act([page])


def test_negative_numbers_are_errors() -> None:
    with pytest.raises(ValueError, match="num_pages"):
        PagePool(-1)
    with pytest.raises(ValueError, match="cannot allocate -1 pages"):
        PagePool(1).allocate(-1)


def test_integrity_check_finds_a_lost_and_a_doubled_page() -> None:
    lost = PagePool(2)
    lost._free.pop()
    with pytest.raises(RuntimeError, match="missing from the free list"):
        lost.check_integrity()
    doubled = PagePool(2)
    doubled._free.append(doubled._free[0])
    with pytest.raises(RuntimeError, match="twice"):
        doubled.check_integrity()


def test_a_kept_page_outlives_its_holders() -> None:
    pool = PagePool(3)
    pages = pool.allocate(3)
    pool.keep(pages[0])
    pool.keep(pages[1])
    pool.release(pages)
    assert (pool.num_used, pool.num_idle, pool.num_free, pool.num_kept) == (0, 2, 1, 2)
    assert pool.longest_idle == pages[1]  # of one holder's pages the last
    pool.share([pages[1]])
    assert (pool.num_used, pool.longest_idle) == (1, pages[0])
    pool.forget(pages[0])
    pool.forget(pages[1])
    assert (pool.num_used, pool.num_free, pool.longest_idle) == (1, 2, None)
    pool.check_integrity()
    pool.release([pages[1]])
    assert pool.num_free == 3


def test_what_cannot_be_kept_or_forgotten_is_an_error() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    with pytest.raises(ValueError, match=f"page {page} is not kept"):
        pool.forget(page)
    with pytest.raises(ValueError, match=f"page {page + 1} is free and cannot be kept"):
        pool.keep(page + 1)
    pool.keep(page)
    with pytest.raises(ValueError, match=f"page {page} is kept already"):
        pool.keep(page)
    with pytest.raises(ValueError, match="unknown page 2"):
        pool.keep(2)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a plain list of holders, each a list of pages."""

    holders = Bundle("holders")

    @initialize(num_pages=st.integers(0, 12))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.held: list[list[int]] = []
        self.kept: set[int] = set()

    def pages_held(self) -> set[int]:
        return {page for pages in self.held for page in pages}

    @rule(target=holders, n=st.integers(0, 6))
    def allocate(self, n: int) -> list[int]:
        before = self.pages_held()
        if n > self.pool.num_free:
            with pytest.raises(OutOfPages):
                self.pool.allocate(n)
            pages: list[int] = []
        else:
            pages = self.pool.allocate(n)
            assert len(set(pages)) == n
            assert not (before | self.kept) & set(pages)
        self.held.append(pages)
        return pages

    @rule(target=holders, pages=holders)
    def share(self, pages: list[int]) -> list[int]:
        self.pool.share(pages)
        copy = list(pages)
        self.held.append(copy)
        return copy

    @rule(pages=consumes(holders))
    def release(self, pages: list[int]) -> None:
        self.pool.release(pages)
        self.held = [other for other in self.held if other is not pages]

    @rule(page=st.integers(0, 11))
    def keep(self, page: int) -> None:
        if page in self.pages_held() - self.kept:
            self.pool.keep(page)
            self.kept.add(page)

    @rule(page=st.integers(0, 11))
    def forget(self, page: int) -> None:
        if page in self.kept:
            self.pool.forget(page)
            self.kept.remove(page)

    @rule(page=st.integers(-2, 14))
    def release_what_nobody_holds(self, page: int) -> None:
        if page not in self.pages_held():
            with pytest.raises(ValueError, match="page"):
                self.pool.release([*sorted(self.pages_held()), page])

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        assert self.pool.num_used == len(self.pages_held())
        assert self.pool.num_idle == len(self.kept - self.pages_held())
        assert self.pool.num_kept == len(self.kept)
        counted = self.pool.num_used + self.pool.num_free + self.pool.num_idle
        assert counted == self.pool.num_pages
        for page in range(self.pool.num_pages):
            assert self.pool.references(page) == sum(pages.count(page) for pages in self.held)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_rebuilding_takes_the_holders_word() -> None:
    pool = PagePool(5)
    pool.allocate(3)
    pool.keep(2)
    pool.rebuild([[0, 1], [1, 4]])
    pool.check_integrity()
    assert [pool.references(page) for page in range(5)] == [1, 2, 0, 0, 1]
    assert pool.allocate(2) == [2, 3]
    with pytest.raises(ValueError, match="unknown page 5"):
        pool.rebuild([[5]])
    pool.check_integrity()
    assert pool.num_free == 0
