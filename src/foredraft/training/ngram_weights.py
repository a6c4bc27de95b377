"""The weights of an n-gram table's experts, fitted to answers that the table was not made of.

Knows cells and which candidate was right; knows no file. Maximum likelihood of the law in
`drafters.ngram_blend` with an L2 penalty towards the starting weights, by Adam over shuffled
batches; the same seed gives the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.drafters import ngram_blend as blend
from foredraft.drafters.ngram_blend import Layout, Table, starting_weights
from foredraft.drafters.ngram_table_source import text_maker

MAX_CELLS = 1 + blend.MAX_CANDIDATES


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How weights are fitted."""

    epochs: int = 15
    batch_size: int = 1024
    learning_rate: float = 0.03
    penalty: float = 3e-4
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Examples:
    """Places in answers: what could have come, and what came."""

    cells: NDArray[np.int32]  # [n, candidates, experts] the escape first; `num_cells`: none
    valid: NDArray[np.bool_]  # [n, candidates]
    right: NDArray[np.int64]  # [n] among the candidates, 0: none of them


def examples(
    table: Table, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], limit: int
) -> Examples:
    """The places in (prompt, answer) pairs where something could come, `limit` at most."""
    experts = table.layout.num_orders + len(table.layout.own_orders) + 1
    cells = np.full((limit, MAX_CELLS, experts), table.layout.num_cells, np.int32)
    valid = np.zeros((limit, MAX_CELLS), bool)
    right = np.zeros(limit, np.int64)
    count = 0
    for found, token in _places(table, sequences):
        if count == limit:
            break
        for i, each in enumerate([found.escape, *found.cells]):
            cells[count, i, : len(each)] = each
        valid[count, : 1 + len(found.tokens)] = True
        right[count] = 1 + found.tokens.index(token) if token in found.tokens else 0
        count += 1
    return Examples(cells[:count], valid[:count], right[:count])


def _places(
    table: Table, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> Iterator[tuple[blend.Cells, int]]:
    make = text_maker(table)
    for prompt, answer in sequences:
        text = make()
        text.extend([*prompt, answer[0]] if len(answer) else prompt)
        for token in answer[1:]:
            found = text.cells(table, None, blend.NO_TEXT)
            if found.tokens:
                yield found, token
            text.extend([token])


def fit(layout: Layout, data: Examples, options: FitOptions) -> tuple[NDArray[np.float32], float]:
    """The weights, and the mean negative log-likelihood of the last epoch in nats."""
    start = torch.from_numpy(starting_weights(layout))
    weights = start.clone().requires_grad_()
    count = len(data.right)
    steps = options.epochs * math.ceil(count / options.batch_size)
    optimizer = torch.optim.Adam([weights], lr=options.learning_rate, betas=(0.9, 0.99))
    generator = torch.Generator().manual_seed(options.seed)
    done, loss = 0, math.nan
    for _ in range(options.epochs):
        total = 0.0
        order = torch.randperm(count, generator=generator)
        for first in range(0, count, options.batch_size):
            rows = order[first : first + options.batch_size]
            for group in optimizer.param_groups:  # falls to 0, linearly
                group["lr"] = options.learning_rate * (1.0 - done / steps)
            loss_of_rows = _loss(weights, data, rows)
            penalty = options.penalty * ((weights - start) ** 2).sum()
            optimizer.zero_grad()
            torch.autograd.backward(loss_of_rows + penalty)
            optimizer.step()
            total += float(loss_of_rows.detach()) * len(rows)
            done += 1
        loss = total / max(1, count)
    return weights.detach().numpy(), loss


def _loss(weights: Tensor, data: Examples, rows: Tensor) -> Tensor:
    at = rows.numpy()
    padded = torch.cat([weights, weights.new_zeros(1)])
    scores = padded[torch.from_numpy(data.cells[at].astype(np.int64))].sum(-1)
    scores = scores.masked_fill(~torch.from_numpy(data.valid[at]), -torch.inf)
    return torch.nn.functional.cross_entropy(scores, torch.from_numpy(data.right[at]))
