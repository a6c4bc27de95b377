"""What the training loop asks of a student, and the comparison of its rows with the target's laws.

Knows batches, laws and losses; knows no head, no optimiser and no file. Shapes: B sequences, T
positions, K drafts of a chain, N rows, H hidden size, D ids that the student drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from foredraft.training.batches import Batch
from foredraft.training.losses import acceptance, row_losses

_ROWS_AT_ONCE = 512  # of drafts
_LOGITS_AT_ONCE = 2**25  # in memory; those of more rows are computed again for the gradient


@dataclass(frozen=True, slots=True)
class Objective:
    """What a student is to make small."""

    loss: str = "kl"  # one of `losses.LOSSES`
    weighting: str = "decay"  # one of `losses.WEIGHTINGS`
    decay: float = 0.8  # of a draft's weight by the draft before it


@dataclass(frozen=True, slots=True)
class Lesson:
    """What one batch gave."""

    loss: Tensor  # scalar, with a gradient
    acceptance: Tensor  # [K] mean chance that a sampled draft is kept, by position; no gradient


class Student(Protocol):
    """A drafter in the making."""

    num_drafts: int  # K: as many as it is measured at
    # The first token that may be pending when it drafts: 0 is the prompt's last, 1 the one behind,
    # for a student that needs the target's features of a token before.
    first_pending: int

    @property
    def module(self) -> nn.Module:
        """What is trained."""

    def lesson(self, batch: Batch) -> Lesson:
        """One forward pass with its loss."""

    def drafts(self, batch: Batch, ranks: int = 1) -> Tensor:
        """`[B, T, K, ranks]` target ids: at [b, a, i] those drafted for position `a + 1 + i` while
        the token at `a` is pending, likeliest first, if all drafts before are the answer's.

        -1 where nothing right can be drafted.
        """

    def save(self, directory: Path) -> None:
        """Write the files that an engine loads. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Some rows of a student beside the target's laws."""

    places: Tensor  # [B, T] bool: which
    losses: Tensor  # [n] of them, in order
    acceptance: Tensor  # [n] how likely a sampled draft is kept; no gradient


@dataclass(frozen=True, slots=True)
class Teaching:
    """The target's laws of one batch, found by position."""

    logprobs: Tensor  # [N, D] as `losses` wants them
    labels: Tensor  # [N] the answer's token as an index into the D ids; -1 where it isn't of them
    rows: Tensor  # [B, T] row of the law of the token behind a position; -1 where none is taught

    @classmethod
    def of(cls, batch: Batch, logprobs: Tensor, ids: Tensor | None) -> Teaching:
        """From the laws at `batch.laws()`, in their order, over the target's ids `ids [D]`
        (ascending; None: all).
        """
        valid = batch.laws()
        rows = torch.full_like(batch.tokens, -1)
        rows[valid] = torch.arange(len(logprobs), device=rows.device)
        labels = shifted(batch.tokens, 1)[valid]
        return cls(logprobs, labels if ids is None else index_among(ids, labels), rows)

    def compare(
        self,
        hidden: Tensor,
        places: Tensor,
        ahead: int,
        project: Callable[[Tensor], Tensor],
        loss: str,
    ) -> Compared:
        """The student's rows at `places [B, T]` (bool) beside the laws `ahead` positions further.

        `project` makes logits `[n, D]` of rows of `hidden [B, T, H]`. Rows whose right token the
        student can't draft are left out (EAGLE-3).
        """
        rows = shifted(self.rows, ahead, fill=-1)
        taught = places & (rows >= 0)
        taught[taught.clone()] = self.labels[rows[taught]] >= 0
        found = rows[taught]
        losses, kept = _compare_rows(
            hidden[taught], project, self.logprobs[found], self.labels[found], loss
        )
        return Compared(taught, losses, kept)


def _compare_rows(
    hidden: Tensor,
    project: Callable[[Tensor], Tensor],
    logprobs: Tensor,
    labels: Tensor,
    loss: str,
) -> tuple[Tensor, Tensor]:
    """Loss and acceptance (without gradient) of each row, `[N]`; few rows' logits at a time."""

    def part(hidden: Tensor, logprobs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = project(hidden)
        wide = torch.promote_types(logits.dtype, torch.float32)
        own = logits.log_softmax(-1, dtype=wide)
        logprobs = logprobs.to(wide)
        return row_losses(loss, logprobs, own, labels), acceptance(logprobs, own.detach())

    rows = max(1, _LOGITS_AT_ONCE // logprobs.shape[-1])
    if len(hidden) <= rows:
        return part(hidden, logprobs, labels)
    parts = [
        checkpoint(part, *each, use_reentrant=False, preserve_rng_state=False)
        for each in zip(
            *(torch.split(each, rows) for each in (hidden, logprobs, labels)), strict=True
        )
    ]
    losses, kept = zip(*parts, strict=True)
    return torch.cat(losses), torch.cat(kept)


def likeliest(
    hidden: Tensor, project: Callable[[Tensor], Tensor], ids: Tensor | None, ranks: int
) -> Tensor:
    """`[N, ranks]` target ids of the best logits of rows `hidden [N, H]`."""
    parts = torch.split(hidden, _ROWS_AT_ONCE)
    best = [project(rows).topk(ranks, dim=-1).indices for rows in parts]
    found = torch.cat(best) if best else hidden.new_empty(0, ranks, dtype=torch.int64)
    return found if ids is None else ids[found]


def shifted(grid: Tensor, by: int, fill: int = 0) -> Tensor:
    """`grid [B, T]` with what stands `by` positions further on; `fill` behind the end."""
    moved = torch.full_like(grid, fill)
    moved[:, : grid.shape[1] - by] = grid[:, by:]
    return moved


def index_among(ids: Tensor, tokens: Tensor) -> Tensor:
    """Where each of `tokens [N]` stands in the ascending `ids [D]`; -1 where it doesn't."""
    places = torch.searchsorted(ids, tokens).clamp(max=len(ids) - 1)
    return torch.where(ids[places] == tokens, places, -1)
