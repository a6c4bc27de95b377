"""Trees from a model: level by level, one pass a level.

Knows requests, rows of logits and laws; knows no model and no engine. Two kinds:

- top_k: each node's likeliest tokens are candidates, and the tree is the `room` nodes of the
  largest path probability (EAGLE-2, 2406.16858, and OPT-Tree, 2406.17276, by levels). Its nodes are
  chosen by their values, so they are deterministic.
- sampled: siblings are drawn without replacement (Jeon et al. 2402.14160); a node's law is the
  draft's without its earlier siblings. How many a node has is settled before they are drawn.

With the target's noise (the coupled rule) both take the largest log q + noise instead, one noise
for all siblings of a position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foredraft.core import coins
from foredraft.core.acceptance import draw_from
from foredraft.core.errors import ConfigError
from foredraft.core.row_math import RowMath
from foredraft.core.sampling import Row
from foredraft.core.truncation import WHOLE, truncate
from foredraft.drafters.growth import Computed, Growth, Rows
from foredraft.drafters.interface import Draft, DraftRequest
from foredraft.grammar.guide import draft_mask, guide_of
from foredraft.kernels.interface import Segment

NO_TREE, TOP_K, SAMPLED = "none", "top_k", "sampled"
KINDS = (NO_TREE, TOP_K, SAMPLED)
DEFAULT_BRANCHING = {TOP_K: (3,), SAMPLED: (2, 1)}
MAX_BRANCHING = 16


@dataclass(frozen=True, slots=True)
class TreeShape:
    """What `draft_tree` and `draft_tree_branching` ask for."""

    drawn: bool  # siblings from their laws; False: the likeliest
    branching: tuple[int, ...]

    @classmethod
    def of(cls, kind: object, branching: Any = None, *, sampled: bool = True) -> TreeShape | None:
        """None for chains. `sampled`: the draft's sample method draws. Raises ConfigError."""
        if kind not in KINDS:
            raise ConfigError(f"draft_tree must be one of {', '.join(KINDS)}, got {kind!r}")
        if kind == NO_TREE:
            if branching is not None:
                raise ConfigError('draft_tree_branching needs "draft_tree": "top_k" or "sampled"')
            return None
        if kind == SAMPLED and not sampled:
            raise ConfigError(
                'draft_tree "sampled" needs "draft_sample_method": "probabilistic", got "greedy"'
            )
        given: Any = DEFAULT_BRANCHING[str(kind)] if branching is None else branching
        valid = (
            isinstance(given, Sequence)
            and bool(given)
            and all(type(each) is int and 1 <= each <= MAX_BRANCHING for each in given)
        )
        if not valid:
            raise ConfigError(
                f"draft_tree_branching must be a list of integers in 1..{MAX_BRANCHING}, "
                f"got {branching!r}"
            )
        return cls(kind == SAMPLED, tuple(given))

    def siblings(self, depth: int) -> int:
        """Most children of a node at `depth`, 0 for the root."""
        return self.branching[min(depth, len(self.branching) - 1)]


@dataclass(slots=True)
class _Node:
    token: int
    parent: int  # among the nodes made, -1 = the pending token
    depth: int
    confidence: float
    path: float  # product of the confidences down to it
    law: Tensor | None = None
    expanded: bool = False  # its children were asked for


@dataclass(slots=True)
class Siblings:
    """Tokens that may follow a node, in order, how likely each is, and the laws of drawn ones."""

    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)


