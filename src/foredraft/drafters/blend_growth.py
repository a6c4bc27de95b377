"""Trees from two beliefs: a source's that cost nothing, and a model's where they pay for a pass.

Knows requests, rows of logits and laws; knows no model and no engine. A node of the tree that may
have children gets them in one of two ways: the model is asked (one pass for all such nodes of a
level), where what that promises is worth its price, and both beliefs are blended; or the source's
belief alone is taken at once. The tree is the nodes of the largest path probability, so its nodes
are deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foredraft.core import coins
from foredraft.core.row_math import RowMath
from foredraft.core.sampling import Row
from foredraft.drafters.blend import OTHERS, Blend, Blended, Gains, surest
from foredraft.drafters.interface import DraftRequest
from foredraft.drafters.ngram_blend import Law
from foredraft.drafters.tree_growth import Siblings, TreeGrowth, TreeShape

MODEL_BEST = 8  # of a model's law: its likeliest tokens, beside those that the source names
SHAPE = TreeShape(drawn=False, branching=(16,))


@dataclass(slots=True)
class Place:
    """A node whose children were asked of the model, and the law that they came from."""

    path: tuple[int, ...]
    law: Blended


class BlendGrowth(TreeGrowth):
    """A tree of one request."""

    def __init__(
        self,
        request: DraftRequest,
        start: int,
        room: int,
        max_depth: int,
        grower: BlendGrower,
    ) -> None:
        super().__init__(request, start, room, max_depth, SHAPE)
        self._grower = grower
        self.places: list[Place] = []
        self._asked = {-1}

    def path(self, node: int) -> tuple[int, ...]:
        """The tokens from the pending one down to a node."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.nodes[node].token)
            node = self.nodes[node].parent
        return tuple(reversed(tokens))

    def likeliest(self, node: int, law: Sequence[tuple[int, float]]) -> Siblings:
        """Children of a node by a law, of equal ones the first; none that are too unlikely."""
        reached = self.nodes[node].path if node >= 0 else 1.0
        wanted = (pair for pair in law if reached * pair[1] >= self._grower.least_path)
        best = sorted((pair for pair in wanted if pair[1] > 0.0), key=lambda pair: -pair[1])
        best = best[: self.room]
        return Siblings([token for token, _ in best], [min(1.0, p) for _, p in best])

    def settle(self) -> None:
        """Give children to all nodes that the source has to answer for; then the base's choice of
        what the next pass computes.
        """
        while True:
            self.kept = self._best()
            waiting = [node for node in self.kept if self._asks(node)]
            asking = self._worth_asking(waiting)
            free = [node for node in waiting if node not in asking]
            if not free:
                break
            for node in free:
                stated = self._grower.law_of(self.request)(self.path(node))
                self.add(node, self.likeliest(node, stated))
        self._compute(asking)
        self._asked |= {*asking}

    def _worth_asking(self, waiting: Sequence[int]) -> list[int]:
        """Those of the waiting nodes that the model is asked about, all or none."""
        able = [node for node in waiting if self.nodes[node].parent in self._asked]
        if not able:
            return []
        gains, law = self._grower.gains, self._grower.law_of(self.request)
        promised = sum(
            self.nodes[node].path * gains.expected(surest(law(self.path(node)))) for node in able
        )
        return able if promised >= self._grower.price else []


class BlendGrower:
    """Trees for all requests together."""

    def __init__(self, blend: Blend, gains: Gains, price: float, least_path: float) -> None:
        """`price`: of a pass of the model, in tokens; `least_path`: P(accepted) of a node."""
        self.blend, self.gains, self.price, self.least_path = blend, gains, price, least_path
        self._laws: dict[str, Law] = {}
        self.opened: list[BlendGrowth] = []

    def begin(self, laws: dict[str, Law]) -> None:
        """A new step: what the source believes, by request."""
        self._laws, self.opened = laws, []

    def law_of(self, request: DraftRequest) -> Law:
        return self._laws[request.id]

    def open(self, request: DraftRequest, start: int, room: int, max_depth: int) -> BlendGrowth:
        growth = BlendGrowth(request, start, room, max_depth, self)
        self.opened.append(growth)
        return growth

    def grow(self, growths: Sequence[BlendGrowth], logits: Tensor, row_math: RowMath) -> None:
        asked = [(growth, node) for growth in growths for node in growth.asking]
        for (growth, node), row in zip(asked, logits, strict=True):
            path = growth.path(node)
            stated = self.law_of(growth.request)(path)
            sampled = growth.row(node, row)
            model = _belief(sampled, [token for token, _ in stated], row_math)
            if model is None:
                growth.add(node, Siblings())
                continue
            law = self.blend.law(stated, model, len(path))
            growth.places.append(Place(path, law))
            self.gains.learn(stated, law)
            pairs = list(zip(law.tokens, law.probabilities, strict=True))
            if growth.request.coupled and not sampled.sampler.greedy:
                pairs = _with_noise(pairs, sampled)
            growth.add(node, growth.likeliest(node, pairs[:-1]))
        for growth in growths:
            growth.settle()


def _belief(row: Row, named: Sequence[int], row_math: RowMath) -> dict[int, float] | None:
    """The model's probabilities of the named tokens and of its likeliest; None: it allows none."""
    scores = row.adjusted()
    if not row.sampler.greedy:
        scores = scores / row.sampler.truncation.temperature
    best = row_math.top_ids(scores[None], MODEL_BEST)[0]
    largest = float(scores[best[0]])
    if not math.isfinite(largest):
        return None
    ids = list(dict.fromkeys([*best, *named]))
    powers = (scores - largest).exp_()  # cheaper than torch.logsumexp, which masks infinities
    probabilities = (powers[ids] / powers.sum()).tolist()
    return dict(zip(ids, probabilities, strict=True))


def _with_noise(pairs: Sequence[tuple[int, float]], row: Row) -> list[tuple[int, float]]:
    """How likely each is to be the target's own draw, whose noise is known (the coupled rule): the
    softmax of log P + noise, with none for all other tokens together.
    """
    sums = []
    for token, p in pairs:
        noise = 0.0
        if token != OTHERS:
            coin = coins.coin(row.seed, row.position, coins.NOISE, token)
            noise = -math.log(-math.log(coin))
        sums.append(math.log(max(p, 1e-12)) + noise)
    largest = max(sums)
    powers = [math.exp(each - largest) for each in sums]
    return [(token, power / sum(powers)) for (token, _), power in zip(pairs, powers, strict=True)]
