"""Norm, activation and rope: close to double precision, the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foredraft._native import instruction_sets
from foredraft.kernels.block import Activation, HeadNorms
from foredraft.kernels.interface import Segment
from foredraft.kernels.native import NativeKernels
from foredraft.kernels.reference import ReferenceKernels

EXACT = ReferenceKernels(torch.float64)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(
    rows=st.integers(1, 70),
    width=st.integers(1, 600),
    size=st.sampled_from([1e-3, 1.0, 30.0]),
    instruction_set=st.sampled_from(instruction_sets()),
)
def test_norm_and_activation_are_close_to_double_precision(
    rows: int, width: int, size: float, instruction_set: str
) -> None:
    kernels = NativeKernels(instruction_set=instruction_set)
    x, weight = random(rows, width) * size, random(width, seed=1)
    for residual in (None, random(rows, width, seed=2)):
        torch.testing.assert_close(
            kernels.rms_norm(x, weight, 1e-5, residual).double(),
            EXACT.rms_norm(
                x.double(), weight, 1e-5, None if residual is None else residual.double()
            ),
            rtol=4e-6,
            atol=1e-7 if residual is None else 3e-6,
        )
    gate_up = random(rows, 2 * width) * size
    torch.testing.assert_close(
        kernels.gate_multiply(gate_up, "silu").double(),
        EXACT.gate_multiply(gate_up.double(), "silu"),
        rtol=2e-6,
        atol=1e-30,
    )
    torch.testing.assert_close(
        kernels.gate_multiply(gate_up, "gelu_tanh").double(),
        gelu_tanh(gate_up[:, :width].double()) * gate_up[:, width:].double(),
        rtol=2e-5,
        atol=1e-30,
    )


def gelu_tanh(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(u)), written so that it loses no digits in the tail of negative x."""
    u = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    return x * torch.sigmoid(2 * u)


def test_gelu_is_the_references_where_that_has_digits() -> None:
    x = torch.linspace(-3, 3, 1001).double().reshape(1, -1)
    expected = EXACT.gate_multiply(torch.cat([x, torch.ones_like(x)], dim=1), "gelu_tanh")
    torch.testing.assert_close(gelu_tanh(x), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("cap", [0.5, 1.0, 30.0, 50.0])
def test_soft_cap_is_close_to_double_precision(instruction_set: str, cap: float) -> None:
    kernels = NativeKernels(2, instruction_set=instruction_set)
    size = torch.logspace(-30, 30, 20001)
    x = torch.cat([size, -size, torch.zeros(1)]).reshape(1, -1) * cap
    out = kernels.soft_cap(x, cap).double()
    torch.testing.assert_close(out, EXACT.soft_cap(x.double(), cap), rtol=4e-7, atol=0)
    assert torch.equal(out, NativeKernels(1, instruction_set="portable").soft_cap(x, cap).double())


def test_soft_cap_keeps_nan_and_the_ends(instruction_set: str) -> None:
    """A broken model's NaN must reach the sampler, which refuses it."""
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0] * 5)
    out = NativeKernels(instruction_set=instruction_set).soft_cap(x, 30.0)
    expected = torch.tensor([torch.nan, 30.0, -30.0, 0.0] * 5)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_keep_nan(instruction_set: str, activation: Activation) -> None:
    gate_up = torch.tensor([[torch.nan, 1.0, 1.0, 1.0]])
    out = NativeKernels(instruction_set=instruction_set).gate_multiply(gate_up, activation)
    assert out.isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_at_the_ends_of_the_range(instruction_set: str, activation: Activation) -> None:
    gate = torch.tensor([[0.0, -0.0, 200.0, -200.0, 88.0, -88.0, 1e30, -1e30]])
    kernels = NativeKernels(instruction_set=instruction_set)
    out = kernels.gate_multiply(torch.cat([gate, torch.ones_like(gate)], dim=1), activation)
    assert out[0, :3].tolist() == [0.0, 0.0, 200.0]
    assert out[0, 4].item() == 88.0
    assert out[0, 6].item() == pytest.approx(1e30)
    assert (out[0, [3, 5, 7]].abs() < 1e-6).all() or out[0, 7].item() == pytest.approx(0, abs=1e-6)


