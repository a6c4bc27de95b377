"""The few operations of a sampler that reduce over a row of the vocabulary.

Knows rows of numbers; knows nothing of requests, models or devices' speed. The sampler and the
rules are written against `RowMath` so that the native kernels can stand in where torch's own
reductions would make a row depend on thread counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from foredraft.core import coins
from foredraft.core.truncation import WHOLE, Truncation, truncate

NoiseKey = tuple[int, int]  # seed, position


class RowMath(Protocol):
    """Reductions over rows `[V]`. Ties always go to the lowest id.

    Logits are float32 or float64. A row of them that holds NaN gives a NaN's id, never another.
    """

    def argmax_rows(self, rows: Tensor) -> list[int]:
        """The id of the largest value of each of `rows` `[R, V]`."""

    def top_ids(self, rows: Tensor, k: int) -> list[list[int]]:
        """The ids of the `k` largest values of each of `rows` `[R, V]`, best first, equal ones in
        any order; all V where k is larger. For drafters: nothing emitted depends on them.
        """

    def draws(
        self, rows: Sequence[Tensor], truncations: Sequence[Truncation], keys: Sequence[NoiseKey]
    ) -> list[int]:
        """Per row of logits, the argmax of what is kept + G, G the Gumbel noise
        `coins.gumbel_noise(seed, position, V)`; where no logit over the temperature is finite, or
        one is infinite, the id of the largest.
        """

    def laws(
        self, rows: Sequence[Tensor], truncations: Sequence[Truncation]
    ) -> tuple[Sequence[Tensor], list[int]]:
        """Per row of logits, `[V]` float64 probabilities of what is kept, and the id of the largest
        logit. Unless that logit over the temperature is finite, there is no law.
        """

    def log_softmax(self, row: Tensor) -> Tensor:
        """`[V]` float64 log-probabilities of the logits `row`."""

    def total(self, weights: Tensor) -> float:
        """The sum of `weights` `[V]` float64, all 0 or more."""

    def draw(self, weights: Tensor, coin: float) -> int | None:
        """The id where the running sum of `weights` first exceeds `coin` times their `total`.

        Never an id of weight 0; None where there is no other. `coin` lies in (0, 1).
        """


class TorchRowMath:
    """The reference: torch on any device. Its sums are torch's, so a row may depend on threads and
    device.
    """

    def argmax_rows(self, rows: Tensor) -> list[int]:
        ids: list[int] = torch.argmax(rows, dim=-1).tolist()
        return ids

    def top_ids(self, rows: Tensor, k: int) -> list[list[int]]:
        ids: list[list[int]] = rows.topk(min(k, rows.shape[-1]), dim=-1).indices.tolist()
        return ids

    def draws(
        self, rows: Sequence[Tensor], truncations: Sequence[Truncation], keys: Sequence[NoiseKey]
    ) -> list[int]:
        ids = []
        for row, truncation, (seed, position) in zip(rows, truncations, keys, strict=True):
            best = int(torch.argmax(row))
            if bool(torch.isfinite(row[best])):
                noise = coins.gumbel_noise(seed, position, row.shape[-1], row.device)
                best = int(torch.argmax(truncate(row, truncation).to(torch.float64) + noise))
            ids.append(best)
        return ids

    def laws(
        self, rows: Sequence[Tensor], truncations: Sequence[Truncation]
    ) -> tuple[Sequence[Tensor], list[int]]:
        laws = [
            torch.softmax(truncate(row, truncation).to(torch.float64), dim=-1)
            for row, truncation in zip(rows, truncations, strict=True)
        ]
        return laws, [int(torch.argmax(row)) for row in rows]

    def log_softmax(self, row: Tensor) -> Tensor:
        return torch.log_softmax(row.to(torch.float64), dim=-1)

    def total(self, weights: Tensor) -> float:
        return float(torch.cumsum(weights, dim=-1)[-1])

    def draw(self, weights: Tensor, coin: float) -> int | None:
        running = torch.cumsum(weights, dim=-1)
        total = float(running[-1])
        if not total > 0.0:
            return None
        drawn = int(torch.searchsorted(running, coin * total, right=True))
        # A total of a few denormals can round coin * total up to the total itself, which no running
        # sum exceeds: then it is the last id that adds anything.
        return min(drawn, int(torch.searchsorted(running, total)))


def coupled_argmax(row_math: RowMath, row: Tensor, seed: int, position: int) -> int:
    """`RowMath.draws` of one whole row."""
    return row_math.draws([row], [WHOLE], [(seed, position)])[0]
