"""From answers to the contexts of an n-gram table: counting, and leaving out what says nothing new.

Knows token ids as arrays; knows neither files nor weights. All orders come from one sort of the
answers' windows, read backwards, so that a context's endings are its ancestors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foredraft.drafters.ngram_table_file import Level, token_type, total_code

NO_TOKEN = -1  # before the beginning of a sequence
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Contexts:
    """All contexts of one length, in the order of their trie."""

    tokens: Ints  # [n] the earliest one of each context
    parents: Ints  # [n] among the contexts that are shorter by one, rising
    totals: Ints  # [n] how often each was seen
    starts: Ints  # [n + 1] where what follows it begins in the next two
    next_tokens: Ints  # [m] the most frequent first
    next_counts: Ints  # [m]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def best(self) -> Ints:
        """[n] the most frequent token behind each."""
        return self.next_tokens[self.starts[:-1]]


def windows(sequences: Iterable[tuple[Sequence[int], Sequence[int]]], order: int) -> Ints:
    """`[answer tokens, 1 + order]` of (prompt, answer) pairs: each token of the answers, the one
    before it, the one before that, ...; NO_TOKEN before the beginning.
    """
    rows = [np.empty((0, 1 + order), np.int64)]
    for prompt, answer in sequences:
        before = np.asarray(prompt, np.int64)[-order:]
        padding = np.full(order - len(before), NO_TOKEN, np.int64)
        line = np.concatenate([padding, before, np.asarray(answer, np.int64)])
        shifted = [line[order - n : len(line) - n] for n in range(order + 1)]
        rows.append(np.stack(shifted, axis=1))
    return np.concatenate(rows)


def count(rows: Ints, order: int, max_next: int) -> list[Contexts]:
    """The contexts of 1 to `order` tokens in the `windows`, with their `max_next` most frequent
    followers.
    """
    rows = rows[np.lexsort(rows.T[[0, *range(order, 0, -1)]])]
    levels: list[Contexts] = []
    nodes = np.zeros(len(rows), np.int64)  # of each row, its context of the length before
    for n in range(1, order + 1):
        known = rows[:, n] != NO_TOKEN
        rows, nodes = rows[known], nodes[known]
        begins = _changes(nodes) | _changes(rows[:, n])
        numbers = np.cumsum(begins) - 1
        parents, tokens = nodes[begins], rows[begins, n]
        totals = np.bincount(numbers, minlength=len(tokens))
        levels.append(Contexts(tokens, parents, totals, *_following(numbers, rows[:, 0], max_next)))
        nodes = numbers
    return levels


def _changes(values: Ints) -> NDArray[np.bool_]:
    """Where a value is another than the one before it; the first is."""
    return np.concatenate([[True], values[1:] != values[:-1]])[: len(values)]


def _following(numbers: Ints, tokens: Ints, most: int) -> tuple[Ints, Ints, Ints]:
    """Of each context: where its followers begin, the followers, and their counts."""
    order = np.lexsort([tokens, numbers])
    numbers, tokens = numbers[order], tokens[order]
    first = np.flatnonzero(_changes(numbers) | _changes(tokens))
    counts = np.diff([*first, len(tokens)]).astype(np.int64)
    numbers, tokens = numbers[first], tokens[first]
    order = np.lexsort([tokens, -counts, numbers])  # numbers stay in their order
    tokens, counts = tokens[order], counts[order]
    begins = np.flatnonzero(_changes(numbers))
    rank = np.arange(len(numbers)) - np.repeat(begins, np.diff([*begins, len(numbers)]))
    kept = rank < most
    sizes = np.bincount(numbers[kept], minlength=0 if not len(numbers) else int(numbers[-1]) + 1)
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return starts, tokens[kept], counts[kept]


def pruned(levels: Sequence[Contexts], wanted: Sequence[NDArray[np.bool_]]) -> list[Contexts]:
    """The contexts that are wanted, and the endings of those."""
    kept = [each.copy() for each in wanted]
    for n in range(len(levels) - 1, 0, -1):
        kept[n - 1][levels[n].parents[kept[n]]] = True
    found = []
    above = np.zeros(1, np.int64)  # new numbers of the contexts that are shorter by one
    for level, keep in zip(levels, kept, strict=True):
        sizes = np.diff(level.starts)
        following = np.repeat(keep, sizes)
        starts = np.concatenate([[0], np.cumsum(sizes[keep])]).astype(np.int64)
        found.append(
            Contexts(
                level.tokens[keep],
                above[level.parents[keep]],
                level.totals[keep],
                starts,
                level.next_tokens[following],
                level.next_counts[following],
            )
        )
        above = np.cumsum(keep) - 1
    return found


def informative(levels: Sequence[Contexts], least_counts: Sequence[int]) -> list[NDArray[np.bool_]]:
    """Which contexts are wanted: of each order those seen at least so often, and those seen less
    whose likeliest token is another than that of the context without their first token.
    """
    wanted = [np.ones(len(levels[0]), bool)]
    for n in range(1, len(levels)):
        level = levels[n]
        news = level.best != levels[n - 1].best[level.parents]
        wanted.append((level.totals >= least_counts[n]) | news)
    return wanted


def packed(levels: Sequence[Contexts], vocab_size: int) -> list[Level]:
    """The arrays of a table's file."""
    ids = token_type(vocab_size)
    found = []
    for n, level in enumerate(levels):
        sizes = np.diff(level.starts)
        shares = 255 * level.next_counts // np.repeat(level.totals, sizes)
        children = None
        if n + 1 < len(levels):
            per_node = np.bincount(levels[n + 1].parents, minlength=len(level))
            children = np.concatenate([[0], np.cumsum(per_node)]).astype("<u4")
        found.append(
            Level(
                level.tokens.astype(ids),
                np.array([total_code(int(total)) for total in level.totals], np.uint8),
                level.starts.astype("<u4"),
                level.next_tokens.astype(ids),
                np.maximum(1, shares).astype(np.uint8),
                children,
            )
        )
    return found
