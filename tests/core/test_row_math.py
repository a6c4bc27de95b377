"""The reference row mathematics: ties, infinities, order of sums."""

from __future__ import annotations

import math

import pytest
import torch

from foredraft.core.coins import gumbel_noise
from foredraft.core.row_math import TorchRowMath, coupled_argmax
from foredraft.core.truncation import WHOLE, Truncation

ROW_MATH = TorchRowMath()
DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 8, 64, 1000, 49152])
def test_argmax_ties_go_to_the_lowest_id(dtype: torch.dtype, size: int) -> None:
    def argmax(row: torch.Tensor) -> int:
        return ROW_MATH.argmax_rows(row[None])[0]

    row = torch.zeros(size, dtype=dtype)
    assert argmax(row) == 0
    for first in {0, size // 3, size - 1}:
        row = torch.zeros(size, dtype=dtype)
        row[first:] = 1.0
        assert argmax(row) == first
        row[first:] = -math.inf
        row[:first] = -math.inf
        assert argmax(row) == 0


def test_argmax_rows_is_argmax_of_each() -> None:
    rows = torch.randn(9, 33, generator=torch.Generator().manual_seed(1)).mul(2).round()
    assert ROW_MATH.argmax_rows(rows) == [row.tolist().index(max(row.tolist())) for row in rows]


@pytest.mark.parametrize("dtype", DTYPES)
def test_laws_are_float64_and_give_forbidden_ids_zero(dtype: torch.dtype) -> None:
    row = torch.tensor([1.0, -math.inf, 3.0, 1.0], dtype=dtype)
    (probs,), best = ROW_MATH.laws([row], [WHOLE])
    assert best == [2]
    assert probs.dtype == torch.float64
    total = 2 * math.e + math.e**3
    assert probs.tolist() == pytest.approx([math.e / total, 0.0, math.e**3 / total, math.e / total])
    assert float(probs[1]) == 0.0
    logs = ROW_MATH.log_softmax(row)
    assert logs.dtype == torch.float64
    assert logs.exp().tolist() == pytest.approx(probs.tolist())


def test_laws_of_rows_at_temperature_and_cut() -> None:
    row = torch.tensor([0.0, 2.0, 1.0, 2.0])
    laws, _ = ROW_MATH.laws([row] * 3, [Truncation(2.0), Truncation(top_k=1), Truncation(1.0, 0.3)])
    assert laws[0].tolist() == torch.softmax(row.double() / 2, -1).tolist()
    assert laws[1].tolist() == [0.0, 1.0, 0.0, 0.0]
    expected = torch.softmax(torch.tensor([-math.inf, 2.0, 1.0, 2.0]).double(), -1)
    assert laws[2].tolist() == expected.tolist()


def test_a_draw_is_where_the_running_sum_exceeds_the_coin() -> None:
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0], dtype=torch.float64)
    assert ROW_MATH.total(weights) == 4.0
    drawn = [ROW_MATH.draw(weights, coin) for coin in (1e-9, 0.2499, 0.25, 0.2501, 1 - 1e-9)]
    assert drawn == [1, 1, 3, 3, 3]
    assert ROW_MATH.draw(torch.zeros(3, dtype=torch.float64), 0.5) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_add_the_noise_in_float64(dtype: torch.dtype) -> None:
    row = torch.randn(100, generator=torch.Generator().manual_seed(2)).to(dtype)
    row[50:] = -math.inf
    for seed, position in [(0, 0), (-1, 5), (2**63, 2**40)]:
        noisy = row.double() + gumbel_noise(seed, position, 100)
        chosen = coupled_argmax(ROW_MATH, row, seed, position)
        assert chosen == int(noisy.argmax())
        assert chosen < 50
