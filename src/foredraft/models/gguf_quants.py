"""ggml's storage types widened to floats, exactly as ggml defines them.

Knows the bytes of a block; knows no file and no tensor's name. Formulas: ggml-quants.c,
`dequantize_row_*`: a block of 32 numbers shares a float16 scale d (and a float16 minimum m); one of
256 (the K types) has a small scale (and minimum) for each run of numbers inside it as well.
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
    """`values` numbers in `bytes` bytes; `widen`: `[n, bytes]` -> `[n, ...]`, values in order."""

    values: int
    bytes: int
    widen: Callable[[Tensor], Tensor]


def _float16(raw: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of every block, `[blocks, 1]` float32."""
    return raw[:, at : at + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(raw: Tensor, at: int, run: int, num_runs: int = 1) -> Tensor:
    """`num_runs` runs of `run` bytes from `at`: the low halves of a run, then its high halves.

    `[blocks, 2 * run * num_runs]` uint8.
    """
    packed = raw[:, at : at + run * num_runs].view(-1, num_runs, 1, run)
    return torch.cat([packed & 15, packed >> 4], dim=2).flatten(1)


def _bits(packed: Tensor, width: int) -> Tensor:
    """The fields of `width` bits in bytes `[...]`, the lowest first: `[..., 8 // width]`."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)
    fields: Tensor = (packed.unsqueeze(-1) >> shifts) & (2**width - 1)
    return fields


def _fifth_bits(raw: Tensor, at: int) -> Tensor:
    """4 bytes from `at`: bit i belongs to value i, `[blocks, 32]`, in place as worth 16."""
    return _bits(raw[:, at : at + 4], 1).flatten(1) << 4


def _q4_0(raw: Tensor) -> Tensor:
    return (_nibbles(raw, 2, 16).float() - 8.0).mul_(_float16(raw, 0))


def _q4_1(raw: Tensor) -> Tensor:
    return _nibbles(raw, 4, 16).float().mul_(_float16(raw, 0)).add_(_float16(raw, 2))


def _q5_0(raw: Tensor) -> Tensor:
    values = _nibbles(raw, 6, 16) | _fifth_bits(raw, 2)
    return (values.float() - 16.0).mul_(_float16(raw, 0))


def _q5_1(raw: Tensor) -> Tensor:
    values = _nibbles(raw, 8, 16) | _fifth_bits(raw, 4)
    return values.float().mul_(_float16(raw, 0)).add_(_float16(raw, 2))


def _q8_0(raw: Tensor) -> Tensor:
    return raw[:, 2:34].view(torch.int8).to(torch.float32).mul_(_float16(raw, 0))


def _scales_and_minima(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Of the 8 runs of 32 in a block of Q4_K or Q5_K: `[blocks, 8, 1]` float32 each.

    12 bytes from byte 4 hold 8 scales and 8 minima of 6 bits: bytes 0..3 the first four scales and
    4..7 the first four minima, each in its low 6 bits; bytes 8..11 the low 4 bits of the other
    scales and minima, whose high 2 bits are the high bits of bytes 0..7.
    """
    packed = raw[:, 4:16].view(-1, 3, 4)
    first, last = packed[:, :2], packed[:, 2]
    rest = torch.stack([last & 15, last >> 4], dim=1) | ((first >> 6) << 4)
    steps = torch.cat([first & 63, rest], dim=2).float()
    scales = steps[:, 0] * _float16(raw, 0)
    minima = steps[:, 1] * _float16(raw, 2)
    return scales.unsqueeze(2), minima.unsqueeze(2)


def _q4_k(raw: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(raw)
    values = _nibbles(raw, 16, 32, 4).view(-1, 8, 32)
    return values.float().mul_(scales).sub_(minima)


def _q5_k(raw: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(raw)
    high = _bits(raw[:, 16:48], 1).transpose(1, 2)  # bit s of byte i: value i of run s
    values = _nibbles(raw, 48, 32, 4).view(-1, 8, 32) | (high << 4)
    return values.float().mul_(scales).sub_(minima)


def _q6_k(raw: Tensor) -> Tensor:
    """Two halves of 128: 64 bytes hold the low 4 bits, 32 bytes the high 2; a scale for each 16."""
    low = _nibbles(raw, 0, 64, 2).view(-1, 2, 4, 32)
    high = _bits(raw[:, 128:192].view(-1, 2, 32), 2).transpose(2, 3)
    scales = raw[:, 192:208].view(torch.int8).float() * _float16(raw, 208)
    values = (low | (high << 4)).view(-1, 16, 16)
    return (values.float() - 32.0).mul_(scales.unsqueeze(2))


def _stored(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda raw: raw.view(dtype)


BLOCKS = {
    0: Block(1, 4, _stored(torch.float32)),
    1: Block(1, 2, _stored(torch.float16)),
    30: Block(1, 2, _stored(torch.bfloat16)),
    8: Block(32, 34, _q8_0),
    2: Block(32, 18, _q4_0),
    3: Block(32, 20, _q4_1),
    6: Block(32, 22, _q5_0),
    7: Block(32, 24, _q5_1),
    12: Block(256, 144, _q4_k),
    13: Block(256, 176, _q5_k),
    14: Block(256, 210, _q6_k),
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
