"""Tables drawn by hypothesis: laws of the prefix with zeros, ties, peaks and disjoint supports.

`make test` draws few tables for each test, `make soak` `SOAK_CASES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

Law = Callable[[tuple[int, ...]], Tensor]
SOAK_CASES = 2_000

# Weights before normalisation: zeros and ties are frequent; the large and the tiny ones make peaks
# of all but 1e-6 .. 1e-300, and masses that vanish when they are added to others.
WEIGHTS = (0.0, 0.0, 1.0, 1.0, 2.0, 3.0, 0.37, 1e-6, 1e-12, 1e-17, 1e-300, 1e6, 1e12)


def cases(few: int) -> settings:
    """Settings of a test over drawn tables: `few` in `make test`, `SOAK_CASES` in `make soak`."""
    soak = settings.get_current_profile_name() == "soak"
    return settings(max_examples=SOAK_CASES if soak else few, deadline=None)


@st.composite
def laws(draw: st.DrawFn, vocab_size: int, depth: int, allowed: Sequence[int] | None = None) -> Law:
    """A law that depends on every token before it, for prefixes of up to `depth` tokens.

    Only ids of `allowed` have any mass, where it is given.
    """
    ids = list(range(vocab_size) if allowed is None else allowed)
    prefixes = [
        prefix
        for length in range(depth + 1)
        for prefix in product(range(vocab_size), repeat=length)
    ]
    size = len(prefixes) * len(ids)
    values = draw(st.lists(st.sampled_from(WEIGHTS), min_size=size, max_size=size))
    rows: dict[tuple[int, ...], Tensor] = {}
    for index, prefix in enumerate(prefixes):
        weights = torch.zeros(vocab_size, dtype=torch.float64)
        drawn = values[index * len(ids) : (index + 1) * len(ids)]
        # A row of zeros would be no law: its first id gets all.
        weights[ids] = torch.tensor(drawn if any(drawn) else [1.0, *drawn[1:]], dtype=torch.float64)
        rows[prefix] = weights / weights.sum()
    return rows.__getitem__


@st.composite
def pairs(draw: st.DrawFn, vocab_size: int, depth: int) -> tuple[Law, Law]:
    """A target for `depth + 1` tokens and a draft law for `depth`; now and then equal, or with
    disjoint supports.
    """
    kind = draw(st.sampled_from(["free", "free", "free", "free", "equal", "disjoint"]))
    if kind == "disjoint":
        split = draw(st.integers(1, vocab_size - 1))
        target = draw(laws(vocab_size, depth, range(split)))
        return target, draw(laws(vocab_size, depth - 1, range(split, vocab_size)))
    target = draw(laws(vocab_size, depth))
    return target, target if kind == "equal" else draw(laws(vocab_size, depth - 1))
