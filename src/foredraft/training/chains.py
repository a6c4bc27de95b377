"""A student that guesses several positions ahead from one row, one pass or head after the other.

Knows the loss over the drafts of a chain and how they are laid out; knows neither head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from foredraft.training.batches import Batch
from foredraft.training.losses import step_weights
from foredraft.training.student import Lesson, Objective, Teaching, likeliest

Projected = tuple[Tensor, Callable[[Tensor], Tensor]]  # hidden [B, T, H], and logits of its rows


def chain_lesson(
    steps: Iterable[Projected], batch: Batch, teaching: Teaching, objective: Objective
) -> Lesson:
    """The weighted sum of the mean loss of each draft; row t of step s guesses token t + 2 + s.

    Rows are those from which an engine drafts: at the prompt's last token and behind.
    """
    places = batch.laws()
    losses: list[Tensor] = []
    kept: list[Tensor] = []
    counts: list[int] = []
    for step, (hidden, project) in enumerate(steps):
        compared = teaching.compare(hidden, places, step + 1, project, objective.loss)
        losses.append(_grid(compared.places, compared.losses))
        kept.append(_grid(compared.places, compared.acceptance))
        counts.append(max(1, len(compared.losses)))
    taught = torch.tensor(counts, dtype=losses[0].dtype, device=places.device)
    weights = step_weights(objective.weighting, torch.stack(kept), objective.decay)
    total = ((weights * torch.stack(losses)).sum(-1) / taught).sum()
    return Lesson(total, torch.stack(kept).sum(-1) / taught)


def _grid(places: Tensor, values: Tensor) -> Tensor:
    """`[B T]`: `values [n]` at `places [B, T]`, in their order, and zeros."""
    return torch.zeros_like(places, dtype=values.dtype).masked_scatter(places, values).flatten()


def chain_drafts(
    steps: Iterable[Projected], batch: Batch, ids: Tensor | None, ranks: int
) -> Tensor:
    """See `Student.drafts`: a row at t drafts while the token at t + 1 is pending."""
    places = batch.laws()[:, :-1]
    found: list[Tensor] = []
    for hidden, project in steps:
        grid = batch.tokens.new_full((*batch.tokens.shape, ranks), -1)
        grid[:, 1:][places] = likeliest(hidden[:, :-1][places], project, ids, ranks)
        found.append(grid)
    return torch.stack(found, dim=2)
