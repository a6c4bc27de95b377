"""How sure each token is to come next: an n-gram table, the request's own text and past responses,
blended.

Knows counts and weights; knows neither files nor requests. Every source that has seen the context
(the table's contexts of 1, 2, ... tokens, the text's own of some lengths) is an expert. What it
says of a candidate, the share of its places that were followed by it and how many places there
were, is one cell of its table of weights; a candidate's score is the sum of its cells. Beside all
candidates stands the escape, "none of them", with cells by how sure each expert is of its best. The
softmax of the scores is the law:

    P(w | context) = exp(s(w)) / (exp(s(escape)) + sum over candidates v of exp(s(v)))

a log-linear interpolation (Klakow, "Log-linear interpolation of language models", ICSLP 1998) whose
weights are fitted to held-out answers by maximum likelihood, so that P is a frequency and not a
guess. Past responses are counted into the table's experts.

native/ngram_draft.cpp is the same in C++; this one is its oracle, and runs where there is none.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from foredraft.drafters.suffix_draft import ReferenceIndex

SHARES = (1e-9, 1/64, 1/32, 1/16, 1/8, 1/4, 3/8, 1/2, 5/8, 3/4, 7/8, 0.9999)  # fmt: skip
TOTALS = (1, 2, 3, 5, 9, 17, 33, 65, 257, 1025)
COUNTS = (1, 2, 3, 5, 9, 17, 33, 65)  # of a candidate in the text, wherever it stands
DISTANCES = (8, 32, 128, 512)  # tokens since it stood there last
NUM_SHARES, NUM_TOTALS, NUM_COUNTS = len(SHARES) + 1, len(TOTALS) + 1, len(COUNTS) + 1
NUM_DISTANCES = len(DISTANCES) + 2
NUM_LEADS = 6  # fifths of its places that an expert's best has
OF_SOURCE, OF_ESCAPE = NUM_SHARES * NUM_TOTALS, NUM_TOTALS * NUM_LEADS
# Candidates: those of the text, then of the table, longest contexts first, then of the past.
MAX_CANDIDATES, MAX_OWN, MAX_PAST = 32, 16, 8
MAX_ORDER = 8  # of a table
MAX_OWN_ORDER = 64
MAX_NEXT = 16  # tokens that a table keeps behind a context, at most
NO_TEXT = -1


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each expert's weights lie: the table's by rising order, the text's by rising order and
    twice as many (whether the candidate is what came after the context last), the text's tokens
    wherever they stand, then the escape's, in the same order, and one for every escape.
    """

    num_orders: int  # of the table: contexts of 1 to so many tokens
    own_orders: tuple[int, ...]  # of the text, rising

    @property
    def text_cells(self) -> int:
        return self.num_orders * OF_SOURCE

    @property
    def seen_cells(self) -> int:
        return self.text_cells + 2 * len(self.own_orders) * OF_SOURCE

    @property
    def escape_cells(self) -> int:
        return self.seen_cells + NUM_COUNTS * NUM_DISTANCES

    @property
    def num_cells(self) -> int:
        return self.escape_cells + (self.num_orders + len(self.own_orders)) * OF_ESCAPE + 1


def starting_weights(layout: Layout) -> NDArray[np.float32]:
    """Of a candidate 0.4 log of its share, more or less by how many places there were."""
    shares = np.array([0.0, *SHARES])[:, None]
    totals = np.arange(NUM_TOTALS)[None]
    source = 0.4 * np.log(shares + 0.01) + np.where(shares > 0.0, 0.05, -0.05) * totals
    weights = np.zeros(layout.num_cells, np.float32)
    experts = layout.num_orders + 2 * len(layout.own_orders)
    weights[: layout.text_cells] = np.tile(source.ravel(), layout.num_orders)
    weights[layout.text_cells : layout.seen_cells] = np.tile(
        np.repeat(source.ravel(), 2), (experts - layout.num_orders) // 2
    )
    return weights


class Next(NamedTuple):
    """What a table has behind one context."""

    total: int  # times that the context was seen
    tokens: Sequence[int]  # the most frequent first
    shares: Sequence[int]  # 255ths of the total


class Table(Protocol):
    """What is read of an n-gram table."""

    layout: Layout
    weights: NDArray[np.float32]

    def find(self, context: Sequence[int]) -> list[Next]:
        """For the endings of a context, from one token up to as many as the table knows."""


class Cells(NamedTuple):
    """Candidates, the cells whose weights make each one's score, and those of the escape."""

    tokens: list[int]
    cells: list[list[int]]
    escape: list[int]


class BlendLimits(NamedTuple):
    """What a draft may be."""

    max_nodes: int
    min_token_prob: float  # of a path
    tree: bool = False


class BlendProposal(NamedTuple):
    """A draft with the probability of each node, once its parent is right."""

    tokens: list[int]
    parents: list[int]
    confidence: list[float]


