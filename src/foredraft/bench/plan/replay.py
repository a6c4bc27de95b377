"""A text that was drafted for with wide drafts, played again with narrower ones.

Knows steps and nodes; knows no cost. Speculation changes no text, so that the steps of a narrower
draft can be read from those of the wide one: it is the first nodes of the wide one, and a step that
begins inside an accepted path finds the rest of that path again. Rates by position alone would
mislead: wide drafts take a long copy in few steps, and what is left are the steps that find little.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from foredraft.bench.plan.trace import DraftedStep, Text
from foredraft.core.counts import AcceptanceCounts


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A step as it would have been."""

    position: int
    drafted: int  # nodes
    accepted: int
    num_own_rows: int = 0

    @property
    def rows(self) -> int:
        return 1 + self.drafted + self.num_own_rows


def replay(text: Text, width: int) -> list[ReplayedStep]:
    """The steps of one request with at most `width` draft nodes each; 0 is plain decoding."""
    ends = list(accumulate(step.emitted for step in text))
    total = ends[-1] if ends else 0
    steps: list[ReplayedStep] = []
    at = 0  # tokens emitted so far
    while at < total:
        index = bisect_right(ends, at)
        step = text[index]
        inside = at - (ends[index] - step.emitted)
        accepted = min(_accepted(text, index, inside, width), total - at - 1)
        # A draft that is found again is as large as the one it was first found in.
        drafted = min(width, len(step.parents))
        own = step.num_own_rows if width else 0
        steps.append(ReplayedStep(step.position + inside, drafted, accepted, own))
        at += accepted + 1
    return steps


def _accepted(text: Text, index: int, inside: int, width: int) -> int:
    """Accepted nodes of a draft of `width` that begins `inside` tokens after a step's begin."""
    step = text[index]
    path, size, ended = _rest(step, inside)
    accepted = sum(rank < width for rank in path)
    # A path that was accepted to its end may go on: it does where the next step found one too. But
    # a whole draft that the drafter ended by itself ends there.
    open_ended = step.full or inside > 0
    while open_ended and ended and accepted == len(path) and index + 1 < len(text) and size < width:
        index += 1
        following, more, ended = _rest(text[index], 0)
        open_ended = text[index].full
        if not following:
            break
        path += [size, *(size + 1 + rank for rank in following)]
        accepted = sum(rank < width for rank in path)
        size += 1 + more
    return accepted


def _rest(step: DraftedStep, inside: int) -> tuple[list[int], int, bool]:
    """Of a step from its `inside`-th token on: the accepted path by the nodes' ranks below it, how
    many nodes are there, and whether the path ends where the draft does.
    """
    if inside > len(step.accepted):
        return [], 0, False
    root = step.accepted[inside - 1] if inside else -1
    below = {root: -1}
    for node, parent in enumerate(step.parents):
        if parent in below:
            below[node] = len(below) - 1
    path = [below[node] for node in step.accepted[inside:]]
    last = step.accepted[-1] if step.accepted else None
    return path, len(below) - 1, last is not None and last not in step.parents


def counts_of(texts: Sequence[Text]) -> AcceptanceCounts:
    """Acceptance as it was measured."""
    counts = AcceptanceCounts()
    for step in (step for text in texts for step in text):
        depth = _depth(step.parents)
        counts.record(len(step.parents), len(step.accepted), step.emitted, depth=depth)
    return counts


def length_shares(texts: Sequence[Text]) -> list[float]:
    """P(a step drafts so many nodes), from 0 on."""
    lengths = [len(step.parents) for text in texts for step in text]
    return [lengths.count(n) / len(lengths) for n in range(max(lengths, default=-1) + 1)]


def rank_acceptance(texts: Sequence[Text]) -> list[float]:
    """P(the b-th sibling is the accepted one | siblings so many were drafted), b from 0 on, over
    all nodes of accepted paths that have children.
    """
    offered: list[int] = []
    taken: list[int] = []
    for step in (step for text in texts for step in text):
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(step.parents):
            children.setdefault(parent, []).append(node)
        for parent in (-1, *step.accepted):
            for rank, child in enumerate(children.get(parent, ())):
                if rank == len(offered):
                    offered.append(0)
                    taken.append(0)
                offered[rank] += 1
                taken[rank] += child in step.accepted
    return [hit / shown for hit, shown in zip(taken, offered, strict=True)]


def _depth(parents: Sequence[int]) -> int:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return max(depths, default=0)
