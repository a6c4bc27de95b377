"""The packed linear: close to exact, and the bits of a row independent of all around it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foredraft._native import instruction_sets
from foredraft.kernels.native import NativeKernels
from foredraft.kernels.quantized import EightBitWeight, quantized
from foredraft.kernels.reference import ReferenceKernels

DTYPES = (torch.float32, torch.bfloat16, torch.int8)  # int8: eight bits with scales


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(weight: Tensor, dtype: torch.dtype) -> Tensor | EightBitWeight:
    return quantized(weight) if dtype is torch.int8 else weight.to(dtype)


def widened(weight: Tensor | EightBitWeight) -> Tensor:
    return weight.widened(torch.float32) if isinstance(weight, EightBitWeight) else weight.float()


@given(
    rows=st.integers(1, 40),
    n=st.integers(1, 150),
    k=st.integers(1, 150),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    residual=st.booleans(),
    instruction_set=st.sampled_from(instruction_sets()),
)
def test_it_is_close_to_double_precision(
    rows: int, n: int, k: int, dtype: torch.dtype, bias: bool, residual: bool, instruction_set: str
) -> None:
    x, weight = random(rows, k), stored(random(n, k, seed=1), dtype)
    b = random(n, seed=2) if bias else None
    r = random(rows, n, seed=3) if residual else None
    native = NativeKernels(instruction_set=instruction_set)
    exact = ReferenceKernels(torch.float64)
    actual = native.linear(x, native.pack(weight, b), r)
    expected = exact.linear(x.double(), exact.pack(weight, b), None if r is None else r.double())
    # A chain of k roundings, each of half a unit in the last place of a partial sum.
    scale = float((x.double().abs() @ widened(weight).double().abs().T).max()) + 8
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=scale * k**0.5 * 2**-23)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(576, 576), (70, 1537), (33, 64)])
def test_a_row_alone_is_the_row_among_others(
    instruction_set: str, dtype: torch.dtype, n: int, k: int
) -> None:
    kernels = NativeKernels(instruction_set=instruction_set)
    packed = kernels.pack(stored(random(n, k, seed=1), dtype), random(n, seed=2))
    x, residual = random(61, k), random(61, n, seed=3)
    alone = torch.cat(
        [kernels.linear(x[i : i + 1], packed, residual[i : i + 1]) for i in range(61)]
    )
    for rows in (2, 3, 4, 5, 6, 7, 11, 12, 13, 25, 61):
        assert torch.equal(kernels.linear(x[:rows], packed, residual[:rows]), alone[:rows])
    order = torch.randperm(61, generator=torch.Generator().manual_seed(4))
    assert torch.equal(kernels.linear(x[order], packed, residual[order]), alone[order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tall_input_keeps_the_order_of_the_sum(instruction_set: str, dtype: torch.dtype) -> None:
    kernels = NativeKernels(instruction_set=instruction_set)
    packed = kernels.pack(stored(random(40, 1000, seed=1), dtype))
    x = random(300, 1000)
    whole = kernels.linear(x, packed)
    for row in (0, 95, 96, 97, 299):
        assert torch.equal(kernels.linear(x[row : row + 1], packed)[0], whole[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_instruction_sets_and_thread_counts_agree_to_the_bit(
    instruction_set: str, dtype: torch.dtype, threads: int
) -> None:
    weight = stored(random(300, 257, seed=1), dtype)
    x, residual = random(17, 257), random(17, 300)
    kernels = NativeKernels(threads, instruction_set=instruction_set)
    plain = NativeKernels(1, instruction_set="portable")
    assert torch.equal(
        kernels.linear(x, kernels.pack(weight), residual),
        plain.linear(x, plain.pack(weight), residual),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_gathers_exact_rows(instruction_set: str, dtype: torch.dtype) -> None:
    kernels = NativeKernels(instruction_set=instruction_set)
    weight = stored(random(77, 33), dtype)
    ids = torch.tensor([76, 0, 31, 32, 33, 0])
    assert torch.equal(kernels.embedding(ids, kernels.pack(weight)), widened(weight)[ids])


def test_packing_copies_the_weight() -> None:
    kernels = NativeKernels()
    weight, bias, x = random(20, 12), random(20, seed=1), random(3, 12, seed=2)
    packed = kernels.pack(weight, bias)
    before = kernels.linear(x, packed)
    weight.zero_()
    bias.zero_()
    assert torch.equal(kernels.linear(x, packed), before)


def test_a_transposed_weight_is_packed_as_it_reads() -> None:
    kernels = NativeKernels()
    weight, x = random(12, 20), random(3, 12, seed=2)
    expected = kernels.linear(x, kernels.pack(weight.T.contiguous()))
    assert torch.equal(kernels.linear(x, kernels.pack(weight.T)), expected)


def test_packed_weights_take_no_second_copy() -> None:
    weight = torch.zeros(49152, 64, dtype=torch.bfloat16)
    packed = NativeKernels().pack(weight)
    assert packed.num_bytes == 49152 * 64 * 2
    assert NativeKernels().pack(quantized(weight)).num_bytes == 49152 * (64 + 2 * 4)


def test_eight_bits_without_their_scales_are_refused() -> None:
    values = torch.zeros(4, 40, dtype=torch.int8)
    with pytest.raises(ValueError, match="a weight must be"):
        NativeKernels().pack(values)
    with pytest.raises(ValueError, match=r"scales must be .* \[4, 2\] of float32"):
        NativeKernels().pack(EightBitWeight(values, torch.zeros(4, 1)))