class _Place(NamedTuple):
    """Somewhere the end of a context stands, and the token after it."""

    match: int
    token: int
    position: int


@dataclass(slots=True)
class _Evidence:
    """What one expert counted of each candidate."""

    total: float
    counts: list[float]

    def add(self, tokens: Sequence[int], places: Iterable[_Place]) -> None:
        for place in places:
            self.total += 1.0
            if place.token in tokens:
                self.counts[tokens.index(place.token)] += 1.0

    def lead(self) -> int:
        return int(5.0 * max(self.counts) / self.total)


@dataclass(slots=True)
class ReferenceText:
    """One request's tokens, with what of them a draft reads."""

    max_depth: int
    max_occurrences: int
    index: ReferenceIndex = field(init=False)
    _tokens: list[int] = field(default_factory=list)
    _seen: dict[int, tuple[int, int]] = field(default_factory=dict)  # count, last position

    def __post_init__(self) -> None:
        self.index = ReferenceIndex(self.max_depth, self.max_occurrences)
        self.index.add_text()

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def num_bytes(self) -> int:
        """Memory of its places, without the integers themselves."""
        return self.index.num_bytes

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        self.index.extend(0, tokens)
        for token in tokens:
            count, _ = self._seen.get(token, (0, 0))
            self._seen[token] = count + 1, len(self._tokens)
            self._tokens.append(token)

    def tokens(self, first: int) -> list[int]:
        """The tokens from `first` on."""
        return self._tokens[first:]

    def is_consistent(self) -> bool:
        """Whether all that is kept is that of the tokens."""
        fresh = ReferenceText(self.max_depth, self.max_occurrences)
        fresh.extend(self._tokens)
        whole = self.index.text(0) == self._tokens
        return whole and fresh._seen == self._seen and self.index.is_consistent()

    def cells(self, table: Table, past: ReferenceIndex | None, own: int) -> Cells:
        """Of what may come next; `past` are texts of others, but for the text `own`."""
        return self._cells(table, self._tokens[-self.max_depth :], past, own)

    def law(
        self, table: Table, path: Sequence[int], past: ReferenceIndex | None, own: int
    ) -> list[tuple[int, float]]:
        """(token, probability) of what may follow the text and a path behind it."""
        context = [*self._tokens[-self.max_depth :], *path][-self.max_depth :]
        return _law(table.weights, self._cells(table, context, past, own))

    def draft(
        self,
        table: Table,
        first: int,
        tokens: Sequence[int],
        limits: BlendLimits,
        past: ReferenceIndex | None,
        own: int,
    ) -> BlendProposal | None:
        """One step of the text: `tokens` stand in it from position `first` on, as far as it goes,
        and what they have more is appended. None, and no change, where a known token is another.
        """
        overlap = len(self._tokens) - first
        if not 0 <= overlap <= len(tokens) or first < 0:
            return None
        if self._tokens[first:] != list(tokens[:overlap]):
            return None
        self.extend(tokens[overlap:])

        def law(path: Sequence[int]) -> list[tuple[int, float]]:
            return self.law(table, path, past, own)

        return _tree(law, limits) if limits.tree else _chain(law, limits)

    def _cells(
        self, table: Table, context: Sequence[int], past: ReferenceIndex | None, own: int
    ) -> Cells:
        said = _places(self.index, context, NO_TEXT)
        others = [] if past is None else _places(past, context, own)
        known = table.find(context)
        tokens = _candidates(said, known, others)
        found = Cells(tokens, [[] for _ in tokens], [])
        if tokens:
            _add_table(found, table.layout, known, others)
            _add_text(found, table.layout, said)
            self._add_seen(found, table.layout)
        return found

    def _add_seen(self, found: Cells, layout: Layout) -> None:
        for token, cells in zip(found.tokens, found.cells, strict=True):
            count = distance = 0
            if token in self._seen:
                times, position = self._seen[token]
                count = bisect_right(COUNTS, times)
                distance = 1 + bisect_right(DISTANCES, len(self._tokens) - position)
            cells.append(layout.seen_cells + count * NUM_DISTANCES + distance)
        found.escape.append(layout.num_cells - 1)


def _places(index: ReferenceIndex, context: Sequence[int], excluded: int) -> list[_Place]:
    """The longest matches first, of equal ones the newest."""
    found = []
    for place in index.occurrences(context, excluded):
        token = index.token(place, 0)
        if token is not None:
            found.append(_Place(place.match, token, place.position))
    return found


