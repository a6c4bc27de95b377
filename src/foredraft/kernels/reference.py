"""The operations of a pass in plain torch: the oracle of every implementation, on any device.

Knows rows, pages and shapes; knows no speed. Its matrix products are torch's, so a row may depend
on the other rows in the last bits; at float64 that never reaches a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.core.row_math import RowMath, TorchRowMath
from foredraft.kernels.block import Activation, Block, HeadNorms, apply_block
from foredraft.kernels.interface import Segment
from foredraft.kernels.quantized import EightBitWeight


@dataclass(frozen=True, slots=True)
class ReferencePacked:
    """A weight `[N, K]` and its bias `[N]`, both in the activation dtype."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ReferenceSegment:
    """The rows `first .. first + rows - 1` of the flat batch and the keys that they see."""

    first: int
    rows: int
    slots: Tensor  # [keys] physical slots of the prefix, then of the segment's own rows
    key_positions: Tensor  # [keys]
    hidden: Tensor  # [rows, keys] bool, True where the row does not see the key


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """Positions `[T]`, physical slots `[T]` and the segments of one pass."""

    positions: Tensor
    slots: Tensor
    segments: tuple[ReferenceSegment, ...]
    page_size: int


def segment_positions(segment: Segment) -> list[int]:
    """The position of every row of `segment`; raises ValueError for a malformed segment."""
    if segment.prefix < 0 or segment.chain < 1:
        raise ValueError(
            f"a segment needs prefix >= 0 and chain >= 1, got {segment.prefix} and {segment.chain}"
        )
    positions = list(range(segment.prefix, segment.prefix + segment.chain))
    root = len(positions) - 1
    for node, parent in enumerate(segment.parents):
        if not -1 <= parent < node:
            raise ValueError(f"node {node} has parent {parent}; valid are -1 to {node - 1}")
        positions.append(positions[root if parent < 0 else segment.chain + parent] + 1)
    return positions


