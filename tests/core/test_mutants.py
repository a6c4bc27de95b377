"""The enumeration catches wrong rules: each misses the law by more than 0.02 on a drawn table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from foredraft.core.acceptance import Verdict, maximal_acceptance
from foredraft.testing.law import (
    ChainRule,
    SequenceLaw,
    WeightedDraft,
    chain_sequence_law,
    emitted_law,
    exact_rejection,
    fixed_draft,
    largest_error,
    sampled_drafts,
    target_sequence_law,
    total_variation,
    tree_sequence_law,
)
from foredraft.testing.mutants import (
    FIXED_CHAIN_MUTANTS,
    SAMPLED_CHAIN_MUTANTS,
    TREE_MUTANTS,
    softmax_for_fixed_draft,
)
from foredraft.testing.tables import random_law

MISS = 0.02
SEEDS = range(8)
PARENTS, NODES = (-1, -1, 0, 0, 1), (0, 1, 2, 0, 1)


def sampled_law(rule: ChainRule, seed: int) -> SequenceLaw:
    drafts = sampled_drafts(random_law(seed + 1000, 3), 2)
    return chain_sequence_law(rule, random_law(seed, 3), drafts, 3)


@pytest.mark.parametrize("name", SAMPLED_CHAIN_MUTANTS)
def test_wrong_for_sampled_drafts(name: str) -> None:
    misses = [
        total_variation(
            sampled_law(SAMPLED_CHAIN_MUTANTS[name], seed),
            target_sequence_law(random_law(seed, 3), 3),
        )
        for seed in SEEDS
    ]
    assert max(misses) > MISS


@pytest.mark.parametrize("name", FIXED_CHAIN_MUTANTS)
def test_wrong_for_fixed_drafts(name: str) -> None:
    misses = []
    for seed in SEEDS:
        target = random_law(seed, 3)
        law = chain_sequence_law(FIXED_CHAIN_MUTANTS[name], target, fixed_draft((0, 1)), 3)
        misses.append(total_variation(law, target_sequence_law(target, 3)))
    assert max(misses) > MISS


@pytest.mark.parametrize("name", TREE_MUTANTS)
def test_wrong_for_fixed_trees(name: str) -> None:
    misses = []
    for seed in SEEDS:
        target = random_law(seed, 3)
        law = tree_sequence_law(TREE_MUTANTS[name], target, PARENTS, NODES, 3)
        misses.append(total_variation(law, target_sequence_law(target, 3)))
    assert max(misses) > MISS


def test_a_greedy_draft_verified_by_its_softmax() -> None:
    """The draft was greedy, its softmax is taken for the law drawn from (transformers#32867)."""
    misses = []
    for seed in SEEDS:
        target, draft = random_law(seed, 4), random_law(seed + 1000, 4)
        first = int(draft(()).argmax())
        second = int(draft((first,)).argmax())
        q = torch.stack([draft(()), draft((first,))])
        law = chain_sequence_law(
            softmax_for_fixed_draft(q), target, fixed_draft((first, second)), 3
        )
        misses.append(total_variation(law, target_sequence_law(target, 3)))
    assert max(misses) > MISS


def test_a_law_that_is_not_the_one_drawn_from() -> None:
    """Drawn after top-k 2, verified by the law before top-k (transformers#47932)."""
    misses = []
    for seed in SEEDS:
        target, raw = random_law(seed, 8), random_law(seed + 1000, 8, "flat")(())
        processed = torch.zeros_like(raw)
        top = raw.topk(2).indices
        processed[top] = raw[top] / raw[top].sum()
        drafts = [WeightedDraft(float(processed[x]), (x,), raw[None]) for x in top.tolist()]
        law = chain_sequence_law(exact_rejection, target, drafts, 2)
        misses.append(total_variation(law, target_sequence_law(target, 2)))
        true = [WeightedDraft(each.weight, each.tokens, processed[None]) for each in drafts]
        law = chain_sequence_law(exact_rejection, target, true, 2)
        assert largest_error(law, target_sequence_law(target, 2)) < 1e-12
    assert max(misses) > MISS


def test_a_sampled_draft_taken_for_one_hot_is_exact_but_accepts_less() -> None:
    """No mutant of the law, for each token the one-hot rule is exact: a loss only (vllm#40149)."""
    target, draft = random_law(1, 4), random_law(2, 4)
    blind = [WeightedDraft(each.weight, each.tokens, None) for each in sampled_drafts(draft, 1)]
    law = chain_sequence_law(exact_rejection, target, blind, 2)
    assert largest_error(law, target_sequence_law(target, 2)) < 1e-12

    def acceptance(drafts: list[WeightedDraft]) -> float:
        return sum(
            each.weight * share
            for each in drafts
            for tokens, share in emitted_law(exact_rejection, target, each).items()
            if len(tokens) == 2
        )

    p, q = target(()), draft(())
    assert acceptance(blind) == pytest.approx(float((p * q).sum()), abs=1e-12)
    seen = list(sampled_drafts(draft, 1))
    assert acceptance(seen) == pytest.approx(maximal_acceptance(p, q), abs=1e-12)
    assert acceptance(seen) > acceptance(blind) + 0.1
    itself = list(sampled_drafts(target, 1))
    assert acceptance(itself) == pytest.approx(1.0, abs=1e-12)


def test_the_enumeration_refuses_a_rule_that_is_not_sequential() -> None:
    """Thresholds of a rule whose coins interact would be meaningless."""

    def interacting(
        tokens: Sequence[int],
        law: Callable[[int], Tensor],
        draft_probs: Tensor | None,
        accept_coins: Sequence[float],
        residual_coin: float,
    ) -> Verdict:
        swapped = [accept_coins[1], accept_coins[0]]
        return exact_rejection(tokens, law, draft_probs, swapped, residual_coin)

    with pytest.raises(ValueError, match=r"sequential|accept"):
        sampled_law(interacting, 3)
