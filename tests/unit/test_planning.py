"""Planning: the closed forms against enumeration, and the fixed policy."""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.core.counts import AcceptanceCounts
from foredraft.planning.best_tree import best_tree
from foredraft.planning.policy import FixedWidth, Load, RequestState
from foredraft.planning.speedup import (
    DraftLength,
    best_draft_length,
    expected_tokens,
    iid_acceptance,
    iid_expected_tokens,
    speedup,
    speedup_ceiling,
    step_cost,
)

rates = st.floats(0.0, 1.0)


def enumerated_tokens(acceptance: list[float]) -> float:
    """Every pattern of coins, accepted up to the first rejection."""
    total = 0.0
    for outcomes in product((True, False), repeat=len(acceptance)):
        probability = 1.0
        for rate, accepted in zip(acceptance, outcomes, strict=True):
            probability *= rate if accepted else 1.0 - rate
        run = outcomes.index(False) if False in outcomes else len(outcomes)
        total += probability * (run + 1)
    return total


@given(st.lists(rates, max_size=7))
def test_expected_tokens_is_the_enumeration(acceptance: list[float]) -> None:
    assert expected_tokens(acceptance) == pytest.approx(enumerated_tokens(acceptance))


@given(rates, st.integers(0, 8))
def test_iid_is_the_case_of_equal_rates(rate: float, length: int) -> None:
    assert iid_expected_tokens(rate, length) == pytest.approx(expected_tokens([rate] * length))
    if rate < 0.999:
        closed = (1 - rate ** (length + 1)) / (1 - rate)
        assert iid_expected_tokens(rate, length) == pytest.approx(closed)
    assert iid_expected_tokens(1.0, length) == length + 1


@given(st.lists(rates, max_size=6), st.floats(0.0, 0.5), st.lists(st.floats(0, 1), max_size=8))
def test_the_best_length_is_the_best_of_all(
    acceptance: list[float], draft_cost: float, increments: list[float]
) -> None:
    verify_cost = [1.0]
    for increment in increments:
        verify_cost.append(verify_cost[-1] + increment)
    best = best_draft_length(acceptance, draft_cost, verify_cost)
    longest = min(len(acceptance), len(verify_cost) - 1)
    every = [speedup(acceptance[:k], draft_cost, verify_cost) for k in range(longest + 1)]
    assert every[0] == 1.0
    assert best == DraftLength(every.index(max(every)), max(every))


@given(st.floats(0.05, 0.95), st.floats(0.0, 0.4), st.floats(0.0, 0.3))
def test_with_convex_costs_the_marginal_rule_finds_the_same(
    rate: float, draft_cost: float, slope: float
) -> None:
    """Lengthen while marginal gain / marginal cost exceeds the speed-up so far."""
    verify_cost = [1.0 + slope * n for n in range(40)]
    length = 0
    while length < 38:
        gain = rate ** (length + 1)
        cost = step_cost(length + 1, draft_cost, verify_cost) - step_cost(
            length, draft_cost, verify_cost
        )
        if gain <= cost * speedup([rate] * length, draft_cost, verify_cost):
            break
        length += 1
    best = best_draft_length([rate] * 38, draft_cost, verify_cost)
    found = speedup([rate] * length, draft_cost, verify_cost)
    assert found == pytest.approx(best.speedup, rel=1e-9)


def test_leviathans_example() -> None:
    """Section 3.3: with free verification an improvement needs a > c, and is (1 + a) / (1 + c) at k
    = 1.
    """
    free = [1.0] * 10
    assert best_draft_length([0.2] * 9, 0.2, free).num_draft_tokens == 0
    assert best_draft_length([0.1] * 9, 0.2, free) == DraftLength(0, 1.0)
    assert speedup([0.8], 0.1, free) == pytest.approx(1.8 / 1.1)


def test_a_staircase_is_looked_at_beyond_its_step() -> None:
    """The second token does not pay, the third, which is free, does."""
    verify_cost = [1.0, 1.05, 1.9, 1.9, 1.9]
    best = best_draft_length([0.95] * 4, 0.0, verify_cost)
    assert best.num_draft_tokens == 4
    assert speedup([0.95] * 2, 0.0, verify_cost) < speedup([0.95], 0.0, verify_cost)


def test_the_iid_estimate_is_not_censored() -> None:
    """Rates recovered from counts: accepted / drafted would say 0.4 for this one."""
    counts = AcceptanceCounts()
    for accepted in (4, 0, 1, 3):
        counts.record(5, accepted, accepted + 1)
    assert iid_acceptance(counts.num_accepted_tokens, 4) == pytest.approx(8 / 12)
    assert counts.acceptance_rate == pytest.approx(0.4)
    assert iid_acceptance(0, 0) == 0.0


