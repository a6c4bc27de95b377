"""What a set of kernels offers to a model, and how one flat pass is described to it.

Knows rows, pages and shapes; knows no model family, no request and no drafter.
Shapes: T rows of the flat batch, H hidden size, V vocabulary, D head size, P pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from foredraft.core.row_math import RowMath
from foredraft.kernels.block import Activation, Block, HeadNorms
from foredraft.kernels.quantized import EightBitWeight


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's rows in a flat pass: `chain` rows that go on from its cache, then draft nodes.

    The chain rows sit at positions `prefix .. prefix + chain - 1`; the last of them is the root of
    the draft tree. Draft node `i` sits at position `prefix + chain - 1 + depth(i)` (depth counted
    from 1) and sees the prefix, all chain rows, its ancestors and itself. Row `r` of the segment
    writes its key and value to the request's slot `prefix + r`, whatever its position; slot `s`
    lies in page `pages[s // page_size]` at offset `s % page_size`.
    """

    prefix: int  # positions already in the cache
    chain: int  # >= 1
    parents: tuple[int, ...]  # draft nodes: parent's index among the nodes, -1 = the last chain row
    pages: Sequence[int]  # the request's block table; covers prefix + chain + len(parents) slots

    @property
    def rows(self) -> int:
        return self.chain + len(self.parents)


class Kernels(Protocol):
    """One operation a method. On the native kernels a row's bits are independent of other rows.

    What `pack`, `compile` and `prepare` return is opaque to callers: what an implementation made of
    a weight, of a block and of a pass's segments.
    """

    name: str
    row_math: RowMath
    cache_dtypes: tuple[torch.dtype, ...]  # of keys and values it can read and write

    def pack(self, weight: Tensor | EightBitWeight, bias: Tensor | None = None) -> Any:
        """A weight `[N, K]` (float32, bfloat16, float64; 8-bit) for `linear` and `embedding`."""

    def embedding(self, ids: Tensor, packed: Any) -> Tensor:
        """Rows `ids` `[T]` (int64) of a packed weight, `[T, K]` in the activation dtype."""

    def linear(self, x: Tensor, packed: Any, residual: Tensor | None = None) -> Tensor:
        """`x [T, K] @ weight.T (+ bias) (+ residual [T, N])` -> `[T, N]`."""

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        """`x * rsqrt(mean(x^2) + eps) * weight (+ residual)` over the last dimension, `[T, H]`."""

    def gate_multiply(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """`activation(gate) * up` for `gate_up [T, 2F]` = gate beside up -> `[T, F]`."""

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """`cap * tanh(x / cap)` for `x [T, V]`."""

    def prepare(self, segments: Sequence[Segment], page_size: int) -> Any:
        """The plan of one pass: positions, slots, visible keys of each row; used by all layers."""

    def rope_and_store(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: Any,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Norm heads, rotate queries and keys by position, write keys and values to their slots.

        qkv `[T, (Hq + 2 Hkv) D]`; cos, sin `[max_positions, D / 2]` (pairing: i with i + D/2);
        keys `[P, Hkv, D, page_size]`, values `[P, Hkv, page_size, D]`; returns the rotated queries
        `[T, Hq, D]`.
        """

    def attention(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: Any,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> Tensor:
        """Softmax attention of `queries [T, Hq, D]` over each row's visible keys -> `[T, Hq D]`.

        With a window, a row at position p sees positions above p - window only. With a soft cap,
        a score is `soft_cap * tanh(score / soft_cap)`.
        """

    def compile(self, block: Block) -> Any:
        """A block for `run_blocks`, checked once."""

    def run_blocks(
        self,
        hidden: Tensor,
        blocks: Sequence[Any],
        keys: Tensor,
        values: Tensor,
        plan: Any,
        beside: Tensor | None = None,
    ) -> Tensor:
        """`hidden [T, H]` through compiled blocks; keys, values: those of all blocks.

        `beside [T, H]` is the second input of blocks that read one, and of no others.
        Equals `block.apply_block` for each block in turn, on the native kernels to the bit.
        """

    def move_slots(
        self, keys: Tensor, values: Tensor, sources: Sequence[int], destinations: Sequence[int]
    ) -> None:
        """Copy keys and values of slot `sources[i]` to `destinations[i]`, in order, in all layers.

        keys and values of one layer, or with the layers before all other dimensions. Slots are
        physical: `page * page_size + offset`.
        """
