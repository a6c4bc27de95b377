"""Truncation of a row: temperature, min_p, top_k, top_p. Ties always go to the lowest id.

Knows one row of logits; knows no history and no request. The plain statement of what `RowMath` does
to a row before it draws or normalises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Truncation:
    """In this order: logits over `temperature`, then min_p, top_k, and top_p of what top_k left."""

    temperature: float = 1.0  # > 0
    min_p: float = 0.0  # 0: none
    top_k: int = 0  # 0: all
    top_p: float = 1.0  # 1: all


WHOLE = Truncation()


def truncate(row: Tensor, truncation: Truncation) -> Tensor:
    """`row` `[V]` over the temperature, `-inf` where it is cut; `row` itself where nothing is."""
    if truncation.temperature != 1.0:
        row = row / truncation.temperature
    if truncation.min_p > 0.0:
        row = keep_min_p(row, truncation.min_p)
    return keep_top(row, truncation.top_k, truncation.top_p)


def keep_min_p(row: Tensor, min_p: float) -> Tensor:
    """`row` with `-inf` where p(x) < min_p * max p, that is where x lies below max + log(min_p)."""
    return row.masked_fill(row < row.max() + math.log(min_p), -math.inf)


def keep_top(row: Tensor, top_k: int, top_p: float) -> Tensor:
    """`row` with `-inf` outside the `top_k` largest (0: all), and of those outside the nucleus.

    The nucleus (Holtzman et al. 1904.09751) is the shortest largest-first prefix whose probability,
    after top_k, reaches `top_p`; it holds one id at least.
    """
    if 0 < top_k < row.numel():
        ids = top_ids(row, top_k)
    elif top_p < 1.0:
        ids = _largest_first(row)
    else:
        return row
    if top_p < 1.0:
        running = torch.softmax(row[ids].to(torch.float64), dim=-1).cumsum(dim=-1)
        ids = ids[: int(torch.searchsorted(running, top_p)) + 1]
    kept = torch.full_like(row, -math.inf)
    kept[ids] = row[ids]
    return kept


def top_ids(row: Tensor, k: int) -> Tensor:
    """`[k]` int64: the ids of the k <= V largest values, largest first, lowest ids first among
    equals.
    """
    # The k-th largest value is exact however it is found; only who gets the last places among
    # equals needs an order.
    kth = torch.topk(row, k).values[-1]
    candidates = (row >= kth).nonzero().squeeze(1)  # ascending ids, k of them or more
    return candidates[_largest_first(row[candidates])[:k]]


def _largest_first(values: Tensor) -> Tensor:
    return torch.sort(values, descending=True, stable=True).indices