class TreeGrowth(Growth):
    """A tree of one request; nodes that were made and not kept are candidates no more."""

    def __init__(
        self, request: DraftRequest, start: int, room: int, max_depth: int, shape: TreeShape
    ) -> None:
        super().__init__(request, start, room, max_depth)
        self.shape = shape
        self.nodes: list[_Node] = []
        self.kept: list[int] = []  # nodes of the tree, parents first
        self.asking: list[int] = [-1]  # whose children come next
        self._level: list[int] = []  # nodes that the next pass computes
        self._computed = Computed()
        self._guide = guide_of(request.matcher)

    @property
    def done(self) -> bool:
        return not self.pending and not self._level

    def rows(self) -> Rows:
        """The committed tokens; then all nodes that have children or are to, anew: a row sees
        ancestors of its own pass only.
        """
        if self.pending:
            return super().rows()
        request, level = self.request, self._level
        place = {node: i for i, node in enumerate(level)} | {-1: -1}
        parents = tuple(place[self.nodes[node].parent] for node in level)
        last = len(request.tokens) - 1
        segment = Segment(last, 1, parents, request.pages)
        tokens = [request.tokens[last], *(self.nodes[node].token for node in level)]
        drafted = [(node, self.nodes[node].parent) for node in level]
        return Rows(tokens, segment, [1 + place[node] for node in self.asking], drafted=drafted)

    def passed(self) -> None:
        if self.pending:
            super().passed()
            self._computed = Computed(min(self.start, len(self.request.tokens)))
            return
        # Nodes lie in the order of their rows: those that are a chain from the root lie in place.
        chain: list[int] = []
        for i, node in enumerate(self._level):
            if self.nodes[node].parent != (self._level[i - 1] if i else -1):
                break
            chain.append(self.nodes[node].token)
        self._computed = Computed(len(self.request.tokens), tuple(chain))
        self._level = []

    @property
    def computed(self) -> Computed:
        return self._computed

    @property
    def width(self) -> int:
        """Rows that are asked for."""
        return len(self.asking)

    def row(self, node: int, logits: Tensor) -> Row:
        """The row of logits `[V]` that the children of `node` come from."""
        path: list[int] = []
        while node >= 0:
            path.insert(0, self.nodes[node].token)
            node = self.nodes[node].parent
        request = self.request
        history = request.history.extended(path)
        position = len(request.tokens) + len(path)
        mask = draft_mask(self._guide, path, logits.device)
        return Row(request.sampler, logits, history, request.seed, position, mask)

    def wanted(self, node: int) -> int:
        """How many children `node` is to have, by what is there already."""
        depth = self.nodes[node].depth if node >= 0 else 0
        most = self.shape.siblings(depth)
        if not self.shape.drawn:
            return most
        return min(most, self.room - len(self.nodes)) if self._goes_on(node) else 0

    def add(self, node: int, siblings: Siblings) -> None:
        """Children of `node`."""
        depth = self.nodes[node].depth + 1 if node >= 0 else 1
        path = self.nodes[node].path if node >= 0 else 1.0
        if node >= 0:
            self.nodes[node].expanded = True
        laws: Sequence[Tensor | None] = siblings.laws or [None] * len(siblings.tokens)
        for token, confidence, law in zip(siblings.tokens, siblings.confidence, laws, strict=True):
            self.nodes.append(_Node(token, node, depth, confidence, path * confidence, law))

    def settle(self) -> None:
        """A level is whole: choose what is kept and whose children come next."""
        self.kept = list(range(len(self.nodes))) if self.shape.drawn else self._best()
        self._compute([node for node in self.kept if self._asks(node)])

    def _compute(self, asking: list[int]) -> None:
        """The children of `asking` come next: their rows, and those above them."""
        nodes = self.nodes
        self.asking = asking
        needed = {*self.asking}
        for node in sorted(self.asking, reverse=True):
            while node >= 0:
                needed.add(node)
                node = nodes[node].parent
        self._level = sorted(needed)  # parents were made before their children

    def _asks(self, node: int) -> bool:
        made = self.nodes[node]
        if made.expanded or made.depth >= self.max_depth:
            return False
        if self.shape.drawn:
            return len(self.nodes) < self.room and self._goes_on(node)
        # A child is no likelier than its parent: where the tree is full it has to beat the last.
        full = len(self.kept) == self.room
        return not full or made.path > self.nodes[self.kept[-1]].path

    def _best(self) -> list[int]:
        """The nodes of the largest path probability that are wanted, the likeliest first."""
        request = self.request
        ranked = sorted(range(len(self.nodes)), key=lambda node: -self.nodes[node].path)
        least = request.least_path
        kept: list[int] = []
        held = {-1}
        for node in ranked:
            made = self.nodes[node]
            if len(kept) == self.room or (
                least and made.path < least[min(len(kept), len(least) - 1)]
            ):
                break
            if made.parent in held and made.confidence >= request.confidence_threshold:
                held.add(node)
                kept.append(node)
        return kept

    def _goes_on(self, node: int) -> bool:
        """Whether a drawn node's children are wanted, by what is kept and before they are drawn."""
        request, count = self.request, len(self.nodes)
        if node >= 0 and self.nodes[node].confidence < request.confidence_threshold:
            return False
        least = request.least_path
        path = self.nodes[node].path if node >= 0 else 1.0
        return not least or path >= least[min(count, len(least) - 1)]

    def draft(self) -> Draft:
        place = {node: i for i, node in enumerate(self.kept)} | {-1: -1}
        nodes = [self.nodes[node] for node in self.kept]
        laws = [node.law for node in nodes if node.law is not None]
        return Draft(
            tuple(node.token for node in nodes),
            tuple(place[node.parent] for node in nodes),
            torch.stack(laws) if laws else None,
            [node.confidence for node in nodes],
            num_cached=self._computed.num_committed,
        )