def physical_slots(segment: Segment, page_size: int) -> list[int]:
    """The physical slots `0 .. prefix + rows - 1`; raises ValueError where pages are missing."""
    needed = segment.prefix + segment.rows
    if page_size < 1 or len(segment.pages) * page_size < needed:
        raise ValueError(
            f"{len(segment.pages)} pages of {page_size} slots cannot hold {needed} slots"
        )
    return [segment.pages[s // page_size] * page_size + s % page_size for s in range(needed)]


def own_rows_visible(segment: Segment) -> Tensor:
    """`[rows, rows]` bool: which of the segment's own rows each of its rows sees."""
    visible = torch.zeros(segment.rows, segment.rows, dtype=torch.bool)
    chain = segment.chain
    visible[:chain, :chain] = torch.ones(chain, chain, dtype=torch.bool).tril()
    for node, parent in enumerate(segment.parents):
        visible[chain + node] = visible[chain - 1 if parent < 0 else chain + parent]
        visible[chain + node, chain + node] = True
    return visible


class ReferenceKernels:
    """`Kernels` in torch; activations in `dtype` (float32 or float64), everything on `device`."""

    name = "reference"
    cache_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float64)

    def __init__(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"reference kernels compute in torch.float32 or torch.float64, got {dtype}"
            )
        self.dtype = dtype
        self.device = torch.device(device)
        self.row_math: RowMath = TorchRowMath()

    def pack(self, weight: Tensor | EightBitWeight, bias: Tensor | None = None) -> ReferencePacked:
        """A weight `[N, K]` widened to the activation dtype."""
        if isinstance(weight, EightBitWeight):
            weight = weight.widened(self.dtype)
        if weight.dim() != 2:
            raise ValueError(f"a weight has two dimensions, got shape {tuple(weight.shape)}")
        if bias is not None:
            if bias.shape != weight.shape[:1]:
                raise ValueError(f"bias {tuple(bias.shape)} does not fit {tuple(weight.shape)}")
            bias = bias.to(self.device, self.dtype)
        return ReferencePacked(weight.to(self.device, self.dtype), bias)

    def embedding(self, ids: Tensor, packed: ReferencePacked) -> Tensor:
        """Rows `ids` `[T]` of the weight, `[T, K]`; an id outside the weight raises IndexError."""
        return packed.weight[ids.to(self.device)]

    def linear(self, x: Tensor, packed: ReferencePacked, residual: Tensor | None = None) -> Tensor:
        """`x [T, K] @ weight.T (+ bias) (+ residual)` -> `[T, N]`."""
        out = F.linear(x, packed.weight)
        if packed.bias is not None:
            out = out + packed.bias
        return out if residual is None else out + residual

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        """`x * rsqrt(mean(x^2) + eps) * weight (+ residual)` over the last dimension."""
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        out = x * scale * weight.to(self.device, self.dtype)
        return out if residual is None else out + residual

    def gate_multiply(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """`activation(gate) * up` for `gate_up [T, 2F]`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """`cap * tanh(x / cap)`."""
        return torch.tanh(x / cap) * cap

    def prepare(self, segments: Sequence[Segment], page_size: int) -> ReferencePlan:
        """Positions, slots and visible keys of every row; ValueError for a malformed segment."""
        positions: list[int] = []
        slots: list[int] = []
        parts = []
        for segment in segments:
            physical = physical_slots(segment, page_size)
            first = len(positions)
            own = segment_positions(segment)
            positions += own
            slots += physical[segment.prefix :]
            seen = torch.ones(segment.rows, segment.prefix, dtype=torch.bool)
            hidden = ~torch.cat([seen, own_rows_visible(segment)], dim=1)
            parts.append(
                ReferenceSegment(
                    first,
                    segment.rows,
                    torch.tensor(physical, dtype=torch.int64, device=self.device),
                    torch.tensor([*range(segment.prefix), *own], device=self.device),
                    hidden.to(self.device),
                )
            )
        return ReferencePlan(
            torch.tensor(positions, dtype=torch.int64, device=self.device),
            torch.tensor(slots, dtype=torch.int64, device=self.device),
            tuple(parts),
            page_size,
        )

    def rope_and_store(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: ReferencePlan,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Rotated queries `[T, Hq, D]`; keys and values written to their slots in their dtype."""
        num_kv_heads, head_dim = values.shape[1], values.shape[3]
        heads = qkv.reshape(qkv.shape[0], -1, head_dim)
        num_heads = heads.shape[1] - 2 * num_kv_heads
        if norms is not None:
            queries = self.rms_norm(heads[:, :num_heads], norms.queries, norms.eps)
            rest = heads[:, num_heads:]
            new_keys = self.rms_norm(rest[:, :num_kv_heads], norms.keys, norms.eps)
            heads = torch.cat([queries, new_keys, rest[:, num_kv_heads:]], dim=1)
        cos_rows = cos.to(self.device, self.dtype)[plan.positions].unsqueeze(1)
        sin_rows = sin.to(self.device, self.dtype)[plan.positions].unsqueeze(1)
        turned = heads[:, : num_heads + num_kv_heads]
        low, high = turned.chunk(2, dim=-1)
        turned = torch.cat(
            [low * cos_rows - high * sin_rows, high * cos_rows + low * sin_rows], dim=-1
        )
        pages, offsets = plan.slots // plan.page_size, plan.slots % plan.page_size
        keys[pages, :, :, offsets] = turned[:, num_heads:].to(keys.dtype)
        values[pages, :, offsets] = heads[:, num_heads + num_kv_heads :].to(values.dtype)
        return turned[:, :num_heads].contiguous()

    def attention(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: ReferencePlan,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> Tensor:
        """Softmax attention of each row over its visible keys -> `[T, Hq D]`."""
        num_heads, num_kv_heads = queries.shape[1], keys.shape[1]
        out = torch.empty_like(queries)
        for part in plan.segments:
            pages, offsets = part.slots // plan.page_size, part.slots % plan.page_size
            group = num_heads // num_kv_heads
            k = keys[pages, :, :, offsets].to(self.dtype).repeat_interleave(group, dim=1)
            v = values[pages, :, offsets].to(self.dtype).repeat_interleave(group, dim=1)
            rows = slice(part.first, part.first + part.rows)
            scores = torch.einsum("thd,khd->htk", queries[rows], k) * scale
            if soft_cap:
                scores = self.soft_cap(scores, soft_cap)
            hidden = part.hidden
            if window:
                reach = plan.positions[rows, None] - part.key_positions
                hidden = hidden | (reach >= window)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[rows] = torch.einsum("htk,khd->thd", weights, v)
        return out.reshape(out.shape[0], -1)

    def compile(self, block: Block) -> Block:
        """The block itself."""
        return block

    def run_blocks(
        self,
        hidden: Tensor,
        blocks: Sequence[Block],
        keys: Tensor,
        values: Tensor,
        plan: ReferencePlan,
        beside: Tensor | None = None,
    ) -> Tensor:
        """`hidden [T, H]` through `blocks`, one operation after the other."""
        for block, layer_keys, layer_values in zip(blocks, keys, values, strict=True):
            hidden = apply_block(self, block, hidden, layer_keys, layer_values, plan, beside)
        return hidden

    def move_slots(
        self, keys: Tensor, values: Tensor, sources: Sequence[int], destinations: Sequence[int]
    ) -> None:
        """Copy physical slots as if one after the other, in all layers at once."""
        origins: dict[int, int] = {}
        for source, destination in zip(sources, destinations, strict=True):
            origins[destination] = origins.get(source, source)
        if not origins:
            return
        page_size = keys.shape[-1]
        to = torch.tensor(list(origins), device=keys.device)
        of = torch.tensor(list(origins.values()), device=keys.device)
        for cache in (keys.transpose(-1, -2), values):
            moved = cache[..., of // page_size, :, of % page_size, :]
            cache[..., to // page_size, :, to % page_size, :] = moved
