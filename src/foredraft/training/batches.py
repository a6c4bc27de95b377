"""Answers as padded batches, in an order that a seed and a step's number fix.

Knows token ids; knows neither target nor student. Shapes: B sequences, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.core.errors import ConfigError
from foredraft.training.answers import Answers, Place

_WINDOW = 16  # batches whose sequences are sorted by length together, to pad little


@dataclass(frozen=True, slots=True)
class Batch:
    """Some sequences, cut to the longest that is allowed and padded at their ends."""

    tokens: Tensor  # [B, T] int64; 0 behind a sequence's end
    prompts: tuple[int, ...]  # [B] prompt tokens
    lengths: tuple[int, ...]  # [B] prompt and answer tokens
    whole: tuple[bool, ...]  # [B] the answer's end is here
    places: tuple[Place, ...]  # [B] where the sequences are kept

    @property
    def num_answer_tokens(self) -> int:
        return sum(self.lengths) - sum(self.prompts)

    def laws(self) -> Tensor:
        """`[B, T]` bool: the positions whose next token is the answer's, which have a law to learn
        from.
        """
        positions = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        first, end = (self._column(each) for each in (self.prompts, self.lengths))
        return (positions >= first - 1) & (positions < end - 1)

    def _column(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self.tokens.device)[:, None]


def make_batch(
    answers: Answers, indices: Sequence[int], max_length: int, device: torch.device | str
) -> Batch:
    """The batch of `answers[i]` for `indices`, each cut to its first `max_length` tokens."""
    found = [answers[int(i)] for i in indices]
    rows = [each.tokens[:max_length] for each in found]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return Batch(
        torch.from_numpy(tokens).to(device),
        tuple(len(each.prompt) for each in found),
        tuple(map(len, rows)),
        tuple(len(each.tokens) <= max_length for each in found),
        tuple(answers.place(int(i)) for i in indices),
    )


class Order:
    """Which answers are in the batch of a step: every usable one once an epoch, shuffled.

    A function of the answers, the seed and the step alone, so that a run can go on from any step.
    """

    def __init__(self, answers: Answers, batch_tokens: int, max_length: int, seed: int) -> None:
        """Raises ConfigError where no answer reaches into the first `max_length` tokens."""
        self._lengths = lengths_of(answers, max_length)
        self._usable = np.flatnonzero(self._lengths)
        if not len(self._usable):
            raise ConfigError(
                f"none of {len(answers)} answers has two tokens within max_length {max_length}"
            )
        self._batch_tokens = batch_tokens
        self._seed = seed
        self._epochs: dict[int, list[NDArray[Any]]] = {}
        self.steps_per_epoch = len(self._epoch(0))

    def indices(self, step: int) -> Sequence[int]:
        """Numbers of the answers in the batch of `step`, counted from 0."""
        epoch = 0
        while step >= len(self._epoch(epoch)):
            step -= len(self._epoch(epoch))
            epoch += 1
        return [int(i) for i in self._epoch(epoch)[step]]

    def _epoch(self, epoch: int) -> list[NDArray[Any]]:
        if epoch not in self._epochs:
            random = np.random.Generator(np.random.Philox([self._seed, epoch]))
            batches = list(self._filled(random.permutation(self._usable)))
            self._epochs[epoch] = [batches[i] for i in random.permutation(len(batches))]
        return self._epochs[epoch]

    def _filled(self, shuffled: NDArray[Any]) -> Iterator[NDArray[Any]]:
        """Batches of `batch_tokens` at most, padding counted; a longer sequence is one alone."""
        mean = max(1.0, float(self._lengths[self._usable].mean()))
        window = max(1, round(_WINDOW * self._batch_tokens / mean))
        for start in range(0, len(shuffled), window):
            part = shuffled[start : start + window]
            part = part[np.argsort(self._lengths[part], kind="stable")]
            yield from grouped(part, self._lengths[part], self._batch_tokens)


def lengths_of(answers: Answers, max_length: int) -> NDArray[Any]:
    """`[n]` tokens of each answer's sequence within `max_length`; 0 for one with nothing to learn
    from: fewer than two tokens of the answer.
    """
    found = []
    for each in answers:
        length = min(len(each.prompt) + len(each.answer), max_length)
        found.append(length if length >= len(each.prompt) + 2 else 0)
    return np.array(found, np.int64)


def grouped(
    indices: NDArray[Any], lengths: NDArray[Any], batch_tokens: int
) -> Iterator[NDArray[Any]]:
    """`indices`, whose `lengths` rise, in groups that hold `batch_tokens` with their padding."""
    start = 0
    for end in range(len(indices)):
        if end > start and (end - start + 1) * lengths[end] > batch_tokens:
            yield indices[start:end]
            start = end
    if start < len(indices):
        yield indices[start:]
