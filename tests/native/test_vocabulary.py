"""The sampler's reductions: the coins of `core.coins` to the bit, argmax under noise exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foredraft._native import Runtime, instruction_sets
from foredraft.core import coins
from foredraft.core.row_math import TorchRowMath
from foredraft.kernels.native import NativeKernels

INF = float("inf")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**64 - 1),
    stream=st.integers(0, 2**32 - 1),
    blocks=st.integers(0, 70),
    instruction_set=st.sampled_from(instruction_sets()),
)
def test_words_are_those_of_the_coins(
    seed: int, position: int, stream: int, blocks: int, instruction_set: str
) -> None:
    words = Runtime(1, instruction_set).random_words(seed, position, stream, blocks)
    assert words == coins.bits(seed, position, stream, 4 * blocks).tolist()


@given(
    size=st.integers(1, 700),
    spread=st.sampled_from([0.0, 0.01, 1.0, 5.0, 30.0]),
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 2**40),
    wide=st.booleans(),
    banned=st.booleans(),
    instruction_set=st.sampled_from(instruction_sets()),
)
def test_coupled_argmax_is_the_argmax_with_noise(
    size: int,
    spread: float,
    seed: int,
    position: int,
    wide: bool,
    banned: bool,
    instruction_set: str,
) -> None:
    row = random(size, seed=size) * spread
    if banned:
        row[1::2] = -INF
    row = row.double() if wide else row
    kernels = NativeKernels(instruction_set=instruction_set)
    noise = coins.gumbel_noise(seed, position, size)
    sums = row.double() + noise
    found = kernels.row_math.coupled_argmax(row, seed, position)
    # torch's logarithm and libm's may differ in the last bit: near ties may go elsewhere.
    assert float(sums[found]) >= float(sums.max()) - 1e-12


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 12.0])
def test_coupled_argmax_over_a_whole_vocabulary(instruction_set: str, spread: float) -> None:
    row = random(49152) * spread
    kernels, plain = NativeKernels(instruction_set=instruction_set), TorchRowMath()
    for position in range(25):
        assert kernels.row_math.coupled_argmax(row, 11, position) == plain.coupled_argmax(
            row, 11, position
        )


def test_coupled_argmax_with_one_or_no_finite_logit(instruction_set: str) -> None:
    math = NativeKernels(instruction_set=instruction_set).row_math
    row = torch.full((300,), -INF)
    assert math.coupled_argmax(row, 1, 2) == 0
    row[217] = -50.0
    assert math.coupled_argmax(row, 1, 2) == 217
    row[[5, 9]] = INF
    assert math.coupled_argmax(row, 1, 2) == 5


@given(
    size=st.integers(1, 400),
    values=st.integers(1, 4),
    seed=st.integers(0, 1000),
    wide=st.booleans(),
    instruction_set=st.sampled_from(instruction_sets()),
)
def test_argmax_gives_ties_to_the_lowest_id(
    size: int, values: int, seed: int, wide: bool, instruction_set: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(-values, 1, (size,), generator=generator).float() * 1e3
    row = row.double() if wide else row
    math = NativeKernels(instruction_set=instruction_set).row_math
    expected = row.tolist().index(max(row.tolist()))
    assert math.argmax(row) == expected
    assert math.argmax_rows(torch.stack([row, row.flip(0)]))[0] == expected


def test_argmax_of_rows_takes_any_number(instruction_set: str) -> None:
    math = NativeKernels(2, instruction_set=instruction_set).row_math
    rows = random(37, 1001)
    assert math.argmax_rows(rows) == rows.argmax(-1).tolist()
    assert math.argmax_rows(rows[:0]) == []
    assert math.argmax(torch.full((20,), -INF)) == 0


@pytest.mark.parametrize("at", [0, 63, 64, 98, 99])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_is_an_error(instruction_set: str, at: int, dtype: torch.dtype) -> None:
    math = NativeKernels(instruction_set=instruction_set).row_math
    row = random(100).to(dtype)
    row[at] = torch.nan
    for operation in (
        math.argmax,
        lambda r: math.argmax_rows(r[None]),
        lambda r: math.coupled_argmax(r, 1, 2),
        math.softmax,
        math.log_softmax,
    ):
        with pytest.raises(FloatingPointError):
            operation(row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softmax_log_softmax_and_running_sum(dtype: torch.dtype) -> None:
    math = NativeKernels().row_math
    row = (random(49152) * 5).to(dtype)
    row[100:200] = -INF
    law = math.softmax(row)
    torch.testing.assert_close(law, torch.softmax(row.double(), -1), rtol=1e-12, atol=0)
    assert (law[100:200] == 0).all()
    torch.testing.assert_close(
        math.log_softmax(row), torch.log_softmax(row.double(), -1), rtol=1e-12, atol=1e-12
    )
    total, expected = 0.0, []
    for p in law.tolist():
        total += p
        expected.append(total)
    assert math.cumulative_sum(law).tolist() == expected
