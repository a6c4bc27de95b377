"""The reference kernels against their operations' definitions, written as plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from foredraft.kernels.catalog import load_kernels
from foredraft.kernels.interface import Segment
from foredraft.kernels.reference import ReferenceKernels

PAGE_SIZE = 4
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


@pytest.fixture
def kernels() -> ReferenceKernels:
    return ReferenceKernels(torch.float64)


def rotated(vector: torch.Tensor, position: int, base: float = 100.0) -> torch.Tensor:
    """Each pair (i, i + D/2) turned by position / base^(2i/D), as complex numbers."""
    half = vector.shape[-1] // 2
    angles = position / base ** (torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(vector[..., :half], vector[..., half:]) * torch.polar(
        torch.ones(half, dtype=torch.float64), angles
    )
    return torch.cat([turned.real, turned.imag], dim=-1)


def rope_tables(positions: int, base: float = 100.0) -> tuple[torch.Tensor, torch.Tensor]:
    half = HEAD_DIM // 2
    angles = torch.arange(positions, dtype=torch.float64)[:, None] / base ** (
        torch.arange(half, dtype=torch.float64) / half
    )
    return angles.cos(), angles.sin()


def one_row_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float):
    """softmax(q.k) v of one head, `keys` and `values` `[n, D]`."""
    weights = [math.exp(float(query @ k) * scale) for k in keys]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def test_linear_adds_bias_and_residual(kernels: ReferenceKernels) -> None:
    weight, bias, x, residual = (torch.randn(s) for s in ((5, 3), (5,), (2, 3), (2, 5)))
    packed = kernels.pack(weight, bias)
    expected = (x[:, None, :] * weight).sum(-1) + bias + residual
    torch.testing.assert_close(
        kernels.linear(x.double(), packed, residual.double()),
        expected.double(),
        rtol=1e-5,
        atol=1e-5,
    )


def test_embedding_gathers_rows(kernels: ReferenceKernels) -> None:
    weight = torch.randn(6, 3, dtype=torch.bfloat16)
    rows = kernels.embedding(torch.tensor([5, 0, 5]), kernels.pack(weight))
    assert torch.equal(rows, weight[[5, 0, 5]].double())


def test_rms_norm_and_silu(kernels: ReferenceKernels) -> None:
    x, weight = torch.randn(3, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    norm = kernels.rms_norm(x, weight, 1e-5)
    silu = kernels.gate_multiply(x, "silu")
    for t in range(3):
        root = math.sqrt(sum(float(v) ** 2 for v in x[t]) / 6 + 1e-5)
        torch.testing.assert_close(norm[t], x[t] / root * weight)
        for i in range(3):
            gate, up = float(x[t, i]), float(x[t, 3 + i])
            assert float(silu[t, i]) == pytest.approx(gate / (1 + math.exp(-gate)) * up)


def test_positions_slots_and_visible_keys_of_a_tree(kernels: ReferenceKernels) -> None:
    tree = Segment(prefix=5, chain=2, parents=(-1, -1, 0, 2), pages=(7, 2, 4))
    plan = kernels.prepare([Segment(0, 1, (), (9,)), tree], PAGE_SIZE)
    assert plan.positions.tolist() == [0, 5, 6, 7, 7, 8, 9]
    assert plan.slots.tolist() == [36, 2 * 4 + 1, 2 * 4 + 2, 2 * 4 + 3, 16, 17, 18]
    visible = ~plan.segments[1].hidden
    assert visible[:, :5].all()
    assert visible[:, 5:].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 1, 1, 0, 1, 1],
    ]


def test_attention_over_a_paged_tree_equals_the_loops(kernels: ReferenceKernels) -> None:
    torch.manual_seed(1)
    segment = Segment(prefix=0, chain=6, parents=(-1, -1, 0), pages=(3, 1, 2))
    paths = [list(range(i + 1)) for i in range(6)]
    paths += [[*range(6), 6], [*range(6), 7], [*range(6), 6, 8]]
    positions = [0, 1, 2, 3, 4, 5, 6, 6, 7]
    qkv = torch.randn(9, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=torch.float64)
    values = torch.full((4, KV_HEADS, PAGE_SIZE, HEAD_DIM), math.nan, dtype=torch.float64)
    keys = values.mT.contiguous()
    plan = kernels.prepare([segment], PAGE_SIZE)
    queries = kernels.rope_and_store(qkv, *rope_tables(16), keys, values, plan)
    out = kernels.attention(queries, keys, values, plan, 0.3).reshape(9, HEADS, HEAD_DIM)
    heads = qkv.reshape(9, -1, HEAD_DIM)
    turned = torch.stack([rotated(heads[r], p) for r, p in enumerate(positions)])
    for row, path in enumerate(paths):
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            expected = one_row_attention(
                turned[row, head],
                turned[path, HEADS + kv_head],
                heads[path, HEADS + KV_HEADS + kv_head],
                0.3,
            )
            torch.testing.assert_close(out[row, head], expected)
    assert keys[0].isnan().all()


def test_move_slots_copies_in_order(kernels: ReferenceKernels) -> None:
    values = torch.arange(0.0, 80.0, 10.0, dtype=torch.float64).reshape(2, 1, 4, 1)
    keys = values.mT / 10
    kernels.move_slots(keys, values, [5, 6, 4], [4, 5, 0])
    assert keys.flatten().tolist() == [5, 1, 2, 3, 5, 6, 6, 7]
    assert values.flatten().tolist() == [50, 10, 20, 30, 50, 60, 60, 70]


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (Segment(0, 0, (), (0,)), "chain >= 1"),
        (Segment(-1, 1, (), (0,)), "prefix >= 0"),
        (Segment(0, 1, (0,), (0,)), "node 0 has parent 0"),
        (Segment(3, 1, (-1,), (0,)), "1 pages of 4 slots cannot hold 5 slots"),
    ],
)
def test_malformed_segments_are_refused(
    kernels: ReferenceKernels, segment: Segment, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.prepare([segment], PAGE_SIZE)


def test_the_catalog_names_what_is_valid() -> None:
    with pytest.raises(ValueError, match="valid are auto, native, reference"):
        load_kernels("fast")
    with pytest.raises(ValueError, match="float32 on the CPU"):
        load_kernels("native", dtype=torch.float64)
    assert load_kernels("auto", dtype=torch.float64).name == "reference"
