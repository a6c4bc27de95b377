"""From the places where a context was seen before to a draft, and how sure it is.

Knows counts and their estimated acceptance; knows neither requests nor where places come from.
A node's estimate is a cell of a small table: how long the context is that predicts it, and how many
of the context's places agree. The table is the drafter's, which corrects it by what was accepted.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foredraft.drafters.suffix_index import Occurrence, SuffixIndex

# A row of the table holds for contexts from this many tokens up to the next row's.
CONTEXT_LENGTHS = (1, 2, 3, 4, 5, 7, 10, 16)
NUM_AGREEMENTS = 7
NUM_CELLS = len(CONTEXT_LENGTHS) * NUM_AGREEMENTS


class DraftLimits(NamedTuple):
    """What a draft may be."""

    max_nodes: int
    max_spec_factor: float  # times the length of the match: most tokens of a path
    min_token_prob: float  # of a path, estimated
    tree: bool = False


class Proposal(NamedTuple):
    """A draft, its cells by node, and its estimated number of accepted tokens."""

    tokens: list[int]
    parents: list[int]
    cells: list[int]
    score: float
    text: int  # where the first token was found; -1: nowhere
    of_others: bool = False


NOTHING = Proposal([], [], [], 0.0, -1)


def cell(match: int, count: int, total: int) -> int:
    """Where `count` of the `total` places of a context of `match` tokens are counted."""
    if count == total:
        agreement = 0 if total == 1 else 1 if total <= 3 else 2
    else:
        agreement = 3 if 4 * count >= 3 * total else 4 if 2 * count >= total else 5
        agreement += agreement == 5 and 4 * count < total
    return (bisect_right(CONTEXT_LENGTHS, match) - 1) * NUM_AGREEMENTS + agreement


@dataclass(frozen=True, slots=True)
class _Child:
    token: int
    estimate: float
    cell: int
    match: int  # of the context that predicts it, where the draft begins


class _Reader:
    """Continuations of places; the text being drafted for goes on with the draft itself."""

    def __init__(self, index: SuffixIndex, growing: int | None) -> None:
        self.index = index
        self.growing = growing

    def following(
        self, places: Sequence[Occurrence], path: Sequence[int]
    ) -> list[tuple[Occurrence, int]]:
        """(place, its token after `path`) of the places that have one."""
        found = []
        for place in places:
            token = self.index.token(place, len(path))
            if token is None and place.text == self.growing:
                # So that a repetition goes on with its own period.
                token = path[place.position + len(path) - self.index.length(place.text)]
            if token is not None:
                found.append((place, token))
        return found


class ReferenceIndex(SuffixIndex):
    """The index with its drafts, in Python."""

    def propose(
        self,
        context: Sequence[int],
        limits: DraftLimits,
        estimates: Sequence[float],
        growing: int | None = None,
        excluded: int | None = None,
    ) -> Proposal:
        """The draft that the places of `context` give.

        `growing` is the text that `context` ends, if it is one of the index; `excluded` is a text
        not to be copied from. `estimates` is the acceptance of each cell, in (0, 1).
        """
        places = self.occurrences(context, excluded)
        grow = _tree if limits.tree else _chain
        return grow(_Reader(self, growing), places, limits, estimates)

    def draft(
        self,
        number: int,
        first: int,
        tokens: Sequence[int],
        limits: DraftLimits,
        estimates: Sequence[float],
        others: ReferenceIndex | None,
        own: int,
        other_estimates: Sequence[float],
    ) -> Proposal | None:
        """One step of a text that grows: `tokens` stand in it from position `first` on, as far as
        it goes, and what they have more is appended.

        The draft with the larger score, from the text itself or from those of `others`, but for
        `own` there. None, and no change, where a known token is another.
        """
        overlap = self.length(number) - first
        if not 0 <= overlap <= len(tokens) or first < 0:
            return None
        if self._texts[number][first:] != list(tokens[:overlap]):
            return None
        self.extend(number, tokens[overlap:])
        context = self._texts[number][-self.max_depth :]
        best = self.propose(context, limits, estimates, growing=number)
        if others is not None:
            made = others.propose(context, limits, other_estimates, excluded=own)
            if made.score > best.score:
                return made._replace(of_others=True)
        return best


def _chain(
    reader: _Reader,
    places: list[Occurrence],
    limits: DraftLimits,
    estimates: Sequence[float],
) -> Proposal:
    """At every node, of all contexts the one whose most frequent token is most likely."""
    tokens: list[int] = []
    cells: list[int] = []
    path, score, room, text = 1.0, 0.0, limits.max_nodes, -1
    while len(tokens) < room:
        following = reader.following(places, tokens)
        best = _leader(following, len(tokens), estimates)
        if best is None or path * best.estimate < limits.min_token_prob:
            break
        if not tokens:
            room = min(room, int(limits.max_spec_factor * best.match))
            if room < 1:
                break
        path *= best.estimate
        score += path
        places = [place for place, token in following if token == best.token]
        text = places[0].text if text < 0 else text
        tokens.append(best.token)
        cells.append(best.cell)
    return Proposal(tokens, list(range(-1, len(tokens) - 1)), cells, score, text)


def _leader(
    following: list[tuple[Occurrence, int]], depth: int, estimates: Sequence[float]
) -> _Child | None:
    """Each context's most frequent token (of equal ones the first seen), and of these the one with
    the best estimate (of equal ones the longest context's).
    """
    counts: dict[int, int] = {}
    leader, best = -1, None
    for number, (place, token) in enumerate(following):
        counts[token] = counts.get(token, 0) + 1
        if leader < 0 or counts[token] > counts[leader]:
            leader = token
        if number + 1 == len(following) or following[number + 1][0].match < place.match:
            where = cell(place.match + depth, counts[leader], number + 1)
            if best is None or estimates[where] > best.estimate:
                best = _Child(leader, estimates[where], where, place.match)
    return best


def _tree(
    reader: _Reader,
    places: list[Occurrence],
    limits: DraftLimits,
    estimates: Sequence[float],
) -> Proposal:
    """The `max_nodes` nodes of the largest path probability; a parent's is never smaller."""
    made = Proposal([], [], [], 0.0, -1)
    score, text = 0.0, -1
    paths: list[list[int]] = []
    # (-path probability, order of entry) -> parent, child, places of the parent, room below it.
    heap: list[tuple[float, int, int, _Child, list[Occurrence], int]] = []
    entered = 0

    def enter(parent: int, places: list[Occurrence], path: float, room: int) -> None:
        nonlocal entered
        so_far = paths[parent] if parent >= 0 else []
        following = reader.following(places, so_far)
        for child in _children(following, len(so_far), estimates):
            under = room if parent >= 0 else int(limits.max_spec_factor * child.match)
            probability = path * child.estimate
            if under > 0 and probability >= limits.min_token_prob:
                agreeing = [place for place, token in following if token == child.token]
                heapq.heappush(heap, (-probability, entered, parent, child, agreeing, under))
                entered += 1

    enter(-1, places, 1.0, limits.max_nodes)
    while heap and len(made.tokens) < limits.max_nodes:
        negative, _, parent, child, agreeing, room = heapq.heappop(heap)
        node = len(made.tokens)
        made.tokens.append(child.token)
        made.parents.append(parent)
        made.cells.append(child.cell)
        paths.append([*(paths[parent] if parent >= 0 else []), child.token])
        score -= negative
        text = agreeing[0].text if text < 0 else text
        enter(node, agreeing, -negative, room - 1)
    return made._replace(score=score, text=text)


def _children(
    following: list[tuple[Occurrence, int]], depth: int, estimates: Sequence[float]
) -> list[_Child]:
    """Every token, by the context that makes it most likely, scaled so that they add up to at most
    1; in the order in which they were first seen.
    """
    counts: dict[int, int] = {}
    best: dict[int, _Child] = {}
    for number, (place, token) in enumerate(following):
        counts[token] = counts.get(token, 0) + 1
        if number + 1 == len(following) or following[number + 1][0].match < place.match:
            for seen, count in counts.items():
                where = cell(place.match + depth, count, number + 1)
                if seen not in best or estimates[where] > best[seen].estimate:
                    best[seen] = _Child(seen, estimates[where], where, place.match)
    total = 0.0
    for child in best.values():  # one by one, as in C++: `sum` compensates since Python 3.12
        total += child.estimate
    scale = max(1.0, total)
    return [
        _Child(child.token, child.estimate / scale, child.cell, child.match)
        for child in best.values()
    ]