def test_rows_are_independent_and_instruction_sets_agree(instruction_set: str) -> None:
    kernels = NativeKernels(2, instruction_set=instruction_set)
    plain = NativeKernels(1, instruction_set="portable")
    x, weight, residual = random(90, 602), random(602, seed=1), random(90, 602, seed=2)
    operations: list[Callable[[NativeKernels, Tensor, Tensor], Tensor]] = [
        lambda k, x, _: k.rms_norm(x, weight, 1e-5),
        lambda k, x, residual: k.rms_norm(x, weight, 1e-5, residual),
        lambda k, x, _: k.gate_multiply(x, "silu"),
        lambda k, x, _: k.gate_multiply(x, "gelu_tanh"),
        lambda k, x, _: k.soft_cap(x, 2.0),
    ]
    for operation in operations:
        together = operation(kernels, x, residual)
        for row in (0, 44, 89):
            alone = slice(row, row + 1)
            assert torch.equal(operation(plain, x[alone], residual[alone])[0], together[row])


@given(
    dim=st.sampled_from([8, 16, 24, 64, 96, 128, 256]),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3)]),
    page_size=st.integers(1, 9),
    cache_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    normed=st.booleans(),
    instruction_set=st.sampled_from(instruction_sets()),
)
def test_rope_turns_and_stores_as_the_reference(
    dim: int,
    heads: tuple[int, int],
    page_size: int,
    cache_dtype: torch.dtype,
    normed: bool,
    instruction_set: str,
) -> None:
    kernels = NativeKernels(instruction_set=instruction_set)
    norms = HeadNorms(random(dim, seed=3), random(dim, seed=4), 1e-6) if normed else None
    segments = [
        Segment(3, 2, (-1, 0, -1), list(range(8, 16))),
        Segment(0, 4, (), [7, 6, 5, 4]),
    ]
    qkv = random(9, (heads[0] + 2 * heads[1]) * dim)
    cos, sin = random(12, dim // 2, seed=1), random(12, dim // 2, seed=2)
    sizes = (dim, page_size), (page_size, dim)
    keys, values = (torch.full((16, heads[1], *s), torch.nan, dtype=cache_dtype) for s in sizes)
    exact_keys, exact_values = keys.double(), values.double()
    queries = kernels.rope_and_store(
        qkv, cos, sin, keys, values, kernels.prepare(segments, page_size), norms
    )
    expected = EXACT.rope_and_store(
        qkv.double(), cos, sin, exact_keys, exact_values, EXACT.prepare(segments, page_size), norms
    )
    torch.testing.assert_close(queries.double(), expected, rtol=4e-6, atol=4e-6)
    # Values are copied: only the rounding to bfloat16, to nearest and even, is left.
    assert torch.equal(values.nan_to_num(7.0), exact_values.to(cache_dtype).nan_to_num(7.0))
    rounding = 2**-8 if cache_dtype == torch.bfloat16 else 4e-6
    torch.testing.assert_close(keys.double(), exact_keys, rtol=rounding, atol=4e-6, equal_nan=True)


def test_bfloat16_cache_keeps_nan_and_infinity() -> None:
    kernels = NativeKernels()
    row = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e-40, 3.0e38, 3.4e38, 1.00390625, -0.0])
    qkv = torch.cat([torch.zeros(16), row]).reshape(1, 24)
    values = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    keys = values.mT.contiguous()
    ones, zeros = torch.ones(1, 4), torch.zeros(1, 4)
    plan = kernels.prepare([Segment(0, 1, (), [0])], 1)
    kernels.rope_and_store(qkv, ones, zeros, keys, values, plan)
    expected = row.to(torch.bfloat16)
    torch.testing.assert_close(values[0, 0, 0], expected, rtol=0, atol=0, equal_nan=True)
