"""Rotary position embeddings: the frequencies a model uses, their tables of cosines and sines.

Knows frequencies and positions; knows no query, no key and no kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """Every frequency divided by `factor` (position interpolation, Chen et al. 2023)."""

    factor: float

    def apply(self, frequencies: Tensor) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3:
    """Long wavelengths divided by `factor`, short ones kept, a linear blend between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def apply(self, frequencies: Tensor) -> Tensor:
        turns = self.original_max_positions * frequencies / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = ((turns - self.low_freq_factor) / span).clamp(0.0, 1.0)
        return kept * frequencies + (1.0 - kept) * frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Divisors:
    """Each frequency divided by its own number, as a GGUF file stores a scaling (`rope_freqs`)."""

    values: tuple[float, ...]  # head_dim / 2

    def apply(self, frequencies: Tensor) -> Tensor:
        return frequencies / torch.tensor(
            self.values, dtype=frequencies.dtype, device=frequencies.device
        )


@dataclass(frozen=True, slots=True)
class Rope:
    """`theta` is the base: frequency i is `theta^(-2i / head_dim)`, then scaled."""

    theta: float
    scaling: Linear | Llama3 | Divisors | None = None

    def tables(
        self, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[Tensor, Tensor]:
        """cos and sin, `[positions, head_dim / 2]` each; computed in float64, stored in `dtype`."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
        frequencies = self.theta**-exponent
        if self.scaling is not None:
            frequencies = self.scaling.apply(frequencies)
        steps = torch.arange(positions, dtype=torch.float64, device=device)
        angles = torch.outer(steps, frequencies)
        return angles.cos().to(dtype), angles.sin().to(dtype)
