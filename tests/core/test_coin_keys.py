"""Coins of the rejection family are keyed by the root of the step, not by the token's position.

Several steps in a row are enumerated, over coins that come up again where their keys do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest

from foredraft.core.acceptance import decide
from foredraft.testing.branches import Choices, Coin, outcomes
from foredraft.testing.draft_sources import drawn_chain
from foredraft.testing.law import (
    Prefix,
    Rule,
    SequenceLaw,
    exact_block,
    exact_rejection,
    largest_error,
    target_sequence_law,
    total_variation,
)
from foredraft.testing.tables import random_law

VOCAB, LENGTH = 3, 2
SEEDS = range(7, 15)
Key = Callable[[int, int], Hashable]  # (tokens before the step, offset) -> which coin
BOTH = pytest.mark.parametrize("rule", [exact_rejection, exact_block], ids=["rejection", "block"])


def by_root(root: int, offset: int) -> Hashable:
    return root, offset


def by_position(root: int, offset: int) -> Hashable:
    return root + offset


def steps_law(rule: Rule, seed: int, key: Key, one_stream: bool = False) -> SequenceLaw:
    """Sequences of `LENGTH` tokens, all emitted by steps with two drawn tokens each."""
    target, draft = random_law(seed, VOCAB), random_law(seed + 1000, VOCAB)

    def run(choices: Choices) -> Prefix:
        coins: dict[Hashable, Any] = {}
        output: Prefix = ()
        while len(output) < LENGTH:
            root, before = len(output), output

            def coin(index: int, stream: str, root: int = root) -> Any:
                name = key(root, index) if one_stream else (stream, key(root, index))
                return coins.setdefault(name, Coin(choices))

            drawn = drawn_chain(lambda prefix, before=before: draft((*before, *prefix)), 2)(choices)
            walk = rule(
                drawn.tree,
                drawn.tokens,
                drawn.probs,
                lambda index, coin=coin: coin(index, "accept"),
                coin(0, "residual"),
            )

            def law(node: int, drawn: Any = drawn, before: Prefix = before) -> Any:
                return target((*before, *(drawn.tokens[i] for i in range(node + 1))))

            verdict = decide(walk, law)
            kept = (drawn.tokens[node] for node in verdict.accepted)
            output = (*output, *kept, verdict.next_token)
        return output[:LENGTH]

    result: dict[Prefix, float] = {}
    for output, probability in outcomes(run):
        result[output] = result.get(output, 0.0) + probability
    return result


@BOTH
def test_keyed_by_the_root_the_law_is_exact_over_steps(rule: Rule) -> None:
    for seed in SEEDS:
        reference = target_sequence_law(random_law(seed, VOCAB), LENGTH)
        assert largest_error(steps_law(rule, seed, by_root), reference) < 1e-12


def test_keyed_by_position_blocks_are_biased() -> None:
    """Whether a block's first token stands depends on the coin of its second."""
    misses = [
        total_variation(
            steps_law(exact_block, seed, by_position),
            target_sequence_law(random_law(seed, VOCAB), LENGTH),
        )
        for seed in SEEDS
    ]
    assert max(misses) > 0.02


@BOTH
def test_one_stream_for_acceptance_and_residual_is_caught(rule: Rule) -> None:
    misses = [
        total_variation(
            steps_law(rule, seed, by_root, one_stream=True),
            target_sequence_law(random_law(seed, VOCAB), LENGTH),
        )
        for seed in SEEDS
    ]
    assert max(misses) > 0.02
