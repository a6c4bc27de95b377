"""The suffix index in Python and in C++: against counts of all substrings, and one another."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.drafters.suffix_draft import NUM_CELLS, DraftLimits, ReferenceIndex
from foredraft.drafters.suffix_estimates import Estimates
from foredraft.drafters.suffix_index import GRAM_LENGTHS, Occurrence
from foredraft.drafters.suffix_source import NativeIndex, index_maker
from foredraft.kernels.catalog import native_available

if native_available():
    from foredraft._native import SuffixIndex as CompiledIndex
else:
    CompiledIndex = None

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=4)
CONTEXT = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def filled(texts: Sequence[Sequence[int]], depth: int = 24, most: int = 10_000) -> ReferenceIndex:
    index = ReferenceIndex(depth, most)
    for text in texts:
        index.extend(index.add_text(), text)
    return index


def all_places(texts: Sequence[Sequence[int]], context: Sequence[int], depth: int):
    """Every (match, text, position) by comparing, the newest first."""
    found = []
    for number, text in enumerate(texts):
        for position in range(1, len(text)):
            match = 0
            while (
                match < min(depth, position, len(context))
                and text[position - 1 - match] == context[-1 - match]
            ):
                match += 1
            if match:
                found.append(Occurrence(match, number, position))
    return found[::-1]


@settings(max_examples=200, deadline=None)
@given(texts=TEXTS, context=CONTEXT, depth=st.integers(1, 24))
def test_every_continuation_of_every_substring_is_counted(texts, context, depth) -> None:
    index = filled(texts, depth)
    places = index.occurrences(context)
    for m in range(1, min(depth, len(context)) + 1):
        counted = Counter(texts[p.text][p.position] for p in places if p.match >= m)
        wanted: Counter[int] = Counter()
        for text in texts:
            for start in range(len(text) - m):
                if list(text[start : start + m]) == context[-m:]:
                    wanted[text[start + m]] += 1
        assert counted == wanted


@settings(max_examples=200, deadline=None)
@given(texts=TEXTS, context=CONTEXT, depth=st.integers(1, 24), most=st.integers(1, 6))
def test_the_newest_places_of_each_gram_length_are_kept(texts, context, depth, most) -> None:
    everything = all_places(texts, context, depth)
    wanted = []
    longer = depth + 1
    for n in reversed([n for n in GRAM_LENGTHS if n <= min(depth, len(context))]):
        newest = [place for place in everything if place.match >= n][:most]
        wanted += sorted((p for p in newest if p.match < longer), key=lambda p: -p.match)
        longer = n
    assert filled(texts, depth, most).occurrences(context) == wanted


class Pair:
    """Both implementations, told the same."""

    def __init__(self, depth: int, most: int) -> None:
        self.reference = ReferenceIndex(depth, most)
        self.raw = CompiledIndex(depth, most)
        self.native = NativeIndex(self.raw)
        self.texts: list[int] = []

    def add(self, context: Sequence[int], tokens: Sequence[int]) -> None:
        number = self.reference.add_text(context)
        assert self.native.add_text(context) == number
        self.texts.append(number)
        self.extend(number, tokens)

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        self.reference.extend(number, tokens)
        self.native.extend(number, tokens)

    def remove(self, number: int) -> None:
        self.texts.remove(number)
        self.reference.remove(number)
        self.native.remove(number)

    def check(self, context: Sequence[int], limits: DraftLimits, estimates: list[float]) -> None:
        assert self.native.num_tokens == self.reference.num_tokens
        for number in self.texts:
            assert self.native.text(number) == self.reference.text(number)
        for excluded in (None, *self.texts[:1]):
            wanted = self.reference.occurrences(context, excluded)
            found = self.raw.occurrences(context, -1 if excluded is None else excluded)
            assert [Occurrence(*place) for place in found] == wanted
            ask = (context, limits, estimates, None, excluded)
            assert self.native.propose(*ask) == self.reference.propose(*ask)
        for growing in self.texts:
            tail = self.reference.text(growing)[-30:]
            if tail:
                ask = (tail, limits, estimates, growing, None)
                assert self.native.propose(*ask) == self.reference.propose(*ask)
        for growing in self.texts[:1]:
            self.check_step(growing, limits, estimates)
        assert self.reference.is_consistent()
        assert self.native.is_consistent()

    def check_step(self, growing: int, limits: DraftLimits, estimates: list[float]) -> None:
        """A step with a token more, with one that is another than known, with what is no step."""
        text, more = self.reference.text(growing), estimates[::-1]
        first = max(0, len(text) - 8)
        known = text[first:]
        steps = [(first, [*known, 1]), (len(text) + 2, []), (-1, [7])]
        if known:
            steps += [(first, [*known[:-1], 9, 1]), (first, known[:-1])]
        for at, tokens in steps:
            for others in (False, True):
                made = [
                    index.draft(
                        growing, at, tokens, limits, estimates,
                        index if others else None, growing, more,
                    )
                    for index in (self.native, self.reference)
                ]  # fmt: skip
                assert made[0] == made[1]
                assert (made[0] is not None) == (tokens == [*known, 1])
        now = self.reference.text(growing)
        assert now == self.native.text(growing) == [*text, 1]
        ask = (now[-self.reference.max_depth :], limits)
        mine = self.reference.propose(*ask, estimates, growing, None)
        theirs = self.reference.propose(*ask, more, None, growing)
        best = theirs._replace(of_others=True) if theirs.score > mine.score else mine
        step = (growing, first, [*known, 1], limits, estimates, self.native, growing, more)
        assert self.native.draft(*step) == best


TOKENS = st.lists(st.integers(0, 3), max_size=100)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), TOKENS, TOKENS),
        st.tuples(st.just("extend"), st.integers(0, 9), TOKENS),
        st.tuples(st.just("remove"), st.integers(0, 9), st.just(None)),
    ),
    max_size=12,
)


@pytest.mark.skipif(CompiledIndex is None, reason="needs the compiled extension")
@settings(max_examples=150, deadline=None)
@given(
    operations=OPERATIONS,
    context=CONTEXT,
    depth=st.sampled_from([1, 3, 4, 8, 24]),
    most=st.sampled_from([1, 5, 64]),
    nodes=st.integers(0, 12),
    factor=st.sampled_from([0.5, 1.0, 4.0]),
    least=st.sampled_from([0.0, 0.1, 0.4]),
    tree=st.booleans(),
    seed=st.integers(0, 10),
)
def test_the_compiled_index_drafts_the_same(
    operations, context, depth, most, nodes, factor, least, tree, seed
) -> None:
    pair = Pair(depth, most)
    for kind, what, tokens in operations:
        if kind == "add":
            pair.add(what, tokens)
        elif pair.texts and kind == "extend":
            pair.extend(pair.texts[what % len(pair.texts)], tokens)
        elif pair.texts:
            pair.remove(pair.texts[what % len(pair.texts)])
    coins = random.Random(seed)
    estimates = (
        [coins.uniform(0.05, 0.95) for _ in range(NUM_CELLS)] if seed else Estimates().values
    )
    pair.check(context, DraftLimits(nodes, factor, least, tree), estimates)


@pytest.mark.skipif(CompiledIndex is None, reason="needs the compiled extension")
def test_many_texts_come_and_go_in_the_compiled_index() -> None:
    """Tables grow, gaps close, pages are used again; nothing of the removed is left."""
    coins = random.Random(1)
    pair = Pair(24, 64)
    for _ in range(120):
        tokens = [coins.randrange(coins.choice([2, 50, 5000])) for _ in range(150)]
        pair.add(tokens[:20], tokens[20:])
        if len(pair.texts) > 8:
            pair.remove(coins.choice(pair.texts))
    limits, estimates = DraftLimits(8, 4.0, 0.0, True), Estimates().values
    pair.check(pair.reference.text(pair.texts[0])[:30], limits, estimates)
    size = pair.native.num_bytes
    for number in list(pair.texts):
        pair.remove(number)
    assert pair.native.num_tokens == 0
    assert pair.native.num_bytes < size
    assert pair.native.is_consistent()
    assert pair.native.propose([1, 2], limits, estimates).tokens == []


def test_inconsistency_is_seen() -> None:
    index = filled([[1, 2, 1, 2]])
    assert index.is_consistent()
    index._places[0].popitem()
    assert not index.is_consistent()


def test_the_work_of_a_draft_is_bounded_at_any_length() -> None:
    """Reported fault 60, in operations: the same places are visited behind 50 and 50,000 tokens."""
    visits = []
    for length in (50, 50_000):
        index = filled([[i % 7 for i in range(length)]], 24, 8)
        visits.append(len(index.occurrences([i % 7 for i in range(30)])))
    assert visits[0] <= 8 * len(GRAM_LENGTHS)
    assert visits[1] <= 8 * len(GRAM_LENGTHS)


def test_where_nothing_is_compiled_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "foredraft._native", None)
    assert isinstance(index_maker(24, 64)(), ReferenceIndex)
