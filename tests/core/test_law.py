"""The output law of the acceptance rules equals the target's, by exact enumeration."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.core.acceptance import maximal_acceptance
from foredraft.testing.law import (
    WeightedDraft,
    chain_sequence_law,
    emitted_law,
    exact_rejection,
    fixed_draft,
    independent_match,
    largest_error,
    sampled_drafts,
    target_sequence_law,
    tree_sequence_law,
)
from foredraft.testing.tables import KINDS, Kind, random_law

EXACT = 1e-12
Law = Callable[[tuple[int, ...]], Tensor]


def assert_chain_is_exact(target: Law, drafts: list[WeightedDraft], length: int) -> None:
    law = chain_sequence_law(exact_rejection, target, drafts, length)
    assert sum(law.values()) == pytest.approx(1.0, abs=EXACT)
    assert largest_error(law, target_sequence_law(target, length)) < EXACT


@pytest.mark.parametrize("draft_kind", KINDS)
@pytest.mark.parametrize("target_kind", KINDS)
def test_sampled_drafts_of_every_kind(target_kind: Kind, draft_kind: Kind) -> None:
    for seed in range(2):
        target = random_law(seed, 4, target_kind)
        drafts = list(sampled_drafts(random_law(seed + 100, 4, draft_kind), 2))
        assert_chain_is_exact(target, drafts, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_fixed_drafts_of_every_kind(kind: Kind) -> None:
    for seed in range(3):
        target = random_law(seed, 5, kind)
        for tokens in ((0, 1, 2), (3, 3, 3), (4, 0, 4), (2,)):
            assert_chain_is_exact(target, fixed_draft(tokens), 4)


def test_long_windows() -> None:
    target, draft = random_law(1, 5), random_law(2, 5)
    assert_chain_is_exact(target, list(sampled_drafts(draft, 3)), 4)


def test_the_draft_may_be_the_target_itself() -> None:
    target = random_law(5, 4)
    drafts = list(sampled_drafts(target, 3))
    assert_chain_is_exact(target, drafts, 4)


def test_disjoint_supports() -> None:
    def target(prefix: tuple[int, ...]) -> Tensor:
        return torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)

    def draft(prefix: tuple[int, ...]) -> Tensor:
        return torch.tensor([0.0, 0.0, 0.3, 0.7], dtype=torch.float64)

    assert_chain_is_exact(target, list(sampled_drafts(draft, 2)), 3)


def test_a_draft_that_may_stop_before_drawing() -> None:
    """The length may depend on the tokens kept so far: a chain ends after a drawn 0."""
    target, draft = random_law(3, 3), random_law(4, 3)
    drafts = [each for each in sampled_drafts(draft, 1) if each.tokens == (0,)]
    drafts += [each for each in sampled_drafts(draft, 2) if each.tokens[0] != 0]
    assert sum(each.weight for each in drafts) == pytest.approx(1.0)
    assert_chain_is_exact(target, drafts, 3)


def test_the_empty_draft_is_plain_sampling() -> None:
    assert_chain_is_exact(random_law(3, 5), fixed_draft(()), 2)


TREES = {
    "chain": (-1, 0, 1),
    "siblings": (-1, -1),
    "two by two": (-1, -1, 0, 0, 1, 1),
    "uneven": (-1, 0, 0, -1, 3),
}


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_fixed_trees_of_every_kind(shape: str, kind: Kind) -> None:
    parents = TREES[shape]
    for seed in range(3):
        target = random_law(seed, 4, kind)
        distinct = tuple((node + seed) % 4 for node in range(len(parents)))
        for tokens in (distinct, (1,) * len(parents)):  # the second one repeats its siblings
            law = tree_sequence_law(independent_match, target, parents, tokens, 3)
            assert largest_error(law, target_sequence_law(target, 3)) < EXACT


weights = st.lists(
    st.one_of(
        st.integers(0, 3).map(float),
        st.sampled_from([1e-300, 1e-17, 1e-12, 1e-6]),
        st.floats(0.0, 1.0),
    ),
    min_size=3,
    max_size=3,
).filter(lambda row: sum(row) > 0.0)


@st.composite
def tables(draw: st.DrawFn, depth: int) -> Law:
    """A law that depends on every token before it, with zeros, ties and peaks."""
    rows: dict[tuple[int, ...], Tensor] = {}
    prefixes: list[tuple[int, ...]] = [()]
    for _ in range(depth + 1):
        for prefix in prefixes:
            row = torch.tensor(draw(weights), dtype=torch.float64)
            rows[prefix] = row / row.sum()
        prefixes = [(*prefix, token) for prefix in prefixes for token in range(3)]
    return rows.__getitem__


@settings(max_examples=60, deadline=None)
@given(tables(depth=2), tables(depth=1))
def test_sampled_drafts_over_drawn_tables(target: Law, draft: Law) -> None:
    assert_chain_is_exact(target, list(sampled_drafts(draft, 2)), 3)


@settings(max_examples=60, deadline=None)
@given(tables(depth=2), st.lists(st.integers(0, 2), max_size=2))
def test_fixed_drafts_over_drawn_tables(target: Law, tokens: list[int]) -> None:
    assert_chain_is_exact(target, fixed_draft(tokens), 3)


@settings(max_examples=60, deadline=None)
@given(tables(depth=2), st.lists(st.integers(0, 2), min_size=5, max_size=5))
def test_fixed_trees_over_drawn_tables(target: Law, tokens: list[int]) -> None:
    law = tree_sequence_law(independent_match, target, TREES["uneven"], tokens, 3)
    assert largest_error(law, target_sequence_law(target, 3)) < EXACT


@settings(max_examples=40, deadline=None)
@given(tables(depth=1), tables(depth=0))
def test_what_a_step_emits_given_how_much_it_accepts(target: Law, draft: Law) -> None:
    """P(accept x, then y) = min(p, q)(x) p(y | x); P(accept nothing, then y) = (p - q)+(y)."""
    p, q = target(()), draft(())
    emitted: dict[tuple[int, ...], float] = {}
    for each in sampled_drafts(draft, 1):
        for tokens, share in emitted_law(exact_rejection, target, each).items():
            emitted[tokens] = emitted.get(tokens, 0.0) + each.weight * share
    for x in range(3):
        assert emitted.get((x,), 0.0) == pytest.approx(max(float(p[x] - q[x]), 0.0), abs=EXACT)
        for y in range(3):
            expected = min(float(p[x]), float(q[x])) * float(target((x,))[y])
            assert emitted.get((x, y), 0.0) == pytest.approx(expected, abs=EXACT)
    accepted = sum(share for tokens, share in emitted.items() if len(tokens) == 2)
    assert accepted == pytest.approx(maximal_acceptance(p, q), abs=EXACT)
    assert accepted == pytest.approx(1.0 - float((p - q).abs().sum()) / 2.0, abs=EXACT)