class TreeGrower:
    """Trees for all requests together."""

    def __init__(self, shape: TreeShape, sampled: bool) -> None:
        self.shape = shape
        self.sampled = sampled

    def open(self, request: DraftRequest, start: int, room: int, max_depth: int) -> TreeGrowth:
        return TreeGrowth(request, start, room, max_depth, self.shape)

    def grow(self, growths: Sequence[TreeGrowth], logits: Tensor, row_math: RowMath) -> None:
        asked = [(growth, node) for growth in growths for node in growth.asking]
        rows = [growth.row(node, each) for (growth, node), each in zip(asked, logits, strict=True)]
        laws = _laws(rows, row_math)
        for (growth, node), row, law in zip(asked, rows, laws, strict=True):
            count = growth.wanted(node)
            if law is None or count < 1:
                growth.add(node, Siblings())
            elif growth.request.coupled and self.sampled and not row.sampler.greedy:
                growth.add(node, _noisiest(row, count, row_math))
            elif self.shape.drawn and not row.sampler.greedy:
                growth.add(node, self._drawn(growth, law, count, row_math))
            else:
                growth.add(node, _likeliest(law, count, row_math))
        for growth in growths:
            growth.settle()

    def _drawn(self, growth: TreeGrowth, law: Tensor, count: int, row_math: RowMath) -> Siblings:
        """Drawn one after the other, each from the law without those before it."""
        request, first = growth.request, len(growth.nodes)
        found = Siblings()
        for i in range(count):
            total = row_math.total(law)
            if not total > 0.0:  # all that the law allows are siblings already
                break
            law = law / total if i else law
            coin = coins.coin(request.seed, len(request.tokens), coins.DRAFT, first + i)
            token = draw_from(law, coin, row_math)
            found.tokens.append(token)
            found.confidence.append(min(1.0, float(law[token])))
            found.laws.append(law)
            law = law.clone()
            law[token] = 0.0
        return found


def _laws(rows: Sequence[Row], row_math: RowMath) -> list[Tensor | None]:
    """`[V]` float64 each, of what a request's processors leave; at temperature 0 the softmax; None
    where they leave nothing.
    """
    adjusted = [row.adjusted() for row in rows]
    cuts = [WHOLE if row.sampler.greedy else row.sampler.truncation for row in rows]
    laws, best = row_math.laws(adjusted, cuts)
    return [
        law if math.isfinite(float(logits[top]) / cut.temperature) else None
        for logits, cut, law, top in zip(adjusted, cuts, laws, best, strict=True)
    ]


def _likeliest(law: Tensor, count: int, row_math: RowMath) -> Siblings:
    tokens = [token for token in row_math.top_ids(law[None], count)[0] if float(law[token]) > 0.0]
    return Siblings(tokens, [min(1.0, float(law[token])) for token in tokens])


def _noisiest(row: Row, count: int, row_math: RowMath) -> Siblings:
    """The tokens of the largest log q + noise.

    The target's own token is the largest of log p + the same noise, so a token is as likely to be
    it as it stands out: the softmax of these sums over the siblings and one more.
    """
    scores = truncate(row.adjusted(), row.sampler.truncation).clone()
    tokens: list[int] = []
    sums: list[float] = []
    for _ in range(count + 1):
        token = row_math.draws([scores], [WHOLE], [(row.seed, row.position)])[0]
        score = float(scores[token])
        if score == -torch.inf:
            break
        noise = coins.coin(row.seed, row.position, coins.NOISE, token)
        tokens.append(token)
        sums.append(score - float(torch.log(-torch.log(torch.tensor(noise, dtype=torch.float64)))))
        scores[token] = -torch.inf
    weights = torch.softmax(torch.tensor(sums, dtype=torch.float64), dim=0).tolist()
    return Siblings(tokens[:count], weights[:count])
