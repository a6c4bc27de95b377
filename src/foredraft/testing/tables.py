"""Small random laws that depend on everything before them: what exactness is checked on.

Knows numbers; knows no rule and no model. A table is made on demand and kept, so that it is one
function of the prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from foredraft.core.coins import coins, mix

Kind = Literal["mixed", "flat", "zeros", "ties", "peaked"]
KINDS: tuple[Kind, ...] = ("mixed", "flat", "zeros", "ties", "peaked")


def random_law(
    seed: int, vocab_size: int, kind: Kind = "mixed"
) -> Callable[[tuple[int, ...]], Tensor]:
    """A law of the prefix, `[V]` float64.

    Kinds: "mixed" has likely and unlikely tokens; "flat" is near uniform; "zeros" leaves about half
        of the tokens out; "ties" has few distinct values; "peaked" gives one token all but about
        1e-9.
    """
    table: dict[tuple[int, ...], Tensor] = {}

    def law(prefix: tuple[int, ...]) -> Tensor:
        if prefix not in table:
            table[prefix] = _row(_uniforms(seed, prefix, vocab_size), kind)
        return table[prefix]

    return law


def random_logits(
    seed: int, vocab_size: int, scale: float = 2.0
) -> Callable[[tuple[int, ...]], Tensor]:
    """Logits of the prefix, `[V]` float32, roughly normal with deviation `scale`; a fifth of them
    are tied.
    """
    table: dict[tuple[int, ...], Tensor] = {}

    def logits(prefix: tuple[int, ...]) -> Tensor:
        if prefix not in table:
            row = torch.special.ndtri(_uniforms(seed, prefix, vocab_size)) * scale
            tied = _uniforms(seed + 1, prefix, vocab_size) < 0.2
            table[prefix] = torch.where(tied, row.round(), row).to(torch.float32)
        return table[prefix]

    return logits


def _uniforms(seed: int, prefix: tuple[int, ...], n: int) -> Tensor:
    for token in prefix:
        seed = mix(seed, token + 1)
    return coins(seed, len(prefix), 0, n)


def _row(uniforms: Tensor, kind: Kind) -> Tensor:
    if kind == "mixed":
        weights = uniforms**3 + 1e-3
    elif kind == "flat":
        weights = 1.0 + 0.1 * uniforms
    elif kind == "zeros":
        weights = torch.where(uniforms < 0.5, torch.zeros_like(uniforms), uniforms)
        weights[int(uniforms.argmax())] = 1.0
    elif kind == "ties":
        weights = (uniforms * 3).ceil()
    else:
        weights = uniforms * 1e-9
        weights[int(uniforms.argmax())] = 1.0
    return weights / weights.sum()
