"""Repetition, frequency and presence penalties of one row, exact at every row of a verified window.

Knows logits and the history before the row; knows no request. Presence and frequency count output
tokens only, repetition the prompt's too; the draft tokens on the row's path are output.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.core.history import History


@dataclass(frozen=True, slots=True)
class Penalties:
    """Applied in vLLM's order: repetition first, then frequency, then presence."""

    repetition: float  # > 0; 1 = none (Keskar et al. 1909.05858, section 4.1)
    frequency: float  # subtracted once per occurrence
    presence: float  # subtracted once

    @property
    def active(self) -> bool:
        return self.repetition != 1.0 or self._counts_output

    @property
    def _counts_output(self) -> bool:
        return self.frequency != 0.0 or self.presence != 0.0

    def apply_(self, logits: Tensor, history: History) -> None:
        """Penalise `logits` `[V]` in place."""
        groups: list[tuple[Tensor, Tensor]] = []
        if self.repetition != 1.0:
            prompt_ids, _ = history.prompt.table()
            groups.append((prompt_ids, torch.zeros_like(prompt_ids)))
        groups.append(history.output.table())
        if history.path:
            drafted = Counter(history.path)
            counts = [history.output.count(token) + more for token, more in drafted.items()]
            groups.append((torch.tensor(list(drafted)), torch.tensor(counts)))
        # A token may be in several groups; every value comes from the unpenalised row and the last
        # group, which knows the most, wins.
        penalised: list[tuple[Tensor, Tensor]] = []
        for tokens, times in groups:
            ids = tokens.to(logits.device)
            penalised.append((ids, self._penalised(logits[ids], times.to(logits))))
        for ids, values in penalised:
            logits[ids] = values

    def _penalised(self, values: Tensor, counts: Tensor) -> Tensor:
        if self.repetition != 1.0:
            values = torch.where(values > 0, values / self.repetition, values * self.repetition)
        if self.frequency != 0.0:
            values = values - counts * self.frequency
        if self.presence != 0.0:
            values = torch.where(counts > 0, values - self.presence, values)
        return values
