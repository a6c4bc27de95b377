"""Widening ggml's storage types: bit by bit what the formulas and ggml's own library give."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from foredraft.models.gguf_quants import BLOCKS, TYPE_NAMES, dequantise

F32 = np.float32
KINDS = {name: kind for kind, name in TYPE_NAMES.items() if kind in BLOCKS}
QUANTISED = [name for name, kind in KINDS.items() if BLOCKS[kind].values > 1]


def half(block: bytes, at: int) -> F32:
    return F32(np.frombuffer(block, np.float16, 1, at)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def q4_0(b: bytes) -> list[F32]:
    d, q = half(b, 0), b[2:]
    low, high = [v & 15 for v in q], [v >> 4 for v in q]
    return [d * F32(v - 8) for v in low + high]


def q4_1(b: bytes) -> list[F32]:
    d, m, q = half(b, 0), half(b, 2), b[4:]
    return [d * F32(v) + m for v in [v & 15 for v in q] + [v >> 4 for v in q]]


def fives(high: bytes, low: bytes) -> list[int]:
    """Values 0..15 from the low halves of 16 bytes, 16..31 from the high ones; bit i is the 5th."""
    bits = int.from_bytes(high, "little")
    four = [v & 15 for v in low] + [v >> 4 for v in low]
    return [v + 16 * (bits >> i & 1) for i, v in enumerate(four)]


def q5_0(b: bytes) -> list[F32]:
    return [half(b, 0) * F32(v - 16) for v in fives(b[2:6], b[6:])]


def q5_1(b: bytes) -> list[F32]:
    return [half(b, 0) * F32(v) + half(b, 2) for v in fives(b[4:8], b[8:])]


def q8_0(b: bytes) -> list[F32]:
    return [half(b, 0) * F32(signed(v)) for v in b[2:]]


def scale_and_minimum(packed: bytes, run: int) -> tuple[int, int]:
    if run < 4:
        return packed[run] & 63, packed[run + 4] & 63
    scale = packed[run + 4] & 15 | packed[run - 4] >> 6 << 4
    return scale, packed[run + 4] >> 4 | packed[run] >> 6 << 4


def k_runs(b: bytes, value: Callable[[int, int], int]) -> list[F32]:
    """8 runs of 32: `value(run, i)` scaled, minus the minimum."""
    out = []
    for run in range(8):
        scale, minimum = scale_and_minimum(b[4:16], run)
        d, m = half(b, 0) * F32(scale), half(b, 2) * F32(minimum)
        out += [d * F32(value(run, i)) - m for i in range(32)]
    return out


def q4_k(b: bytes) -> list[F32]:
    return k_runs(b, lambda run, i: b[16 + run // 2 * 32 + i] >> run % 2 * 4 & 15)


def q5_k(b: bytes) -> list[F32]:
    def value(run: int, i: int) -> int:
        return (b[48 + run // 2 * 32 + i] >> run % 2 * 4 & 15) + 16 * (b[16 + i] >> run & 1)

    return k_runs(b, value)


def q6_k(b: bytes) -> list[F32]:
    low, high, scales, d = b[:128], b[128:192], b[192:208], half(b, 208)
    out = []
    for i in range(256):
        half_of, place = divmod(i, 128)
        quarter, at = divmod(place, 32)
        four = low[half_of * 64 + quarter % 2 * 32 + at] >> quarter // 2 * 4 & 15
        two = high[half_of * 32 + at] >> quarter * 2 & 3
        out.append(d * F32(signed(scales[i // 16])) * F32(four + 16 * two - 32))
    return out


FORMULAS: dict[str, Callable[[bytes], Sequence[F32]]] = {
    "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0,
    "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k,
}  # fmt: skip
# Where a block's float16 numbers are: random bytes there would often be no number at all.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def random_blocks(name: str, count: int, seed: int) -> NDArray[np.uint8]:
    """`[count, bytes]`: any bytes, but finite float16 numbers of any size and sign."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (count, BLOCKS[KINDS[name]].bytes), dtype=np.uint8)
    for at in HALVES[name]:
        raw[:, at + 1] &= 0b10111111  # no exponent of infinity
    return raw


def widened(name: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    out = dequantise(KINDS[name], raw.reshape(-1))
    assert out.dtype == torch.float32
    return out.numpy()


def test_every_supported_quantisation_has_a_formula_here() -> None:
    assert set(FORMULAS) == set(QUANTISED) == set(HALVES)


@pytest.mark.parametrize("name", QUANTISED)
def test_it_gives_the_formula_s_numbers(name: str) -> None:
    raw = random_blocks(name, 12, seed=1)
    expected = [value for block in raw for value in FORMULAS[name](block.tobytes())]
    assert np.array_equal(widened(name, raw), np.array(expected, np.float32))


@pytest.mark.parametrize("name", QUANTISED)
def test_it_gives_ggml_s_numbers(name: str) -> None:
    raw = random_blocks(name, 3000, seed=2)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[name]).reshape(-1)
    assert np.array_equal(widened(name, raw), expected)


@pytest.mark.parametrize("name", QUANTISED)
def test_any_bytes_give_numbers_or_what_ggml_gives(name: str) -> None:
    count, size = 500, BLOCKS[KINDS[name]].bytes
    raw = np.random.default_rng(3).integers(0, 256, (count, size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[name]).reshape(-1)
    assert np.array_equal(widened(name, raw), expected, equal_nan=True)


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("count", [0, 1])
def test_few_blocks(name: str, count: int) -> None:
    raw = random_blocks(name, count, seed=4)
    assert widened(name, raw).shape == (count * BLOCKS[KINDS[name]].values,)


def test_a_read_only_buffer_is_read() -> None:
    raw = np.frombuffer(bytes(random_blocks("Q4_K", 2, seed=5)), np.uint8)
    assert widened("Q4_K", raw).shape == (512,)
