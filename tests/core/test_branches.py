"""Exact integration over choices and coins, on programs whose law is known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from foredraft.core.acceptance import draw_from
from foredraft.core.row_math import TorchRowMath
from foredraft.testing.branches import Choices, Coin, outcomes


def law(run: Callable[[Choices], Any]) -> dict[Any, float]:
    result: dict[Any, float] = defaultdict(float)
    for outcome, probability in outcomes(run):
        result[outcome] += probability
    return dict(result)


def test_choices_multiply() -> None:
    def run(choices: Choices) -> tuple[int, int]:
        first = choices.choose([1.0, 3.0])
        return first, choices.choose([1.0, 0.0, 1.0]) if first else 9

    assert law(run) == pytest.approx({(0, 9): 0.25, (1, 0): 0.375, (1, 2): 0.375})


def test_a_choice_without_options_is_an_error() -> None:
    with pytest.raises(ValueError, match="no option"):
        Choices().choose([0.0, 0.0])


def test_a_coin_is_uniform_and_the_same_coin_each_time() -> None:
    def run(choices: Choices) -> tuple[bool, bool, bool]:
        coin = Coin(choices)
        return coin < 0.25, 2.0 * coin * 2.0 < 3.0, coin < 0.25

    assert law(run) == pytest.approx(
        {(True, True, True): 0.25, (False, True, False): 0.5, (False, False, False): 0.25}
    )


def test_two_coins_are_independent() -> None:
    def run(choices: Choices) -> tuple[bool, bool]:
        return Coin(choices) < 0.25, Coin(choices) < 0.5

    assert law(run)[(True, True)] == pytest.approx(0.125)


def test_a_coin_times_nothing() -> None:
    assert law(lambda choices: Coin(choices) * 0.0 < 1e-300) == {True: 1.0}
    assert law(lambda choices: Coin(choices) * 0.0 < 0.0) == {False: 1.0}


def test_a_draw_by_a_coin_has_the_law_of_its_weights() -> None:
    weights = torch.tensor([0.0, 1.0, 5.0, 0.0, 2.0, 0.0], dtype=torch.float64)
    row_math = TorchRowMath()

    def run(choices: Choices) -> tuple[bool, int]:
        coin: Any = Coin(choices)
        return coin < 0.5, draw_from(weights, coin, row_math)

    assert law(run) == pytest.approx(
        {(True, 1): 0.125, (True, 2): 0.375, (False, 2): 0.25, (False, 4): 0.25}
    )


def test_what_has_no_exact_integral_is_refused() -> None:
    row = torch.ones(2)
    coin: Any = Coin(Choices()) * 2.0
    with pytest.raises(TypeError, match="no exact integral"):
        torch.searchsorted(row, coin)
    with pytest.raises(TypeError):
        torch.add(row, coin)
    with pytest.raises(TypeError):
        Coin(Choices()) * Coin(Choices()) < 0.5  # type: ignore[operator]  # noqa: B015
