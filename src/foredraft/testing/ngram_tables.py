"""Small n-gram tables from sequences, written plainly; what training makes is compared with them.

Knows counting by dictionaries and the file's arrays; knows no training.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foredraft.drafters.ngram_blend import Layout, starting_weights
from foredraft.drafters.ngram_table_file import (
    Header,
    Level,
    NgramTableFile,
    token_type,
    total_code,
    write_table,
)

Contexts = dict[tuple[int, ...], Counter[int]]  # what followed each; the latest token first


def counted(sequences: Sequence[Sequence[int]], order: int) -> list[Contexts]:
    """What followed each context of 1 to `order` tokens."""
    levels: list[Contexts] = [{} for _ in range(order)]
    for tokens in sequences:
        for end in range(1, len(tokens)):
            for n in range(1, min(order, end) + 1):
                context = tuple(reversed(tokens[end - n : end]))
                levels[n - 1].setdefault(context, Counter())[tokens[end]] += 1
    return levels


def levels_of(
    sequences: Sequence[Sequence[int]], order: int, vocab_size: int, most: int = 4
) -> list[Level]:
    """The arrays of a table that has all contexts, with `most` tokens behind each."""
    ids = token_type(vocab_size)
    counts = counted(sequences, order)
    levels = []
    for n, contexts in enumerate(counts):
        ordered = sorted(contexts)
        following = [
            sorted(contexts[context].items(), key=lambda each: (-each[1], each[0]))[:most]
            for context in ordered
        ]
        children = None
        if n + 1 < order:
            longer = Counter(context[:-1] for context in counts[n + 1])
            children = _starts([longer[context] for context in ordered])
        totals = [contexts[context].total() for context in ordered]
        levels.append(
            Level(
                np.array([context[-1] for context in ordered], ids),
                np.array([total_code(total) for total in totals], np.uint8),
                _starts([len(each) for each in following]),
                np.array([token for each in following for token, _ in each], ids),
                np.array(
                    [
                        max(1, 255 * times // total)
                        for each, total in zip(following, totals, strict=True)
                        for _, times in each
                    ],
                    np.uint8,
                ),
                children,
            )
        )
    return levels


def small_table(
    path: Path,
    sequences: Sequence[Sequence[int]],
    vocab_size: int,
    order: int = 3,
    own_orders: tuple[int, ...] = (1, 2, 4),
    seed: int = 0,
    plain: bool = False,
) -> NgramTableFile:
    """A table written to `path`, with random weights, or those that fitting begins at."""
    layout = Layout(order, own_orders)
    draws = random.Random(seed)
    weights = np.array([draws.gauss(0.0, 1.0) for _ in range(layout.num_cells)], np.float32)
    if plain:
        weights = starting_weights(layout)
    header = Header(vocab_size, "small", "", own_orders, (), "", {})
    write_table(path, header, weights, levels_of(sequences, order, vocab_size))
    return NgramTableFile.open(path)


def _starts(sizes: Sequence[int]) -> NDArray[np.uint32]:
    return np.concatenate([[0], np.cumsum(sizes)]).astype("<u4")
