"""The enumeration catches wrong rules: each misses the law by more than 0.02 on a drawn table."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from foredraft.testing.block_mutants import BLOCK_MUTANTS, lattice_coin, product_against_product
from foredraft.testing.branches import Coin
from foredraft.testing.closed_forms import maximal_acceptance
from foredraft.testing.draft_sources import (
    DraftSource,
    WeightedDraft,
    drawn_chain,
    drawn_tree,
    fixed_draft,
    one_of,
    regular_tree,
    sampled_chains,
)
from foredraft.testing.law import (
    CoinFactory,
    Rule,
    emitted_law,
    exact_block,
    exact_rejection,
    largest_error,
    sequence_law,
    target_sequence_law,
    total_variation,
)
from foredraft.testing.mutants import (
    FIXED_CHAIN_MUTANTS,
    FIXED_TREE_MUTANTS,
    SAMPLED_CHAIN_MUTANTS,
    as_rule,
    softmax_for_fixed_draft,
)
from foredraft.testing.siblings import top_and_one, without_replacement
from foredraft.testing.tables import random_law
from foredraft.testing.tree_mutants import WITHOUT_REPLACEMENT_MUTANTS, top_siblings_as_drawn

MISS = 0.02
SEEDS = range(6)


def worst_miss(
    rule: Rule,
    source: Callable[[int], DraftSource],
    vocab_size: int = 3,
    length: int = 3,
    coin: CoinFactory = Coin,
) -> float:
    """The largest distance from the target's law over a few tables."""
    misses = []
    for seed in SEEDS:
        target = random_law(seed, vocab_size)
        law = sequence_law(rule, target, source(seed), length, coin)
        misses.append(total_variation(law, target_sequence_law(target, length)))
    return max(misses)


def drawn(seed: int) -> DraftSource:
    return drawn_chain(random_law(seed + 1000, 3), 2)


def branching(seed: int) -> DraftSource:
    return drawn_tree(regular_tree(2, 2), random_law(seed + 1000, 4), without_replacement)


@pytest.mark.parametrize("name", SAMPLED_CHAIN_MUTANTS)
def test_wrong_for_drawn_chains(name: str) -> None:
    assert worst_miss(as_rule(SAMPLED_CHAIN_MUTANTS[name]), drawn) > MISS


@pytest.mark.parametrize("name", FIXED_CHAIN_MUTANTS)
def test_wrong_for_fixed_chains(name: str) -> None:
    assert worst_miss(as_rule(FIXED_CHAIN_MUTANTS[name]), lambda seed: fixed_draft((0, 1))) > MISS


@pytest.mark.parametrize("name", FIXED_TREE_MUTANTS)
def test_wrong_for_fixed_trees(name: str) -> None:
    def tree(seed: int) -> DraftSource:
        return fixed_draft((0, 1, 2, 0, 1), (-1, -1, 0, 0, 1))

    assert worst_miss(as_rule(FIXED_TREE_MUTANTS[name]), tree) > MISS


@pytest.mark.parametrize("name", WITHOUT_REPLACEMENT_MUTANTS)
def test_wrong_for_siblings_drawn_without_replacement(name: str) -> None:
    rule = as_rule(WITHOUT_REPLACEMENT_MUTANTS[name])
    assert worst_miss(rule, branching, vocab_size=4) > MISS


@pytest.mark.parametrize("name", BLOCK_MUTANTS)
def test_wrong_for_blocks(name: str) -> None:
    """The wrong accept condition and the residual of one token among them (vllm-ascend#7807)."""
    assert worst_miss(as_rule(BLOCK_MUTANTS[name]), drawn) > MISS


def test_product_against_product_is_no_block_verification() -> None:
    """The shortcut of vllm-ascend's first block rule. On a lattice of coins, whose own error the
    exact rule shows.
    """
    rule = as_rule(product_against_product)

    def two_ids(seed: int) -> DraftSource:
        return drawn_chain(random_law(seed + 1000, 2), 2)

    shortcut = worst_miss(rule, two_ids, vocab_size=2, coin=lattice_coin)
    lattice = worst_miss(exact_block, two_ids, vocab_size=2, coin=lattice_coin)
    assert lattice < 0.04
    assert shortcut > lattice + 0.1


