"""The tree of known pages, against a plain table of every beginning that was made known."""

from __future__ import annotations

from dataclasses import dataclass

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

from foredraft.cache.pool import PagePool
from foredraft.cache.prefix import PrefixHit, PrefixNode, PrefixTree


def known(pool: PagePool, tree: PrefixTree, tokens: list[int], salt: str = "") -> list[int]:
    """Publish all full pages of two tokens each, and leave."""
    pages = pool.allocate(len(tokens) // 2)
    tree.publish(salt, tokens, pages)
    pool.release(pages)
    return pages


@pytest.fixture
def pool() -> PagePool:
    return PagePool(8)


@pytest.fixture
def tree(pool: PagePool) -> PrefixTree:
    return PrefixTree(2, pool)


def test_a_beginning_is_found_in_full_pages(pool, tree):
    a, b = known(pool, tree, [1, 2, 3, 4])
    assert tree.match("", [1, 2, 3, 4, 5], 9).pages == (a, b)
    assert tree.match("", [1, 2, 3, 9], 9).pages == (a,)
    assert tree.match("", [1, 2, 3], 9).pages == (a,)
    assert tree.match("", [1, 2, 3, 4], 1).pages == (a,)
    for nothing in ([1], [2, 1], [3, 4], []):
        assert tree.match("", nothing, 9) == PrefixHit()
    assert (pool.num_used, pool.num_idle, tree.num_pages) == (0, 2, 2)


def test_salts_know_nothing_of_each_other(pool, tree):
    ours = known(pool, tree, [1, 2, 3, 4], "ours")
    assert tree.match("theirs", [1, 2, 3, 4], 9) == PrefixHit()
    theirs = known(pool, tree, [1, 2, 3, 4], "theirs")
    assert not set(ours) & set(theirs)
    assert tree.match("ours", [1, 2, 3, 4], 9).pages == tuple(ours)
    while pool.num_idle:
        tree.evict()
        tree.check_integrity()
    assert not tree._salts.children  # a salt that nobody uses takes no memory


def test_the_end_of_what_was_in_use_longest_ago_goes_first(pool, tree):
    a, b = known(pool, tree, [1, 2, 3, 4])
    c, d = known(pool, tree, [5, 6, 7, 8])
    hit = tree.match("", [1, 2], 9)
    pool.share(hit.pages)
    pool.release(hit.pages)  # in use again, so `a` outlives the others
    gone = []
    while pool.num_idle:
        gone.append(pool.longest_idle)
        tree.evict()
        tree.check_integrity()
        pool.check_integrity()
    assert gone == [b, d, c, a]
    assert pool.num_free == 8
    with pytest.raises(ValueError, match="no page is idle"):
        tree.evict()


def test_of_two_that_compute_the_same_the_first_is_kept(pool, tree):
    first, second = pool.allocate(1), pool.allocate(2)
    tree.publish("", [1, 2], first)
    node = tree.publish("", [1, 2, 3, 4], second)
    assert tree.match("", [1, 2, 3, 4], 9) == PrefixHit((first[0], second[1]), 0, node)
    pool.release(second)
    assert (pool.num_free, pool.num_idle) == (6, 1)
    tree.check_integrity()


def test_a_page_in_use_takes_the_place_of_one_that_is_not(pool, tree):
    old = known(pool, tree, [1, 2, 3, 4])
    tree.mark_drafted(old)
    new = pool.allocate(2)
    tree.publish("", [1, 2, 3, 4], new[:1])
    assert tree.match("", [1, 2, 3, 4], 9).pages == (new[0], old[1])
    assert tree.match("", [1, 2, 3, 4], 9).num_drafted == 0
    assert (pool.num_used, pool.num_idle, pool.references(old[0])) == (2, 1, 0)
    tree.check_integrity()
    tree.publish("", [1, 2, 3, 4], new)
    pool.release(new)
    assert (pool.num_idle, pool.num_free) == (2, 6)


def test_what_is_known_behind_an_evicted_page_is_forgotten_and_can_be_made_known_again(pool, tree):
    first, second = pool.allocate(1), pool.allocate(3)
    tree.publish("", [1, 2], first)
    tokens = [1, 2, 3, 4, 5, 6]
    node = tree.publish("", tokens, second[:2])
    pool.release(first)  # idle, and before a page that is in use
    tree.evict()
    assert tree.num_pages == 0
    assert pool.num_used == 3
    tree.publish("", tokens, second, node)
    assert tree.match("", tokens, 9).pages == tuple(second)
    tree.check_integrity()


def test_a_page_is_the_drafters_up_to_the_first_that_is_not(pool, tree):
    a, _, c = known(pool, tree, [1, 2, 3, 4, 5, 6])
    tree.mark_drafted([a, c, 7])
    assert tree.match("", [1, 2, 3, 4, 5, 6], 9).num_drafted == 1
    assert tree.match("", [1, 2], 9).num_drafted == 1


def test_clearing_frees_what_nobody_holds(pool, tree):
    known(pool, tree, [1, 2, 3, 4])
    held = pool.allocate(1)
    node = tree.publish("", [7, 8], held)
    tree.clear()
    assert (tree.num_pages, pool.num_used, pool.num_free) == (0, 1, 7)
    pool.release(held)
    assert pool.num_free == 8
    again = pool.allocate(2)
    tree.publish("", [7, 8, 9, 9], again, node)  # the old node is not followed
    assert tree.match("", [7, 8], 9).pages == (again[0],)


def test_a_page_of_no_tokens_is_an_error(pool):
    with pytest.raises(ValueError, match="page_size must be 1 or more, got 0"):
        PrefixTree(0, pool)


def test_integrity_checks_find_what_was_changed_behind_their_back(pool, tree):
    a, b = known(pool, tree, [1, 2, 3, 4])
    pool.forget(b)
    with pytest.raises(RuntimeError, match="1 pages are kept, the tree has 2"):
        tree.check_integrity()
    pool.share([a])
    pool.allocate(1)
    pool.keep(b)
    tree.check_integrity()
    tree._nodes[b].key = (3,)
    with pytest.raises(RuntimeError, match="not below the page before it"):
        tree.check_integrity()
    del tree._nodes[b]
    with pytest.raises(RuntimeError, match="not those of its nodes"):
        tree.check_integrity()


@dataclass(eq=False)
class Holder:
    """Whoever computes tokens on pages, and makes the full ones known as it goes."""

    salt: str
    tokens: list[int]
    pages: list[int]
    num_full: int
    node: PrefixNode | None
    birth: int = 0  # of the last beginning it has made known, or found


Beginning = tuple[str, tuple[int, ...]]


class TreeMachine(RuleBasedStateMachine):
    """The tree against a table from beginnings to pages, and a list of pages by last use."""

    sequences = Bundle("sequences")
    # Few tokens, so that sequences meet.
    drawn = st.lists(st.integers(0, 1), max_size=9)

    @initialize(num_pages=st.integers(2, 14), page_size=st.integers(1, 3))
    def start(self, num_pages: int, page_size: int) -> None:
        self.size = page_size
        self.pool = PagePool(num_pages)
        self.tree = PrefixTree(page_size, self.pool)
        self.table: dict[Beginning, int] = {}
        self.births: dict[Beginning, int] = {}  # which time this beginning became known
        self.num_born = 0
        self.drafted: set[int] = set()
        self.idle: list[int] = []
        self.holders: dict[int, int] = dict.fromkeys(range(num_pages), 0)

    def beginning(self, salt: str, tokens: list[int], pages: int) -> Beginning:
        return salt, tuple(tokens[: pages * self.size])

    def longest(self, salt: str, tokens: list[int], most: int) -> list[int]:
        found: list[int] = []
        while len(found) < min(most, len(tokens) // self.size):
            page = self.table.get(self.beginning(salt, tokens, len(found) + 1))
            if page is None:
                break
            found.append(page)
        return found

    def forget(self, page: int) -> None:
        (gone,) = (key for key, known in self.table.items() if known == page)
        for salt, tokens in list(self.table):
            if salt == gone[0] and tokens[: len(gone[1])] == gone[1]:
                below = self.table.pop((salt, tokens))
                del self.births[salt, tokens]
                self.drafted.discard(below)
                if below in self.idle:
                    self.idle.remove(below)

    @rule(target=sequences, salt=st.sampled_from(["", "x"]), tokens=drawn, spare=st.integers(0, 2))
    def arrive(self, salt: str, tokens: list[int], spare: int) -> Holder:
        most = max(0, len(tokens) - 1) // self.size
        hit = self.tree.match(salt, tokens, most)
        expected = self.longest(salt, tokens, most)
        assert list(hit.pages) == expected
        leading = [page in self.drafted for page in expected]
        assert hit.num_drafted == [*leading, False].index(False)
        needed = len(tokens) // self.size + spare - len(expected)
        idle = [page for page in self.idle if page not in expected]
        if needed > self.pool.num_free + len(idle):
            return Holder(salt, [], [], 0, None)
        self.pool.share(hit.pages)
        self.idle = idle
        while self.pool.num_free < needed:
            self.evict()
        pages = expected + self.pool.allocate(needed)
        for page in pages:
            self.holders[page] += 1
        birth = self.births.get(self.beginning(salt, tokens, len(expected)), 0)
        return Holder(salt, tokens, pages, len(expected), hit.node, birth)

    @rule(sequence=sequences, count=st.integers(0, 4))
    def fill(self, sequence: Holder, count: int) -> None:
        most = len(sequence.tokens) // self.size
        full = min(sequence.num_full + count, most)
        if not sequence.pages or full == sequence.num_full:
            return
        last = self.beginning(sequence.salt, sequence.tokens, sequence.num_full)
        # What it has made known is forgotten now and then: it starts from its first token again.
        first = sequence.num_full if self.births.get(last) == sequence.birth else 0
        pages = sequence.pages[:full]
        sequence.num_full = full
        sequence.node = self.tree.publish(sequence.salt, sequence.tokens, pages, sequence.node)
        for depth in range(first, full):
            self.make_known(self.beginning(sequence.salt, sequence.tokens, depth + 1), pages[depth])
        last = self.beginning(sequence.salt, sequence.tokens, full)
        sequence.birth = self.births[last]

    def make_known(self, key: Beginning, page: int) -> None:
        there = self.table.setdefault(key, page)
        if key not in self.births:
            self.num_born += 1
            self.births[key] = self.num_born
        if there in self.idle:
            self.table[key] = page
            self.idle.remove(there)
            self.drafted.discard(there)

    @rule(sequence=sequences, count=st.integers(0, 4))
    def draft(self, sequence: Holder, count: int) -> None:
        pages = sequence.pages[: min(count, sequence.num_full)]
        self.tree.mark_drafted(pages)
        self.drafted |= set(pages) & set(self.table.values())

    @rule(sequence=consumes(sequences))
    def leave(self, sequence: Holder) -> None:
        self.pool.release(sequence.pages)
        for page in reversed(sequence.pages):
            self.holders[page] -= 1
            if not self.holders[page] and page in self.table.values():
                self.idle.append(page)
        sequence.pages = []

    @rule()
    def evict(self) -> None:
        if not self.idle:
            assert self.pool.longest_idle is None
            return
        assert self.pool.longest_idle == self.idle[0]
        self.tree.evict()
        self.forget(self.idle[0])

    @rule(yes=st.integers(0, 9))
    def clear(self, yes: int) -> None:
        if not yes:
            self.tree.clear()
            self.table, self.births, self.drafted, self.idle = {}, {}, set(), []

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.pool.check_integrity()
        self.tree.check_integrity()
        assert self.tree.num_pages == len(self.table)
        assert self.pool.num_idle == len(self.idle)
        assert self.pool.num_used == sum(holders > 0 for holders in self.holders.values())

    def teardown(self) -> None:
        if hasattr(self, "tree"):
            self.tree.clear()
            assert self.pool.num_free == self.pool.num_pages - self.pool.num_used
            assert self.pool.num_kept == 0


TreeMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestTreeMachine = TreeMachine.TestCase
