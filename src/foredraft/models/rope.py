"""Rotary position embeddings: the frequencies a model uses, their tables of cosines and sines.

Knows frequencies and positions; knows no query, no key and no kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.core.errors import ModelError

# Angles are computed in float64: a bounded number at a time beside tables that may be long.
_ROWS_AT_ONCE = 2**14


@dataclass(frozen=True, slots=True)
class Linear:
    """Every frequency divided by `factor` (position interpolation, Chen et al. 2023)."""

    factor: float

    def apply(self, frequencies: Tensor, theta: float) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3:
    """Long wavelengths divided by `factor`, short ones kept, a linear blend between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def apply(self, frequencies: Tensor, theta: float) -> Tensor:
        turns = self.original_max_positions * frequencies / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = ((turns - self.low_freq_factor) / span).clamp(0.0, 1.0)
        return kept * frequencies + (1.0 - kept) * frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Yarn:
    """Frequencies that turn often within the original length kept, those that turn seldom divided
    by `factor`, a ramp over the frequencies' indices between (Peng et al. 2023, section 3.2).
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0  # turns within the original length from which a frequency is kept
    beta_slow: float = 1.0  # turns up to which it is divided
    truncate: bool = True  # the ramp begins and ends at whole indices

    def apply(self, frequencies: Tensor, theta: float) -> Tensor:
        count = frequencies.numel()

        def index(turns: float) -> float:
            """Where the frequency that turns so often would stand."""
            ratio = self.original_max_positions / (turns * 2 * math.pi)
            return count * math.log(ratio) / math.log(theta)

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # The upper bound counts dimensions, two a frequency, as every implementation has it.
        low, high = max(low, 0), min(high, 2 * count - 1)
        indices = torch.arange(count, dtype=frequencies.dtype, device=frequencies.device)
        divided = ((indices - low) / (high - low or 0.001)).clamp(0.0, 1.0)
        return divided * frequencies / self.factor + (1.0 - divided) * frequencies


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """What yarn multiplies cosines and sines by (Peng et al. 2023, section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


@dataclass(frozen=True, slots=True)
class Divisors:
    """Each frequency divided by its own number: longrope's factors, a GGUF file's `rope_freqs`."""

    values: tuple[float, ...]  # one a frequency

    def apply(self, frequencies: Tensor, theta: float) -> Tensor:
        return frequencies / torch.tensor(
            self.values, dtype=frequencies.dtype, device=frequencies.device
        )


@dataclass(frozen=True, slots=True)
class Rope:
    """`theta` is the base: frequency i is `theta^(-2i / rotary_dim)`, then scaled."""

    theta: float
    scaling: Linear | Llama3 | Yarn | Divisors | None = None
    attention_factor: float = 1.0  # multiplies cosines and sines
    rotary_dim: int | None = None  # a head's first dimensions, which alone are rotated; None = all

    def __post_init__(self) -> None:
        if isinstance(self.scaling, Yarn) and self.theta <= 1.0:
            raise ModelError(f"yarn needs a rope base above 1, got {self.theta}")

    def tables(
        self, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[Tensor, Tensor]:
        """cos and sin, `[positions, head_dim / 2]` each; computed in float64, stored in `dtype`.

        What is not rotated has cosine 1 and sine 0, behind what is.
        """
        rotary_dim = self.rotary_dim or head_dim
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
        frequencies = self.theta**-exponent
        if self.scaling is not None:
            frequencies = self.scaling.apply(frequencies, self.theta)
        cos = torch.ones(positions, head_dim // 2, dtype=dtype, device=device)
        sin = torch.zeros_like(cos)
        steps = torch.arange(positions, dtype=torch.float64, device=device)
        turned = frequencies.numel()
        for first in range(0, positions, _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            angles = torch.outer(steps[rows], frequencies)
            cos[rows, :turned] = (angles.cos() * self.attention_factor).to(dtype)
            sin[rows, :turned] = (angles.sin() * self.attention_factor).to(dtype)
        return cos, sin
