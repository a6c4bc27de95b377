"""Training an EAGLE-3 head by training-time test (Li et al. 2503.01840).

Knows the head and its target; knows no loop, no optimiser. The head runs several steps as it will
when drafting: each step reads what the step before gave in place of the target's features, and the
answer's next token, and sees the first step's rows up to its own and of each later step its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from foredraft.models.heads.eagle3 import Eagle3, KeysValues
from foredraft.models.heads.eagle3_checkpoint import save_eagle3
from foredraft.training.batches import Batch
from foredraft.training.chains import Projected, chain_drafts, chain_lesson
from foredraft.training.student import Lesson, Objective, Teaching, shifted
from foredraft.training.target import Taps, Target


class Eagle3Student:
    """`Student` for an EAGLE-3 head."""

    first_pending = 1

    def __init__(self, head: Eagle3, target: Target, num_drafts: int, objective: Objective) -> None:
        self.module = head
        self.num_drafts = num_drafts
        self._target = target
        self._objective = objective
        self._depths = head.config.layers_of(target.loaded.config)
        self._ids = head.draft_ids

    def lesson(self, batch: Batch) -> Lesson:
        """See `Student.lesson`."""
        taps = self._target.taps(batch, self._depths)
        laws = self._target.laws(taps, batch.laws(), self._ids)
        teaching = Teaching.of(batch, laws.logprobs, self._ids)
        return chain_lesson(self._steps(batch, taps), batch, teaching, self._objective)

    @torch.no_grad()
    def drafts(self, batch: Batch, ranks: int = 1) -> Tensor:
        """See `Student.drafts`."""
        taps = self._target.taps(batch, self._depths)
        return chain_drafts(self._steps(batch, taps), batch, self._ids, ranks)

    def save(self, directory: Path) -> None:
        """See `Student.save`."""
        save_eagle3(self.module, directory)

    def _steps(self, batch: Batch, taps: Taps) -> Iterator[Projected]:
        """What the head gives in each step: in step s row t stands for position t + s. All rows of
        the first step are seen; later steps are computed for the rows that are drafted from.
        """
        head, last = self.module, self.module.config.max_position_embeddings - 1
        earlier: list[KeysValues] = []
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        hidden = head(
            self._embed(shifted(batch.tokens, 1)),
            head.fuse(torch.cat(taps.depths, dim=-1)),
            positions,
            None,
            earlier,
        )
        yield hidden, head.logits
        rows = _drafted_rows(batch)
        seen = positions <= rows[:, None, :, None]
        part = _gathered(hidden, rows)
        for step in range(1, self.num_drafts):
            tokens = shifted(batch.tokens, step + 1).gather(1, rows)
            places = (rows + step).clamp(max=last)
            part = head(self._embed(tokens), part, places, seen, earlier)
            whole = torch.zeros_like(hidden, dtype=part.dtype)
            yield whole.scatter(1, rows[..., None].expand_as(part), part), head.logits

    def _embed(self, tokens: Tensor) -> Tensor:
        head = self.module
        return head.embed(tokens) if head.config.own_embedding else self._target.embed(tokens)


def _drafted_rows(batch: Batch) -> Tensor:
    """`[B, A]` positions with a law, in order; for sequences with fewer, the batch's last position
    too, which has none.
    """
    longest = max(end - prompt for prompt, end in zip(batch.prompts, batch.lengths, strict=True))
    first = torch.tensor(batch.prompts, device=batch.tokens.device)[:, None] - 1
    rows = first + torch.arange(longest, device=first.device)
    return rows.clamp(max=batch.tokens.shape[1] - 1)


def _gathered(hidden: Tensor, rows: Tensor) -> Tensor:
    """`[B, A, H]`: the rows `[B, A]` of `hidden [B, T, H]`."""
    return hidden.gather(1, rows[..., None].expand(*rows.shape, hidden.shape[-1]))
