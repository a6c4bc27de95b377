"""A decoder's block as data, and the operations it is made of.

Knows the order of operations that every family shares and the options by which families differ;
knows no config, no file and no implementation of an operation.
Shapes: T rows of the flat batch, H hidden size, D head size, F inner size of the gated network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from foredraft.kernels.interface import Kernels

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each head of the queries and of the keys, before they are rotated."""

    queries: Tensor  # [D]
    keys: Tensor  # [D]
    eps: float


@dataclass(frozen=True, slots=True)
class Block:
    """Attention, then a gated network, each behind a norm and added to the residual stream.

    Packed weights are what `Kernels.pack` gave. A norm after a part applies to what the part adds.
    """

    attention_norm: Tensor  # [H]
    qkv: Any  # packed [(Hq + 2 Hkv) D, H]
    output: Any  # packed [H, Hq D]
    mlp_norm: Tensor  # [H]
    gate_up: Any  # packed [2 F, H]: gate beside up
    down: Any  # packed [H, F]
    cos: Tensor  # [positions, D / 2]
    sin: Tensor
    eps: float  # of the norms over H
    scale: float  # of a query's product with a key
    window: int = 0  # positions that a row sees, its own included; 0 = all before it
    soft_cap: float = 0.0  # attention scores become cap * tanh(score / cap); 0 = as they are
    activation: Activation = "silu"
    head_norms: HeadNorms | None = None
    attention_post_norm: Tensor | None = None  # [H]
    mlp_post_norm: Tensor | None = None  # [H]
    # [H], of a second input (an EAGLE head's embeddings): queries, keys and values then read it,
    # normed, and behind it the normed hidden states; `qkv` is packed [(Hq + 2 Hkv) D, 2 H].
    beside_norm: Tensor | None = None
    norm_residual: bool = False  # the residual stream goes on behind the attention's norm


def apply_block(
    kernels: Kernels,
    block: Block,
    hidden: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: Any,
    beside: Tensor | None = None,
) -> Tensor:
    """One block over `hidden [T, H]` (and `beside`, likewise, where it reads a second input) by
    single operations: what `run_blocks` must equal.
    """
    eps = block.eps
    read = kernels.rms_norm(hidden, block.attention_norm, eps)
    if block.norm_residual:
        hidden = read
    if beside is not None and block.beside_norm is not None:
        read = torch.cat([kernels.rms_norm(beside, block.beside_norm, eps), read], dim=1)
    qkv = kernels.linear(read, block.qkv)
    queries = kernels.rope_and_store(
        qkv, block.cos, block.sin, keys, values, plan, block.head_norms
    )
    attended = kernels.attention(
        queries, keys, values, plan, block.scale, block.window, block.soft_cap
    )
    hidden = _add(kernels, attended, block.output, block.attention_post_norm, eps, hidden)
    gate_up = kernels.linear(kernels.rms_norm(hidden, block.mlp_norm, eps), block.gate_up)
    inner = kernels.gate_multiply(gate_up, block.activation)
    return _add(kernels, inner, block.down, block.mlp_post_norm, eps, hidden)


def _add(
    kernels: Kernels, x: Tensor, packed: Any, post_norm: Tensor | None, eps: float, hidden: Tensor
) -> Tensor:
    """`hidden` with the linear of `x` added, normed before where the family says so."""
    if post_norm is None:
        return kernels.linear(x, packed, hidden)
    return kernels.rms_norm(kernels.linear(x, packed), post_norm, eps, hidden)
