"""Drafts from a table and a text: by definition, and in Python and C++ alike."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.drafters.ngram_blend import (
    MAX_CANDIDATES,
    NO_TEXT,
    BlendLimits,
    BlendProposal,
    Layout,
    ReferenceText,
)
from foredraft.drafters.ngram_table_file import NgramTableFile
from foredraft.drafters.ngram_table_source import MAX_OCCURRENCES, text_maker
from foredraft.drafters.suffix_draft import ReferenceIndex
from foredraft.drafters.suffix_source import index_maker
from foredraft.kernels.catalog import native_available
from foredraft.testing.ngram_tables import small_table

V = 6
TOKENS = st.lists(st.integers(0, V - 1), max_size=30)
TEXTS = st.lists(TOKENS, min_size=1, max_size=4)
LIMITS = st.builds(BlendLimits, st.integers(0, 9), st.sampled_from([0.0, 0.05, 0.3]), st.booleans())
NATIVE = pytest.mark.skipif(not native_available(), reason="no compiled extension here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


def reference(table: NgramTableFile) -> ReferenceText:
    depth = max(*table.layout.own_orders, table.layout.num_orders)
    return ReferenceText(depth, MAX_OCCURRENCES)


@NATIVE
@given(TEXTS, TEXTS, TOKENS, TOKENS, LIMITS, st.integers(0, 20))
def test_both_implementations_draft_alike(folder, texts, past, start, more, limits, seed) -> None:
    table = small_table(folder / f"{seed}.ngrams", texts, V, order=1 + seed % 4, seed=seed)
    others = ReferenceIndex(8, MAX_OCCURRENCES), index_maker(8, MAX_OCCURRENCES)()
    for text in past:
        for index in others:
            index.extend(index.add_text(), text)
    pair = reference(table), text_maker(table)()
    assert type(pair[1]) is not ReferenceText
    for text in pair:
        text.extend(start)
    for own in (NO_TEXT, 0):
        found = [text.cells(table, index, own) for text, index in zip(pair, others, strict=True)]
        assert found[0] == found[1]
        made = [
            text.draft(table, len(start), more if own else [], limits, index, own)
            for text, index in zip(pair, others, strict=True)
        ]
        same_drafts(*made)
        start = [*start, *more] if own else start
        assert pair[0].tokens(0) == pair[1].tokens(0)
        assert all(text.is_consistent() for text in pair)


def same_drafts(one: BlendProposal | None, other: BlendProposal | None) -> None:
    if one is None or other is None:
        assert one is other
        return
    assert one[:2] == other[:2]
    assert one.confidence == pytest.approx(other.confidence, rel=1e-12, abs=1e-300)


@given(TEXTS, TOKENS, st.integers(0, 20))
def test_a_draft_is_the_likeliest_by_the_law(folder, texts, start, seed) -> None:
    """The law of the docstring from cells and weights; chains and trees follow it greedily."""
    table = small_table(folder / f"law-{seed}.ngrams", texts, V, seed=seed)
    text = text_maker(table)()
    text.extend(start)

    def law(path: list[int]) -> dict[int, float]:
        longer = reference(table)
        longer.extend([*start, *path])
        found = longer.cells(table, None, NO_TEXT)
        score = [sum(float(table.weights[cell]) for cell in each) for each in found.cells]
        escape = sum(float(table.weights[cell]) for cell in found.escape)
        total = math.exp(escape) + sum(map(math.exp, score))
        assert len(found.tokens) == len(set(found.tokens)) <= MAX_CANDIDATES
        return {t: math.exp(s) / total for t, s in zip(found.tokens, score, strict=True)}

    first = law([])
    chain = text.draft(table, len(start), [], BlendLimits(3, 0.0), None, NO_TEXT)
    assert bool(chain.tokens) == bool(first)
    if first:
        assert chain.confidence[0] == pytest.approx(max(first.values()))
        assert first[chain.tokens[0]] == pytest.approx(max(first.values()))
        assert sum(first.values()) < 1.0
    tree = text.draft(table, len(start), [], BlendLimits(5, 0.0, True), None, NO_TEXT)
    top = [t for t, parent in zip(tree.tokens, tree.parents, strict=True) if parent < 0]
    ranked = sorted(first.values(), reverse=True)
    assert [first[token] for token in top] == pytest.approx(ranked[: len(top)])
    paths = []
    for node, parent in enumerate(tree.parents):
        assert parent < node
        paths.append(tree.confidence[node] * (paths[parent] if parent >= 0 else 1.0))
    assert paths == sorted(paths, reverse=True)
    if text_has_room(tree, ranked):
        assert min(paths) >= ranked[len(top)] - 1e-12


def text_has_room(tree: BlendProposal, ranked: list[float]) -> bool:
    """Whether some token that could have come first was left out of a full tree."""
    top = sum(parent < 0 for parent in tree.parents)
    return len(tree.tokens) == 5 and top < len(ranked)


@given(st.lists(st.integers(0, V - 1), min_size=1, max_size=20), TOKENS, st.integers(1, 5))
def test_another_history_is_told_and_changes_nothing(folder, start, more, back) -> None:
    table = small_table(folder / "other.ngrams", [[0, 1, 2, 3]], V)
    first = max(0, len(start) - back)
    wrong = [(token + 1) % V for token in start[first:]]
    for text in (reference(table), text_maker(table)()):
        text.extend(start)
        for at, tokens in ((first, [*wrong, *more]), (len(start) + 1, more), (-1, more)):
            assert text.draft(table, at, tokens, BlendLimits(3, 0.0), None, NO_TEXT) is None
            assert text.tokens(0) == start


def test_the_layout_has_a_place_for_every_cell() -> None:
    """The last cells of every expert border on the next one's first."""
    for orders, own in ((1, ()), (5, (1, 2, 3)), (8, (1, 64))):
        layout = Layout(orders, own)
        assert layout.text_cells == orders * 13 * 11
        assert layout.seen_cells - layout.text_cells == len(own) * 2 * 13 * 11
        assert layout.escape_cells - layout.seen_cells == 9 * 6
        assert layout.num_cells - layout.escape_cells == (orders + len(own)) * 11 * 6 + 1