def test_block_verification_is_for_the_law_that_was_drawn_from_too() -> None:
    """A greedy chain verified by its softmax: wrong for blocks as for tokens."""

    def greedy(seed: int) -> DraftSource:
        draft = random_law(seed + 1000, 3)
        first = int(draft(()).argmax())
        tokens = (first, int(draft((first,)).argmax()))
        return one_of([WeightedDraft(1.0, tokens, torch.stack([draft(()), draft(tokens[:1])]))])

    assert worst_miss(exact_block, greedy) > MISS


def test_a_greedy_draft_verified_by_its_softmax() -> None:
    """The draft was greedy, its softmax is taken for the law drawn from (transformers#32867)."""
    misses = []
    for seed in SEEDS:
        target, draft = random_law(seed, 4), random_law(seed + 1000, 4)
        first = int(draft(()).argmax())
        second = int(draft((first,)).argmax())
        rule = softmax_for_fixed_draft(torch.stack([draft(()), draft((first,))]))
        law = sequence_law(rule, target, fixed_draft((first, second)), 3)
        misses.append(total_variation(law, target_sequence_law(target, 3)))
    assert max(misses) > MISS


def test_the_most_likely_siblings_verified_as_if_they_had_been_drawn() -> None:
    """Top-k siblings are deterministic: each is one-hot, whatever q says of it (EAGLE#183)."""
    misses = []
    for seed in SEEDS:
        target, draft = random_law(seed, 4), random_law(seed + 1000, 4)(())
        top = fixed_draft(draft.topk(2).indices.tolist(), (-1, -1))
        law = sequence_law(top_siblings_as_drawn(lambda node, q=draft: q), target, top, 2)
        misses.append(total_variation(law, target_sequence_law(target, 2)))
        assert largest_error(
            sequence_law(exact_rejection, target, top, 2), target_sequence_law(target, 2)
        ) == pytest.approx(0.0, abs=1e-12)
    assert max(misses) > MISS


def test_a_drawn_sibling_that_pretends_the_top_was_drawn_too() -> None:
    """One drawn from q without the top, verified by q itself."""

    def pretended(q: torch.Tensor) -> DraftSource:
        top = int(q.argmax())
        rest = top_and_one(q, [], 2)
        one_hot = torch.zeros_like(q)
        one_hot[top] = 1.0
        return one_of(
            WeightedDraft(float(rest[x]), (x, top), torch.stack([q, one_hot]), (-1, -1))
            for x in range(4)
            if x != top
        )

    misses = []
    for seed in SEEDS:
        target, draft = random_law(seed, 4), random_law(seed + 1000, 4)(())
        law = sequence_law(exact_rejection, target, pretended(draft), 2)
        misses.append(total_variation(law, target_sequence_law(target, 2)))
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
        law = sequence_law(exact_rejection, target, one_of(drafts), 2)
        misses.append(total_variation(law, target_sequence_law(target, 2)))
        true = [WeightedDraft(each.weight, each.tokens, processed[None]) for each in drafts]
        law = sequence_law(exact_rejection, target, one_of(true), 2)
        assert largest_error(law, target_sequence_law(target, 2)) < 1e-12
    assert max(misses) > MISS


def test_a_drawn_draft_taken_for_one_hot_is_exact_but_accepts_less() -> None:
    """No mutant of the law, for each token the one-hot rule is exact: a loss only (vllm#40149)."""
    target, draft = random_law(1, 4), random_law(2, 4)
    seen = sampled_chains(draft, 1)
    blind = [WeightedDraft(each.weight, each.tokens, None) for each in seen]
    law = sequence_law(exact_rejection, target, one_of(blind), 2)
    assert largest_error(law, target_sequence_law(target, 2)) < 1e-12

    def acceptance(drafts: list[WeightedDraft]) -> float:
        emitted = emitted_law(exact_rejection, target, one_of(drafts))
        return sum(share for tokens, share in emitted.items() if len(tokens) == 2)

    p, q = target(()), draft(())
    assert acceptance(blind) == pytest.approx(float((p * q).sum()), abs=1e-12)
    assert acceptance(seen) == pytest.approx(maximal_acceptance(p, q), abs=1e-12)
    assert acceptance(seen) > acceptance(blind) + 0.1
    assert acceptance(sampled_chains(target, 1)) == pytest.approx(1.0, abs=1e-12)