def _candidates(
    said: Sequence[_Place], known: Sequence[Next], others: Sequence[_Place]
) -> list[int]:
    tokens = list(dict.fromkeys(place.token for place in said))[:MAX_OWN]
    for each in reversed(known):
        fresh = dict.fromkeys(token for token in each.tokens if token not in tokens)
        tokens += list(fresh)[: MAX_CANDIDATES - len(tokens)]
    fresh = dict.fromkeys(place.token for place in others if place.token not in tokens)
    return tokens + list(fresh)[: min(MAX_PAST, MAX_CANDIDATES - len(tokens))]


def _add_table(
    found: Cells, layout: Layout, known: Sequence[Next], others: Sequence[_Place]
) -> None:
    for order in range(1, layout.num_orders + 1):
        evidence = _Evidence(0.0, [0.0] * len(found.tokens))
        if order <= len(known):
            each = known[order - 1]
            evidence.total = float(each.total)
            for token, share in zip(each.tokens, each.shares, strict=True):
                if token in found.tokens:
                    at = found.tokens.index(token)
                    evidence.counts[at] = share * evidence.total / 255.0
        evidence.add(found.tokens, (place for place in others if place.match >= order))
        if evidence.total > 0.0:
            expert = order - 1
            _add(found, evidence, expert * OF_SOURCE, layout.escape_cells + expert * OF_ESCAPE)


def _add_text(found: Cells, layout: Layout, said: Sequence[_Place]) -> None:
    for i, order in enumerate(layout.own_orders):
        matching = [place for place in said if place.match >= order]
        if matching:
            evidence = _Evidence(0.0, [0.0] * len(found.tokens))
            evidence.add(found.tokens, matching)
            newest = max(matching, key=lambda place: place.position).token
            cells = layout.text_cells + 2 * i * OF_SOURCE
            escape = layout.escape_cells + (layout.num_orders + i) * OF_ESCAPE
            _add(found, evidence, cells, escape, newest)


def _add(
    found: Cells, evidence: _Evidence, cells: int, escape: int, newest: int | None = None
) -> None:
    """One expert's cells; `newest`: what it saw last, if it ranks that."""
    total = bisect_right(TOTALS, int(evidence.total))
    for i, token in enumerate(found.tokens):
        share = bisect_right(SHARES, evidence.counts[i] / evidence.total)
        cell = share * NUM_TOTALS + total
        found.cells[i].append(cells + (cell if newest is None else 2 * cell + (token == newest)))
    found.escape.append(escape + total * NUM_LEADS + evidence.lead())


def _law(weights: NDArray[np.float32], found: Cells) -> list[tuple[int, float]]:
    """(candidate, its probability)."""
    if not found.tokens:
        return []
    scores = [_sum(weights, cells) for cells in found.cells]
    escape = _sum(weights, found.escape)
    largest = max(*scores, escape)
    total = math.exp(escape - largest)
    powers = [math.exp(score - largest) for score in scores]
    for power in powers:  # one by one, as in C++: `sum` compensates since Python 3.12
        total += power
    return [(token, power / total) for token, power in zip(found.tokens, powers, strict=True)]


def _sum(weights: NDArray[np.float32], cells: Iterable[int]) -> float:
    total = 0.0
    for cell in cells:
        total += float(weights[cell])
    return total


Law = Callable[[Sequence[int]], list[tuple[int, float]]]  # of what follows the text and a path


def _chain(law: Law, limits: BlendLimits) -> BlendProposal:
    """The likeliest token after each, of equal ones the first."""
    made = BlendProposal([], [], [])
    path = 1.0
    while len(made.tokens) < limits.max_nodes:
        token, probability = max(law(made.tokens), key=lambda child: child[1], default=(0, 0.0))
        if probability == 0.0 or path * probability < limits.min_token_prob:
            break
        path *= probability
        made.parents.append(len(made.tokens) - 1)
        made.tokens.append(token)
        made.confidence.append(probability)
    return made


def _tree(law: Law, limits: BlendLimits) -> BlendProposal:
    """The `max_nodes` nodes of the largest path probability; a parent's is never smaller."""
    made = BlendProposal([], [], [])
    paths: list[list[int]] = []
    # (-path probability, order of entry), parent, token, probability
    heap: list[tuple[float, int, int, int, float]] = []
    entered = 0

    def enter(parent: int, path: list[int], probability: float) -> None:
        nonlocal entered
        for token, child in law(path):
            if probability * child >= limits.min_token_prob:
                heapq.heappush(heap, (-probability * child, entered, parent, token, child))
                entered += 1

    if limits.max_nodes > 0:
        enter(-1, [], 1.0)
    while heap and len(made.tokens) < limits.max_nodes:
        negative, _, parent, token, probability = heapq.heappop(heap)
        node = len(made.tokens)
        made.tokens.append(token)
        made.parents.append(parent)
        made.confidence.append(probability)
        paths.append([*(paths[parent] if parent >= 0 else []), token])
        if node + 1 < limits.max_nodes:
            enter(node, paths[node], -negative)
    return made
