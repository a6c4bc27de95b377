"""Typical and synthetic acceptance do what they say, and are no exact rules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foredraft.core.acceptance import Coins, Origin, Rows, Verdict, Walk, decide
from foredraft.core.row_math import TorchRowMath
from foredraft.core.synthetic import rates_of_length, synthetic
from foredraft.core.trees import Topology, chain, topology
from foredraft.core.typical import bar_of, typical
from foredraft.testing.draft_sources import fixed_draft, regular_tree
from foredraft.testing.law import emitted_law, sequence_law, target_sequence_law, total_variation
from foredraft.testing.tables import random_law

ROW_MATH = TorchRowMath()


def rows_of(*rows: list[float]) -> dict[int, Tensor]:
    return {node - 1: torch.tensor(row, dtype=torch.float64) for node, row in enumerate(rows)}


def judged(tree: Topology, tokens: Sequence[int], laws: dict[int, Tensor]) -> Verdict:
    return decide(typical(tree, tokens, 0.5, ROW_MATH), laws.__getitem__)


def typical_rule(
    tree: Topology,
    tokens: Sequence[int],
    draft_probs: Rows | None,
    accept_coin: Coins,
    residual_coin: float,
) -> Walk[Tensor]:
    return typical(tree, tokens, residual_coin, ROW_MATH)


def test_the_bar_is_the_smaller_of_the_threshold_and_the_scaled_entropy() -> None:
    certain = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    assert bar_of(certain, ROW_MATH, 0.09, 0.3) == pytest.approx(0.09)
    flat = torch.full((16,), 1 / 16, dtype=torch.float64)
    assert bar_of(flat, ROW_MATH, 0.09, 0.3) == pytest.approx(0.3 / 16)
    mixed = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    assert bar_of(mixed, ROW_MATH, 1.0, 0.3) == pytest.approx(0.3 * math.exp(-1.5 * math.log(2)))


def test_a_chain_stands_up_to_the_first_unlikely_token() -> None:
    laws = rows_of([0.6, 0.4, 0.0], [0.95, 0.05, 0.0], [0.0, 0.0, 1.0])
    assert judged(chain(2), (1, 0), laws) == Verdict((0, 1), 2, Origin.BONUS)
    assert judged(chain(2), (1, 1), laws) == Verdict((0,), 0, Origin.RECOVERED)
    assert judged(chain(2), (2, 0), laws) == Verdict((), 0, Origin.RECOVERED)
    assert judged(chain(0), (), laws) == Verdict((), 0, Origin.PLAIN)


def test_the_deepest_path_stands_then_the_likeliest_then_the_first() -> None:
    # root -> 0, 1;  0 -> 2;  1 -> 3, 4
    tree = topology((-1, -1, 0, 1, 1))
    laws = rows_of([0.5, 0.4, 0.1], [0.2, 0.8, 0.0], [0.1, 0.45, 0.45], *([[1.0, 0.0, 0.0]] * 3))
    assert judged(tree, (0, 1, 1, 1, 2), laws).accepted == (0, 2)  # .5 * .8 > .4 * .45
    assert judged(tree, (0, 1, 2, 1, 2), laws).accepted == (1, 3)  # node 2 fails; 3 before 4
    assert judged(tree, (2, 2, 0, 0, 0), rows_of([1.0, 0.0, 0.0])).accepted == ()


def test_a_certain_target_makes_it_greedy() -> None:
    """Temperature 0 is the limit: what stands is the argmax, and so is what follows."""
    laws = rows_of([0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0])
    assert judged(chain(2), (1, 0), laws) == Verdict((0, 1), 2, Origin.BONUS)
    assert judged(chain(2), (1, 2), laws) == Verdict((0,), 0, Origin.RECOVERED)


def test_typical_acceptance_changes_the_law() -> None:
    """It is no exact rule, which is why it is labelled."""
    misses = []
    for seed in range(5):
        target = random_law(seed, 3, "flat")
        law = sequence_law(typical_rule, target, fixed_draft((0, 1)), 3)
        misses.append(total_variation(law, target_sequence_law(target, 3)))
    assert min(misses) > 0.3


@given(st.lists(st.floats(0.0, 1.0), max_size=3).map(lambda rates: sorted(rates, reverse=True)))
def test_synthetic_acceptance_has_the_rates_asked_for(rates: list[float]) -> None:
    """P(the first i are accepted) = rates[i - 1] to 1e-12; the next token is the target's."""

    def rule(
        tree: Topology,
        tokens: Sequence[int],
        draft_probs: Rows | None,
        accept_coin: Coins,
        residual_coin: float,
    ) -> Walk[Tensor]:
        return synthetic(tree, rates, accept_coin(0), residual_coin, ROW_MATH)

    target = random_law(1, 3)
    for source in (
        fixed_draft([1] * len(rates)),
        fixed_draft([0, 1] * len(regular_tree(*[2] * len(rates))), regular_tree(*[2] * len(rates)))
        if rates
        else fixed_draft(()),
    ):
        emitted = emitted_law(rule, target, source)
        lengths: Counter[int] = Counter()
        for tokens, probability in emitted.items():
            lengths[len(tokens) - 1] += probability  # type: ignore[assignment]
            law = target(tokens[:-1])
            accepted = sum(p for other, p in emitted.items() if other[:-1] == tokens[:-1])
            assert probability == pytest.approx(accepted * float(law[tokens[-1]]), abs=1e-12)
        for i, rate in enumerate(rates):
            at_least = sum(share for count, share in lengths.items() if count > i)
            assert at_least == pytest.approx(rate, abs=1e-12)


def test_a_draft_shorter_than_the_rates_ends_the_path() -> None:
    laws = rows_of([1.0, 0.0], [0.0, 1.0])
    verdict = decide(synthetic(chain(1), [1.0, 1.0], 0.5, 0.5, ROW_MATH), laws.__getitem__)
    assert verdict == Verdict((0,), 1, Origin.BONUS)
    verdict = decide(synthetic(chain(1), [0.2, 0.1], 0.5, 0.5, ROW_MATH), laws.__getitem__)
    assert verdict == Verdict((), 0, Origin.RECOVERED)
    verdict = decide(synthetic(chain(0), [1.0], 0.5, 0.5, ROW_MATH), laws.__getitem__)
    assert verdict == Verdict((), 0, Origin.PLAIN)


@pytest.mark.parametrize(
    ("length", "rates"),
    [
        (1.0, (0.0,) * 4),
        (2.0, (1.0, 0.0, 0.0, 0.0)),
        (3.5, (1.0, 1.0, 0.5, 0.0)),
        (5.0, (1.0,) * 4),
    ],
)
def test_a_mean_length_becomes_rates_of_least_spread(
    length: float, rates: tuple[float, ...]
) -> None:
    assert rates_of_length(length, 4) == rates


@pytest.mark.parametrize("length", [0.5, 5.01, math.nan])
def test_a_mean_length_out_of_reach_is_named(length: float) -> None:
    with pytest.raises(ValueError, match=r"1 \.\. 5 with 4 draft tokens"):
        rates_of_length(length, 4)
