"""What an engine would accept of a student's drafts, from answers alone.

Knows answers and drafts; knows neither how a student is made nor an engine. A greedy engine accepts
a draft where it is the target's own token, which is the answer's; so walking through an answer
gives the engine's counts without running one. Of an answer drawn at a temperature the walk counts
how often the drafts meet the very tokens that were drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foredraft.core.counts import AcceptanceCounts
from foredraft.training.answers import Answers
from foredraft.training.batches import Batch, grouped, lengths_of, make_batch
from foredraft.training.student import Student, shifted


def replay(
    drafts: Sequence[Sequence[int]],
    tokens: Sequence[int],
    num_prompt: int,
    first_pending: int,
    stopped: bool,
) -> AcceptanceCounts:
    """The steps in which an engine would have said `tokens [T]`, prompt and answer.

    Args:
        drafts: `[T][K]`: those made while the token at a position is pending; -1: one that is
            never right.
        first_pending: how far behind the prompt's last token the first draft can be made; what
            comes before is said by plain steps.
        stopped: the answer ended by itself, so that no limit shortened the last drafts.
    """
    counts = AcceptanceCounts()
    for _ in range(first_pending):
        counts.record(0, 0, 1)
    pending, end = num_prompt - 1 + first_pending, len(tokens)
    while pending < end - 1:
        left = end - 1 - pending  # tokens of the answer that are still to come
        made, kept = drafts[pending], 0
        drafted = len(made) if stopped else min(len(made), left - 1)
        while kept < min(drafted, left) and made[kept] == tokens[pending + 1 + kept]:
            kept += 1
        emitted = min(kept + 1, left)
        counts.record(drafted, kept, emitted)
        pending += emitted
    return counts


@dataclass(frozen=True, slots=True)
class Measuring:
    """How held-out answers are read."""

    max_length: int
    batch_tokens: int
    device: torch.device
    eos_ids: tuple[int, ...]  # of the target

    def batches(self, answers: Answers) -> Iterator[Batch]:
        """All answers of which something lies within `max_length`, the shortest first."""
        lengths = lengths_of(answers, self.max_length)
        order = np.argsort(lengths, kind="stable")
        order = order[lengths[order] > 0]
        for indices in grouped(order, lengths[order], self.batch_tokens):
            yield make_batch(answers, indices.tolist(), self.max_length, self.device)


def measured(student: Student, answers: Answers, measuring: Measuring) -> AcceptanceCounts:
    """The counts over all answers."""
    counts = AcceptanceCounts()
    for batch in measuring.batches(answers):
        drafts = student.drafts(batch)[..., 0].tolist()
        tokens = batch.tokens.tolist()
        for row, end in enumerate(batch.lengths):
            answer = tokens[row][:end]
            stopped = not batch.whole[row] or answer[-1] in measuring.eos_ids
            counts.merge(
                replay(drafts[row], answer, batch.prompts[row], student.first_pending, stopped)
            )
    return counts


def accuracies(
    student: Student, answers: Answers, measuring: Measuring, ranks: int
) -> list[list[float]]:
    """`[K][ranks]`: how often the token of rank r of draft k is right, where the right tokens of
    all drafts before were among theirs: what a tree's shape is chosen by (2401.10774).
    """
    right = torch.zeros(student.num_drafts, ranks, dtype=torch.float64)
    seen = torch.zeros(student.num_drafts, 1, dtype=torch.float64)
    for batch in measuring.batches(answers):
        drafts = student.drafts(batch, ranks)
        inside = torch.zeros_like(batch.tokens)
        for row, end in enumerate(batch.lengths):
            inside[row, :end] = 1
        alive = drafts[:, :, 0, 0] >= 0
        for k in range(student.num_drafts):
            alive = alive & (shifted(inside, k + 1) > 0)
            hits = (drafts[:, :, k] == shifted(batch.tokens, k + 1)[..., None])[alive]
            right[k] += hits.sum(0).cpu()
            seen[k] += len(hits)
            alive[alive.clone()] = hits.any(-1)
    return [[float(rate) for rate in rates] for rates in right / seen.clamp(min=1)]
