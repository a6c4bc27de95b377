"""ggml's storage types widened to floats, exactly as ggml defines them.

Knows the bytes of a block; knows no file and no tensor's name. Formulas: ggml-quants.c,
`dequantize_row_*`: a block of 32 numbers shares a float16 scale d (and a float16 minimum m).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Block:
    """`values` numbers in `bytes` bytes; `widen`: `[blocks, bytes]` -> `[blocks, values]`."""

    values: int
    bytes: int
    widen: Callable[[Tensor], Tensor]


def _float16(raw: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of every block, `[blocks, 1]` float32."""
    return raw[:, at : at + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(raw: Tensor, at: int) -> Tensor:
    """16 bytes from `at`: their low halves, then their high halves, `[blocks, 32]` float32."""
    packed = raw[:, at : at + 16]
    return torch.cat([packed & 15, packed >> 4], dim=1).to(torch.float32)


def _q4_0(raw: Tensor) -> Tensor:
    return (_nibbles(raw, 2) - 8.0).mul_(_float16(raw, 0))


def _q4_1(raw: Tensor) -> Tensor:
    return _nibbles(raw, 4).mul_(_float16(raw, 0)).add_(_float16(raw, 2))


def _q8_0(raw: Tensor) -> Tensor:
    return raw[:, 2:34].view(torch.int8).to(torch.float32).mul_(_float16(raw, 0))


def _stored(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda raw: raw.view(dtype)


BLOCKS = {
    0: Block(1, 4, _stored(torch.float32)),
    1: Block(1, 2, _stored(torch.float16)),
    30: Block(1, 2, _stored(torch.bfloat16)),
    8: Block(32, 34, _q8_0),
    2: Block(32, 18, _q4_0),
    3: Block(32, 20, _q4_1),
}

# ggml.h, enum ggml_type: so that a refusal can say what the file holds.
TYPE_NAMES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


def dequantise(kind: int, raw: Bytes) -> Tensor:
    """The numbers of whole blocks `raw` of type `kind`, flat: float32, or as stored for 16 bits.

    The result may share memory with `raw`, which is read-only: never write to it.
    """
    block = BLOCKS[kind]
    # A copy: the file's mapping is read-only, which torch tensors cannot be.
    blocks = torch.from_numpy(raw.copy()).view(-1, block.bytes)
    return block.widen(blocks).reshape(-1)
