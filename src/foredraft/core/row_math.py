"""The few operations of a sampler that reduce over a row of the vocabulary.

Knows rows of numbers; knows nothing of requests, models or devices' speed. The sampler is written
against `RowMath` so that the native kernels can stand in where torch's own reductions would make a
row depend on thread counts.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from foredraft.core import coins


class RowMath(Protocol):
    """Reductions over one row `[V]` (float32 or float64). Ties always go to the lowest id.

    A row with NaN gives a NaN's id, or raises FloatingPointError; it never gives another id.
    """

    def argmax(self, row: Tensor) -> int:
        """The id of the largest value; the lowest id among equals."""

    def argmax_rows(self, rows: Tensor) -> list[int]:
        """`argmax` of every row of `[R, V]`."""

    def softmax(self, row: Tensor) -> Tensor:
        """`[V]` float64 probabilities of the logits `row` (`-inf` gives 0)."""

    def log_softmax(self, row: Tensor) -> Tensor:
        """`[V]` float64 log-probabilities of the logits `row`."""

    def cumulative_sum(self, row: Tensor) -> Tensor:
        """`[V]` float64 running sum from the first id to the last, added in order."""

    def coupled_argmax(self, row: Tensor, seed: int, position: int) -> int:
        """argmax of `row + G`, G the Gumbel noise `coins.gumbel_noise(seed, position, V)`."""


class TorchRowMath:
    """The reference: torch on any device. Its sums are torch's, so a row may depend on threads and
    device.
    """

    def argmax(self, row: Tensor) -> int:
        return int(torch.argmax(row))

    def argmax_rows(self, rows: Tensor) -> list[int]:
        ids: list[int] = torch.argmax(rows, dim=-1).tolist()
        return ids

    def softmax(self, row: Tensor) -> Tensor:
        return torch.softmax(row.to(torch.float64), dim=-1)

    def log_softmax(self, row: Tensor) -> Tensor:
        return torch.log_softmax(row.to(torch.float64), dim=-1)

    def cumulative_sum(self, row: Tensor) -> Tensor:
        return torch.cumsum(row.to(torch.float64), dim=-1)

    def coupled_argmax(self, row: Tensor, seed: int, position: int) -> int:
        noise = coins.gumbel_noise(seed, position, row.shape[-1], row.device)
        return int(torch.argmax(row.to(torch.float64) + noise))
