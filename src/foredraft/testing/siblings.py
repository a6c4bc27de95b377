"""How siblings can be drawn: the law of each, given those drawn before it.

Knows one law and the tokens drawn so far; knows no tree and no drafter. These rows are what a
drafter has to put into `Draft.probs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# The draft's law q `[V]`, the earlier siblings in draw order, how many there will be -> `[V]`.
SiblingLaw = Callable[[Tensor, Sequence[int], int], Tensor]


def with_replacement(q: Tensor, earlier: Sequence[int], count: int) -> Tensor:
    """Each sibling from q itself; tokens may repeat."""
    return q


def without_replacement(q: Tensor, earlier: Sequence[int], count: int) -> Tensor:
    """Each from q without those before it; uniform over what is left once q is exhausted."""
    return _without(q, earlier)


def top_and_one(q: Tensor, earlier: Sequence[int], count: int) -> Tensor:
    """One drawn from q without its `count - 1` most likely tokens, then those, most likely first.

    The order in which they are verified, too (Hu et al. 2502.18779); ties to the lowest id.
    """
    top = torch.sort(q, descending=True, stable=True).indices[: count - 1].tolist()
    if not earlier:
        return _without(q, top)
    row = torch.zeros_like(q)
    row[top[len(earlier) - 1]] = 1.0
    return row


SIBLING_LAWS: dict[str, SiblingLaw] = {
    "with replacement": with_replacement,
    "without replacement": without_replacement,
    "top and one": top_and_one,
}


def _without(q: Tensor, tokens: Sequence[int]) -> Tensor:
    """q normalised over the other tokens; uniform there where it has no mass."""
    rest = q.clone()
    rest[list(tokens)] = 0.0
    total = float(rest.sum())
    if total > 0.0:
        return rest / total
    rest[:] = 1.0
    rest[list(tokens)] = 0.0
    if not float(rest.sum()) > 0.0:
        raise ValueError(f"{len(tokens)} different siblings exhaust a vocabulary of {q.numel()}")
    return rest / rest.sum()
