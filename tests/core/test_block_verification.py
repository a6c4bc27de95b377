"""Block verification on chosen inputs: what it asks for, guards, long products."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from foredraft.core.acceptance import BadRow, Origin, Verdict, decide
from foredraft.core.block_verification import block
from foredraft.core.row_math import TorchRowMath
from foredraft.testing.tables import random_law

ROW_MATH = TorchRowMath()
LARGEST = 1.0 - 2.0**-33


def rows_of(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def judged(
    tokens: Sequence[int],
    laws: Tensor,
    probs: Tensor | None,
    coins: Sequence[float],
    residual_coin: float = 0.5,
) -> Verdict:
    walk = block(tokens, probs, coins.__getitem__, residual_coin, ROW_MATH)
    return decide(walk, lambda node: laws[node + 1])


def test_a_later_success_makes_up_for_an_earlier_failure() -> None:
    """The worked example: p = (1/3, 2/3), q = (2/3, 1/3). Tokens 0, 1 give P = 1/2, 1."""
    p, q = [1 / 3, 2 / 3], [2 / 3, 1 / 3]
    laws, probs = rows_of(p, p, p), rows_of(q, q)
    assert judged((0, 1), laws, probs, [0.99, 0.99]).accepted == (0, 1)
    # Tokens 0, 0: P = 1/2, 1/4, and S_1 = (1/6 - 2/3)+ + (1/3 - 1/3)+ = 0: only both can stand.
    assert judged((0, 0), laws, probs, [0.01, 0.24]).accepted == (0, 1)
    assert judged((0, 0), laws, probs, [0.01, 0.26]) == Verdict((), 1, Origin.RECOVERED)


def test_the_residual_weighs_the_target_by_what_was_kept() -> None:
    p, q = [0.2, 0.8], [0.4, 0.6]
    laws, probs = rows_of(p, [0.9, 0.1], [0.5, 0.5]), rows_of(q, [0.3, 0.7])
    # P_1 = 1/2, P_2 = 1/14; S_1 = .45 - .3 = .15, h_1 = .15 / .65 = .2308; residual only id 0.
    assert judged((0, 1), laws, probs, [0.2307, 0.99]) == Verdict((0,), 0, Origin.RECOVERED)
    assert judged((0, 1), laws, probs, [0.2308, 0.99]).accepted == ()


def test_nothing_is_asked_for_after_a_token_of_target_probability_zero() -> None:
    laws = rows_of([0.5, 0.5], [0.0, 1.0], [1.0, 0.0])
    asked: list[int] = []

    def answer(node: int) -> Tensor:
        asked.append(node)
        return laws[node + 1]

    walk = block((0, 0, 0), None, lambda index: 2.0**-33, 0.5, ROW_MATH)
    assert decide(walk, answer) == Verdict((0,), 1, Origin.RECOVERED)
    assert asked == [-1, 0]


def test_without_a_draft_it_is_plain() -> None:
    assert judged((), rows_of([0.25, 0.75]), None, (), 0.2) == Verdict((), 0, Origin.PLAIN)


def test_equal_laws_accept_the_largest_coin() -> None:
    for seed in range(20):
        draft = random_law(seed, 5)
        tokens = (seed % 5, 1, 2)
        rows = torch.stack([draft(tokens[:n]) for n in range(4)])
        verdict = judged(tokens, rows, rows[:3], [LARGEST] * 3)
        assert verdict.origin is Origin.BONUS


def test_a_residual_that_vanishes_falls_back_to_the_target() -> None:
    p = rows_of([0.5, 0.5])
    above = torch.nextafter(p, torch.ones_like(p))
    verdict = judged((0,), p.repeat(2, 1), above, [1.0], 0.75)
    assert verdict == Verdict((), 1, Origin.RECOVERED)


def test_ratios_of_tiny_numbers_neither_overflow_nor_vanish() -> None:
    """P is kept at 1e-320 of nothing, and comes back to 1 over the next two tokens."""
    tiny = 1e-320  # a denormal: 1 / tiny overflows
    down, up = [tiny, 1.0], [1.0, 0.0]
    laws = rows_of(down, up, up, up)
    probs = rows_of(up, down, down)
    assert judged((0, 0, 0), laws, probs, [LARGEST] * 3).num_accepted == 3
    laws = rows_of(*([[0.5, 0.5]] * 61))
    probs = rows_of(*([[0.5, 0.5]] * 60))
    assert judged((1,) * 60, laws, probs, [LARGEST] * 60).num_accepted == 60


def test_a_drawn_token_of_probability_zero_is_the_drafters_fault() -> None:
    laws, q = rows_of([0.5, 0.5], [0.5, 0.5]), rows_of([0.0, 1.0])
    with pytest.raises(ValueError, match=r"token 0 at node 0 .*draft_probs"):
        judged((0,), laws, q, [0.5])


def test_a_bad_row_ends_the_draft_before_it() -> None:
    """Tokens before it are judged without those after it; it is an error only where it is
    reached.
    """
    p, q = [1 / 3, 2 / 3], [2 / 3, 1 / 3]
    laws, probs = rows_of(p, p, p), rows_of(q, q)

    def answer(node: int) -> Tensor:
        if node == 0:
            raise BadRow(node, "bad")
        return laws[node + 1]

    def judge(coin: float) -> Verdict:
        return decide(block((0, 1), probs, lambda index: coin, 0.5, ROW_MATH), answer)

    assert judge(0.51) == Verdict((), 1, Origin.RECOVERED)
    with pytest.raises(BadRow, match="bad"):
        judge(0.49)


def test_no_argument_is_written_to() -> None:
    laws, q = rows_of([0.1, 0.6, 0.3], [0.1, 0.6, 0.3]), rows_of([0.2, 0.2, 0.6])
    before, q_before = laws.clone(), q.clone()
    for probs in (None, q):
        judged((2,), laws, probs, [0.99])
        assert torch.equal(laws, before)
        assert torch.equal(q, q_before)
