"""Expected tokens of each rule, by enumeration, against closed forms and upper limits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foredraft.testing.closed_forms import (
    chain_tokens,
    coupled_joint,
    iid_transport_bound,
    independent_joint,
    maximal_acceptance,
    prefix_bound,
    siblings_acceptance,
    token_joint,
    top_and_one_acceptance,
    transport_bound,
)
from foredraft.testing.draft_sources import drawn_chain, drawn_tree, fixed_draft, regular_tree
from foredraft.testing.law import (
    emitted_law,
    exact_block,
    exact_rejection,
    expected_tokens,
    sample_and_match,
)
from foredraft.testing.siblings import (
    SIBLING_LAWS,
    top_and_one,
    with_replacement,
    without_replacement,
)
from foredraft.testing.tables import random_law

from .drawn import cases, laws, pairs

EXACT = 1e-12
Law = Callable[[tuple[int, ...]], Tensor]


def constant(row: Tensor) -> Law:
    return lambda prefix: row


@pytest.mark.parametrize(("vocab_size", "depth"), [(3, 2), (2, 3)])
@cases(40)
@given(st.data())
def test_blocks_keep_at_least_as_much_as_tokens(
    vocab_size: int, depth: int, data: st.DataObject
) -> None:
    """Tokens: 1 + sum of prod min(p, q), by enumeration too. Blocks: no less, and no more than the
    ideal.
    """
    target, draft = data.draw(pairs(vocab_size, depth))
    source = drawn_chain(draft, depth)
    by_token = expected_tokens(emitted_law(exact_rejection, target, source))
    by_block = expected_tokens(emitted_law(exact_block, target, source))
    assert by_token == pytest.approx(chain_tokens(target, draft, depth), abs=EXACT)
    assert by_token - EXACT <= by_block <= prefix_bound(target, draft, depth) + EXACT


def test_a_block_of_one_or_a_fixed_block_is_worth_as_much_as_tokens() -> None:
    for seed in range(5):
        target, draft = random_law(seed, 4), random_law(seed + 50, 4)
        for source in (drawn_chain(draft, 1), fixed_draft((0, 1, 2))):
            assert expected_tokens(emitted_law(exact_block, target, source)) == pytest.approx(
                expected_tokens(emitted_law(exact_rejection, target, source)), abs=EXACT
            )


def test_the_worked_example_of_block_verification() -> None:
    """2403.10444: 10/9 accepted tokens by token, 11/9 by block, 12/9 for the ideal."""
    p = constant(torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))
    q = constant(torch.tensor([2 / 3, 1 / 3], dtype=torch.float64))
    source = drawn_chain(q, 2)
    assert expected_tokens(emitted_law(exact_rejection, p, source)) == pytest.approx(1 + 10 / 9)
    assert expected_tokens(emitted_law(exact_block, p, source)) == pytest.approx(1 + 11 / 9)
    assert prefix_bound(p, q, 2) == pytest.approx(1 + 12 / 9)


@pytest.mark.parametrize("name", SIBLING_LAWS)
@cases(25)
@given(pairs(4, 1), st.integers(2, 3))
def test_no_siblings_are_accepted_more_often_than_transport_allows(
    name: str, pair: tuple[Law, Law], count: int
) -> None:
    siblings = SIBLING_LAWS[name]
    target, draft = pair
    p, q = target(()), draft(())
    source = drawn_tree(regular_tree(count), draft, siblings)
    accepted = expected_tokens(emitted_law(exact_rejection, target, source)) - 1.0
    assert accepted == pytest.approx(siblings_acceptance(p, q, count, siblings), abs=EXACT)
    bound = transport_bound(p, q, count, siblings)
    assert accepted <= bound + EXACT
    if siblings is top_and_one:  # the best any rule can do for such drafts
        assert accepted == pytest.approx(top_and_one_acceptance(p, q, count), abs=EXACT)
        assert accepted == pytest.approx(bound, abs=EXACT)
    if siblings is with_replacement:
        assert bound == pytest.approx(iid_transport_bound(p, q, count), abs=EXACT)


@cases(40)
@given(laws(5, 1), st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_fixed_siblings_are_accepted_with_their_mass(target: Law, tokens: list[int]) -> None:
    expected = float(target(())[sorted(set(tokens))].sum())
    for rule in (exact_rejection, sample_and_match):
        emitted = emitted_law(rule, target, fixed_draft(tokens, [-1] * len(tokens)))
        assert expected_tokens(emitted) - 1.0 == pytest.approx(expected, abs=EXACT)


def test_a_tree_is_worth_the_product_of_its_levels() -> None:
    """Where p and q are the same everywhere: 1 + a + a a', a of three siblings, a' of two."""
    p, q = random_law(1, 4)(()), random_law(2, 4)(())
    for siblings in SIBLING_LAWS.values():
        first, second = (siblings_acceptance(p, q, count, siblings) for count in (3, 2))
        source = drawn_tree(regular_tree(3, 2), constant(q), siblings)
        tokens = expected_tokens(emitted_law(exact_rejection, constant(p), source))
        assert tokens == pytest.approx(1.0 + first + first * second, abs=EXACT)


def test_rejection_accepts_most_and_a_draw_of_its_own_least() -> None:
    for seed in range(20):
        target, draft = random_law(seed, 4), random_law(seed + 50, 4)
        worth = [
            chain_tokens(target, draft, 3, joint)
            for joint in (independent_joint, coupled_joint, token_joint)
        ]
        assert worth == sorted(worth)


# Means over p = 0.6 q + 0.4 noise, q and noise Dirichlet over six ids, from the reference's table
# (algorithms.md, section 1c): concentration, siblings -> what rules accept.
PUBLISHED = {
    (0.3, 2): (0.739, 0.770, 0.800, 0.815, 0.841, 0.628),
    (0.3, 3): (0.738, 0.782, 0.846, 0.828, 0.884, 0.775),
    (1.0, 2): (0.815, 0.856, 0.877, 0.928, 0.920, 0.535),
    (1.0, 3): (0.816, 0.875, 0.909, 0.954, 0.963, 0.681),
}


@pytest.mark.parametrize(("concentration", "count"), PUBLISHED)
def test_means_over_random_laws_are_those_published(concentration: float, count: int) -> None:
    """1 - TV, with and without replacement, the limit for iid draws, top and one, p(top).

    300 pairs: four standard errors are about 0.04.
    """
    drawn = np.random.default_rng(7).dirichlet([concentration] * 6, size=(300, 2))
    rows = []
    for q, noise in torch.from_numpy(drawn):
        p = 0.6 * q + 0.4 * noise
        rows.append(
            (
                maximal_acceptance(p, q),
                siblings_acceptance(p, q, count, with_replacement),
                siblings_acceptance(p, q, count, without_replacement),
                iid_transport_bound(p, q, count),
                top_and_one_acceptance(p, q, count),
                float(p[q.topk(count).indices].sum()),
            )
        )
    means = torch.tensor(rows).mean(dim=0).tolist()
    assert means == pytest.approx(PUBLISHED[concentration, count], abs=0.04)
