"""The reference row mathematics: ties, infinities, order of sums."""

from __future__ import annotations

import math

import pytest
import torch

from foredraft.core.coins import gumbel_noise
from foredraft.core.row_math import TorchRowMath

ROW_MATH = TorchRowMath()
DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 8, 64, 1000, 49152])
def test_argmax_ties_go_to_the_lowest_id(dtype: torch.dtype, size: int) -> None:
    row = torch.zeros(size, dtype=dtype)
    assert ROW_MATH.argmax(row) == 0
    for first in {0, size // 3, size - 1}:
        row = torch.zeros(size, dtype=dtype)
        row[first:] = 1.0
        assert ROW_MATH.argmax(row) == first
        row[first:] = -math.inf
        row[:first] = -math.inf
        assert ROW_MATH.argmax(row) == 0


def test_argmax_rows_is_argmax_of_each() -> None:
    rows = torch.randn(9, 33, generator=torch.Generator().manual_seed(1)).mul(2).round()
    assert ROW_MATH.argmax_rows(rows) == [ROW_MATH.argmax(row) for row in rows]


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_is_float64_and_gives_forbidden_ids_zero(dtype: torch.dtype) -> None:
    row = torch.tensor([1.0, -math.inf, 3.0, 1.0], dtype=dtype)
    probs = ROW_MATH.softmax(row)
    assert probs.dtype == torch.float64
    total = 2 * math.e + math.e**3
    assert probs.tolist() == pytest.approx([math.e / total, 0.0, math.e**3 / total, math.e / total])
    assert float(probs[1]) == 0.0
    logs = ROW_MATH.log_softmax(row)
    assert logs.dtype == torch.float64
    assert logs.exp().tolist() == pytest.approx(probs.tolist())


def test_the_running_sum_goes_from_the_first_id_to_the_last() -> None:
    row = torch.tensor([1e16, 1.0, -1e16, 1.0], dtype=torch.float64)
    assert ROW_MATH.cumulative_sum(row).tolist() == [1e16, 1e16, 0.0, 1.0]
    assert ROW_MATH.cumulative_sum(torch.tensor([0.5, 0.25])).dtype == torch.float64


@pytest.mark.parametrize("dtype", DTYPES)
def test_coupled_argmax_adds_the_noise_in_float64(dtype: torch.dtype) -> None:
    row = torch.randn(100, generator=torch.Generator().manual_seed(2)).to(dtype)
    row[50:] = -math.inf
    for seed, position in [(0, 0), (-1, 5), (2**63, 2**40)]:
        noisy = row.double() + gumbel_noise(seed, position, 100)
        chosen = ROW_MATH.coupled_argmax(row, seed, position)
        assert chosen == int(noisy.argmax())
        assert chosen < 50
