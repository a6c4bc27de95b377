"""Training Medusa's heads on a frozen target (Cai et al. 2401.10774, Medusa-1).

Knows the heads and their target; knows no loop, no optimiser. Head h learns the target's own law of
the token at t + 2 + h from its last hidden state at t.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from foredraft.models.heads.medusa import Medusa
from foredraft.models.heads.medusa_checkpoint import save_medusa
from foredraft.training.batches import Batch
from foredraft.training.chains import Projected, chain_drafts, chain_lesson
from foredraft.training.student import Lesson, Objective, Teaching
from foredraft.training.target import Laws, Target


class MedusaStudent:
    """`Student` for Medusa's heads."""

    first_pending = 1

    def __init__(
        self, heads: Medusa, target: Target, objective: Objective, num_drafts: int | None = None
    ) -> None:
        """`num_drafts`: of the heads, the first; None: all."""
        self.module = heads
        self.num_drafts = num_drafts or heads.config.num_heads
        self._target = target
        self._objective = objective
        self._ids = heads.draft_ids if heads.config.draft_vocab_size is not None else None

    def lesson(self, batch: Batch) -> Lesson:
        """See `Student.lesson`."""
        laws = self._laws(batch)
        teaching = Teaching.of(batch, laws.logprobs, self._ids)
        return chain_lesson(self._steps(batch, laws), batch, teaching, self._objective)

    @torch.no_grad()
    def drafts(self, batch: Batch, ranks: int = 1) -> Tensor:
        """See `Student.drafts`."""
        return chain_drafts(self._steps(batch, self._laws(batch)), batch, self._ids, ranks)

    def save(self, directory: Path) -> None:
        """See `Student.save`."""
        save_medusa(self.module, directory)

    def note_accuracies(self, rates: Sequence[Sequence[float]]) -> None:
        """Keep `acceptance.accuracies` with the heads: what an engine chooses its tree by."""
        config = self.module.config
        self.module.config = replace(config, accuracies=tuple(map(tuple, rates)))

    def _laws(self, batch: Batch) -> Laws:
        taps = self._target.taps(batch, ())
        return self._target.laws(taps, batch.laws(), self._ids)

    def _steps(self, batch: Batch, laws: Laws) -> Iterator[Projected]:
        """Each head by itself, on the rows that have a law: the others are never drafted from."""
        hidden = laws.hidden.new_zeros(*batch.tokens.shape, laws.hidden.shape[-1])
        hidden[batch.laws()] = laws.hidden
        for index in range(self.num_drafts):

            def project(rows: Tensor, index: int = index) -> Tensor:
                return self.module.logits(index, self.module.hidden(index, rows))

            yield hidden, project