def test_measured_rates_give_the_measured_length() -> None:
    """Conditional rates of one draft length rebuild the mean acceptance length exactly."""
    counts = AcceptanceCounts()
    for accepted in (3, 0, 1, 3, 2, 2, 0):
        counts.record(3, accepted, accepted + 1)
    rebuilt = expected_tokens(counts.conditional_acceptance_by_position)
    assert rebuilt == pytest.approx(counts.mean_acceptance_length)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"rate must be in \[0, 1\], got 1.5"):
        expected_tokens([0.5, 1.5])
    with pytest.raises(ValueError, match="got -1"):
        iid_expected_tokens(0.5, -1)
    with pytest.raises(ValueError, match="needs the cost of 4 rows"):
        step_cost(3, 0.1, [1.0, 1.1])


@pytest.mark.parametrize("width", [0, 1, 7])
def test_the_fixed_policy_never_changes(width: int) -> None:
    policy = FixedWidth(width)
    counts = AcceptanceCounts()
    for _ in range(50):
        counts.record(7, 0, 1)
    for load in (Load(1, 1), Load(64, 512)):
        requests = [RequestState("a"), RequestState("b", counts=counts)]
        assert policy.widths(load, requests) == [width, width]


@given(st.floats(0.0, 0.99), st.floats(0.001, 0.9))
def test_the_ceiling_is_the_best_of_all_lengths(rate: float, draft_cost: float) -> None:
    every = [iid_expected_tokens(rate, k) / (k * draft_cost + 1) for k in range(300)]
    assert speedup_ceiling(rate, draft_cost) == pytest.approx(max(every))


def test_the_ceilings_ends() -> None:
    assert speedup_ceiling(0.8) == pytest.approx(5.0)
    assert speedup_ceiling(1.0) == math.inf
    assert speedup_ceiling(1.0, 0.25) == pytest.approx(4.0)
    assert speedup_ceiling(0.0, 0.1) == 1.0
    with pytest.raises(ValueError, match="draft_cost must be 0 or more, got -1"):
        speedup_ceiling(0.5, -1)


def every_tree(nodes: int) -> set[tuple[int, ...]]:
    """Parents of all trees, a parent before its children."""
    return set(product(*(range(-1, i) for i in range(nodes))))


def tree_tokens(parents: tuple[int, ...], rates: list[float]) -> tuple[float, int]:
    """Expected tokens, and the depth; siblings take the ranks in their order."""
    alive, depth, children = {-1: 1.0}, {-1: 0}, Counter[int]()
    for node, parent in enumerate(parents):
        rank = children[parent]
        children[parent] += 1
        alive[node] = alive[parent] * (rates[rank] if rank < len(rates) else -math.inf)
        depth[node] = depth[parent] + 1
    return sum(alive.values()), max(depth.values())


@given(
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=3),
    st.floats(0.0, 0.5),
    st.lists(st.floats(0.0, 0.5), min_size=5, max_size=5),
    st.integers(1, 4),
)
@settings(max_examples=40)
def test_the_best_tree_is_the_best_of_all(
    weights: list[float], draft_cost: float, increments: list[float], max_depth: int
) -> None:
    rates = [weight / (sum(weights) + 0.2) for weight in weights]
    verify_cost = list(accumulate(increments, initial=1.0))
    best = best_tree(rates, draft_cost, verify_cost, max_depth)
    expected = 1.0
    for nodes in range(1, len(verify_cost)):
        for parents in every_tree(nodes):
            tokens, depth = tree_tokens(parents, rates)
            if depth <= max_depth:
                expected = max(expected, tokens / (depth * draft_cost + verify_cost[nodes]))
    assert best.speedup == pytest.approx(expected)
    tokens, depth = tree_tokens(best.parents, rates)
    assert tokens == pytest.approx(best.expected_tokens)
    cost = depth * draft_cost + verify_cost[len(best.parents)]
    assert tokens / cost == pytest.approx(best.speedup)


def test_one_rank_makes_a_chain_and_no_rate_no_tree() -> None:
    free = [1.0] * 9
    chain = best_tree([0.9], 0.05, free)
    assert chain.parents == tuple(range(-1, chain.depth - 1))
    assert chain.speedup == pytest.approx(best_draft_length([0.9] * 8, 0.05, free).speedup)
    assert best_tree([0.0], 0.1, free).parents == ()
    with pytest.raises(ValueError, match="at most 1 together"):
        best_tree([0.7, 0.6], 0.0, free)
