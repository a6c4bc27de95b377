"""Reduced vocabularies: which of a target's ids a head can draft (FR-Spec, 2502.14856).

Knows ids and how often they came; knows no head and no file. What is left out is never drafted, and
the target says it itself: the output's law is the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from foredraft.core.errors import ModelError


def most_frequent(counts: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """The `size` ids of the largest `counts [V]`, ties to the lowest id, `always` among them:
    `[size]` int64, ascending.

    Raises ModelError for a size that is not in 1..V or too small for `always`.
    """
    kept = sorted(set(always))
    vocab_size = len(counts)
    if not max(1, len(kept)) <= size <= vocab_size:
        raise ModelError(
            f"a draft vocabulary of {size} tokens was asked for; valid are "
            f"{max(1, len(kept))}..{vocab_size}"
        )
    rank = counts.to("cpu", torch.float64).clone()
    rank[torch.tensor(kept, dtype=torch.int64)] = torch.inf
    return rank.sort(descending=True, stable=True).indices[:size].sort().values


def check_draft_ids(draft_ids: Tensor, count: int, vocab_size: int) -> None:
    """Raises ModelError unless these are `count` ascending ids of a vocabulary, int64."""
    if draft_ids.shape != (count,) or draft_ids.dtype != torch.int64:
        raise ModelError(
            f"draft ids are {draft_ids.dtype} {list(draft_ids.shape)}, expected int64 [{count}]"
        )
    if int(draft_ids.min()) < 0 or int(draft_ids.max()) >= vocab_size:
        raise ModelError(
            f"draft ids go from {int(draft_ids.min())} to {int(draft_ids.max())}, outside the "
            f"target's 0..{vocab_size - 1}"
        )
    if bool((draft_ids.diff() <= 0).any()):
        raise ModelError("draft ids must ascend, each once")
