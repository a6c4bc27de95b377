"""Weights of 8 bits: 32 neighbours in a row share a scale, as GGUF's Q8_0 has them.

Knows tensors; knows no file and no kernel. `w ~ scale * value`, the scale being the largest
magnitude of the 32 over 127: what was widened from Q8_0 comes back as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.core.errors import ConfigError

GROUP = 32
Q8_0 = "q8_0"
QUANTIZATIONS = (Q8_0,)


@dataclass(frozen=True, slots=True)
class EightBitWeight:
    """A weight `[N, K]`."""

    values: Tensor  # [N, K] int8
    scales: Tensor  # [N, groups of K] float32

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def widened(self, dtype: torch.dtype) -> Tensor:
        """`[N, K]` in `dtype`; the products are rounded to float32 first, as the kernels do."""
        n, k = self.values.shape
        values = _grouped(self.values.to(torch.float32))
        return (values * self.scales[..., None]).reshape(n, -1)[:, :k].to(dtype)


def quantized(weight: Tensor) -> EightBitWeight:
    """The nearest 8-bit weight of `weight [N, K]`, ties to even.

    Raises ValueError for a number that isn't finite.
    """
    n, k = weight.shape
    groups = _grouped(weight.detach().to(torch.float32))
    scales = groups.abs().amax(-1) / 127.0
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("a weight that isn't finite has no 8 bits")
    steps = groups / torch.where(scales > 0.0, scales, torch.ones_like(scales))[..., None]
    values = steps.round().clamp(-127, 127).to(torch.int8)
    return EightBitWeight(values.reshape(n, -1)[:, :k].contiguous(), scales.contiguous())


def check_quantization(quantization: object) -> None:
    """Raises ConfigError for what is neither None nor the name of a quantization."""
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ConfigError(
            f"quantization must be null or {', '.join(QUANTIZATIONS)}, got {quantization!r}"
        )


def as_stored(weight: Tensor, quantization: str | None) -> Tensor | EightBitWeight:
    """`weight [N, K]` as it is to be packed."""
    return weight if quantization is None else quantized(weight)


def _grouped(weight: Tensor) -> Tensor:
    """`[N, groups, 32]`, zeros behind the end of a row."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -k % GROUP))
    return padded.view(n, -1, GROUP)
