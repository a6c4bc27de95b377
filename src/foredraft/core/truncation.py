"""Truncation of a row: min_p, top_k, top_p. Ties always go to the lowest id.

Knows one row of logits; knows no history and no request. Only selection and comparison of values
stand here, which are exact on any device and with any number of threads; sums are `RowMath`'s.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foredraft.core.row_math import RowMath


def keep_min_p(row: Tensor, min_p: float, row_math: RowMath) -> Tensor:
    """`row` with `-inf` where p(x) < min_p * max p, that is where x lies below max + log(min_p)."""
    threshold = row[row_math.argmax(row)] + math.log(min_p)
    return row.masked_fill(row < threshold, -math.inf)


def keep_top(row: Tensor, top_k: int, top_p: float, row_math: RowMath) -> Tensor:
    """`row` with `-inf` outside the `top_k` largest (0: all), and of those outside the nucleus.

    The nucleus (Holtzman et al. 1904.09751) is the shortest largest-first prefix whose probability,
    after top_k, reaches `top_p`; it holds one id at least.
    """
    if 0 < top_k < row.numel():
        ids = top_ids(row, top_k)
        if top_p < 1.0:
            ids = ids[: _prefix_size(row_math.softmax(row[ids]), top_p, row_math)]
    elif top_p < 1.0:
        ids = nucleus_ids(row, top_p, row_math)
    else:
        return row
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


def nucleus_ids(row: Tensor, top_p: float, row_math: RowMath) -> Tensor:
    """The nucleus of the whole row, in the order of `top_ids`."""
    probs = row_math.softmax(row)
    # Ids below (1 - top_p) / V add up to less than 1 - top_p, so the nucleus never reaches them.
    # That saves the long sort.
    candidates = (probs >= (1.0 - top_p) / row.numel()).nonzero().squeeze(1)
    ids = candidates[_largest_first(row[candidates])]
    size = _prefix_size(probs[ids], top_p, row_math)
    if size > ids.numel():  # by rounding only
        ids = _largest_first(row)
        size = _prefix_size(probs[ids], top_p, row_math)
    return ids[:size]


def _prefix_size(probs: Tensor, top_p: float, row_math: RowMath) -> int:
    """How many of `probs` from the first on reach `top_p`; one more than all of them if they do
    not.
    """
    return int(torch.searchsorted(row_math.cumulative_sum(probs), top_p)) + 1


def _largest_first(values: Tensor) -> Tensor:
    return torch.sort(values, descending=True, stable=True).indices
