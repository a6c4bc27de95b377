"""The few operations of a sampler that reduce over a row of the vocabulary.

Knows rows of numbers; knows nothing of requests, models or devices' speed. The sampler is written against `RowMath`
so that the native kernels can stand in where torch's own reductions would make a row depend on thread counts.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RowMath(Protocol):
    """Reductions over one row `[V]` (float32 or float64). Ties always go to the lowest id."""

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
