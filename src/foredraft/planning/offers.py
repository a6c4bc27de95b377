"""Whether to ask a drafter that costs next to nothing, and how much of what it has to verify.

Knows what recent drafts were worth; knows no clock and no model. A draft that is there says by its
confidence what it is worth, so it is cut after it was asked for: the best nodes of all requests,
as many as pay together. Before, it is only decided whether asking promises anything at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foredraft.planning.allocation import (
    Costs,
    Objective,
    best_nodes,
    rows_that_count,
)
from foredraft.planning.confidence import Calibration, best_first
from foredraft.planning.policy import Judged, Load, Offer, RequestState, Stopping, known_type

NUM_BINS = 10
OWN_MEMORY, TYPE_MEMORY = 8.0, 48.0  # drafts; evidence older than that counts little
TYPE_WEIGHT = 4.0  # own drafts that the type's are worth
FIRST_NODES = 4  # whose rows' price decides whether to ask
BELIEF_MEMORY, BELIEF_WEIGHT = 200.0, 4.0  # nodes of a depth
ASK_RATE = 0.1  # of a step's news about what asking costs
# Drafting one token / a pass of the target over one row: what costs more is not asked on the off
# chance.
CHEAP = 0.03


class _Worth:
    """What recent drafts were worth: fading counts of nodes by survival, and of drafts."""

    __slots__ = ("_keep", "drafts", "nodes")

    def __init__(self, memory: float) -> None:
        self._keep = 1.0 - 1.0 / memory
        self.drafts = 0.0
        self.nodes = [0.0] * NUM_BINS

    def add(self, bins: Sequence[int]) -> None:
        """A draft's nodes, by `_bins`."""
        keep = self._keep
        self.drafts = self.drafts * keep + 1.0
        self.nodes = nodes = [each * keep for each in self.nodes]
        for bin_ in bins:
            nodes[bin_] += 1.0

    def surplus(self, price: float) -> float:
        """What all nodes bring above a price, as far as they do."""
        total = 0.0
        for bin_ in range(int(price * NUM_BINS), NUM_BINS):
            total += self.nodes[bin_] * max(0.0, (bin_ + 0.5) / NUM_BINS - price)
        return total


class Offers:
    """What the drafts of one drafter are worth, and the choice among their nodes."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._calibration = Calibration()
        self._own: dict[str, _Worth] = {}
        self._types: dict[str, _Worth] = {}
        self._ask_seconds = 0.0  # of one request
        self._stated: list[tuple[float, float]] = []  # by depth: fading sums, stated and measured
        self.tell = False  # drafts state a confidence, and may be cut by it

    def add(self, judged: Judged, *, dear: bool = False) -> None:
        """Learn from one request's draft, and from one that was empty; of a `dear` drafter also
        what its beliefs are worth, by which it is told when to stop.
        """
        offer = judged.offer
        if offer is None:
            return
        if offer.parents:
            self.tell = offer.may_cut and offer.confidence is not None
        survival = self._calibration.survival(judged.id, judged.request_type, offer)
        if dear:
            self._note_beliefs(offer, survival)
        kind, bins = known_type(self._types, judged.request_type), _bins(survival)
        _of(self._types, kind, TYPE_MEMORY).add(bins)
        if not judged.ended:
            _of(self._own, judged.id, OWN_MEMORY).add(bins)
        if judged.tried:
            self._calibration.add(judged.id, judged.request_type, judged.tried)

    def add_seconds(self, seconds: float, num_asked: int) -> None:
        """Learn what asking took."""
        if num_asked:
            self._ask_seconds += ASK_RATE * (seconds / num_asked - self._ask_seconds)

    def release(self, request_id: str) -> None:
        """Forget a request; its type remembers."""
        self._own.pop(request_id, None)
        self._calibration.release(request_id)

    def asks(
        self,
        load: Load,
        requests: Sequence[RequestState],
        caps: Sequence[int],
        costs: Costs,
        weight: Callable[[str], float],
    ) -> list[int]:
        """All that a request has use for where recent drafts promise more than asking costs, else
        0. `weight`: what a token of a request is worth, 1 on average.
        """
        of_second = self._price_of_second(load, costs)
        asking = self._ask_seconds * of_second
        curve, rows = costs.curve, rows_that_count(load, self._objective)
        first = curve.of_rows(rows + FIRST_NODES) - curve.of_rows(rows)
        price = of_second * first / FIRST_NODES
        of_types: dict[tuple[str, float], float] = {}
        widths = []
        for request, cap in zip(requests, caps, strict=True):
            worth = weight(request.id)  # in its own tokens, all costs 1 / worth of it
            key = request.request_type, worth
            if key not in of_types:
                of_types[key] = self._surplus(request.request_type, price / worth)
            surplus, own = TYPE_WEIGHT * of_types[key], self._own.get(request.id)
            drafts = TYPE_WEIGHT
            if own is not None:
                surplus, drafts = surplus + own.surplus(price / worth), drafts + own.drafts
            widths.append(cap if surplus > asking / worth * drafts else 0)
        return widths

    def _surplus(self, request_type: str, price: float) -> float:
        """Of a draft of a request of this type; infinite before anything is known, so that the
        first drafts are asked for.
        """
        worth = self._types.get(known_type(self._types, request_type))
        return float("inf") if worth is None else worth.surplus(price) / worth.drafts

    def prices(self, load: Load, count: int, costs: Costs) -> list[float]:
        """`[count]` the least P(accepted) at which node i of a draft is worth its row, by what the
        step would do without drafts.
        """
        price, curve = self._price_of_second(load, costs), costs.curve
        rows = rows_that_count(load, self._objective)
        mean_positions = load.num_positions / load.num_requests if load.num_requests else 0.0
        reading = curve.row_position_seconds * mean_positions
        passes = curve.of_each(rows, count + 1)
        return [price * (passes[i + 1] - passes[i] + reading) for i in range(count)]

    def stopping(self, load: Load, count: int, costs: Costs) -> Stopping:
        """Draft one token more only while its gain pays for its drafting and its row, in seconds
        that are worth what they bring now (the hazard-cost rule, algorithms.md 3c).

        The gain is what the drafter believes, corrected by how its beliefs fared at that depth.
        """
        drafting = self._price_of_second(load, costs) * costs.draft_ratio * costs.curve.of_rows(1)
        prices = self.prices(load, count, costs)
        return Stopping(
            least_path=[
                min(1.0, (price + drafting) * self._believed(i)) for i, price in enumerate(prices)
            ]
        )

    def _believed(self, depth: int) -> float:
        """What drafters believe of paths so deep / what became of them."""
        if depth >= len(self._stated):
            return self._believed(depth - 1) if self._stated else 1.0
        stated, true = self._stated[depth]
        return (stated + BELIEF_WEIGHT) / (true + BELIEF_WEIGHT)

    def _note_beliefs(self, offer: Offer, survival: Sequence[float]) -> None:
        if offer.confidence is None:
            return
        paths: list[float] = []
        depths: list[int] = []
        for node, parent in enumerate(offer.parents):
            paths.append(offer.confidence[node] * (paths[parent] if parent >= 0 else 1.0))
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
            if depths[node] == len(self._stated):
                self._stated.append((0.0, 0.0))
            stated, true = self._stated[depths[node]]
            keep = 1.0 - 1.0 / BELIEF_MEMORY
            self._stated[depths[node]] = stated * keep + paths[node], true * keep + survival[node]

    def _price_of_second(self, load: Load, costs: Costs) -> float:
        """Tokens that a second is worth in a plain step."""
        rows = rows_that_count(load, self._objective)
        beside = costs.curve.beside_rows(load.num_requests, load.num_positions)
        seconds = costs.curve.of_rows(rows) + beside
        return rows / seconds if seconds else 0.0

    def keep(
        self,
        load: Load,
        offers: Sequence[Offer],
        costs: Costs,
        weight: Callable[[str], float],
    ) -> list[list[int]]:
        """Of each draft the nodes that pay, in rising order; whole drafts where they may not be
        cut. `weight`: what a token of a request is worth, 1 on average.
        """
        kept = [[] if offer.may_cut else list(range(len(offer.parents))) for offer in offers]
        fixed = sum(map(len, kept))
        open_ones = [i for i, offer in enumerate(offers) if offer.may_cut and offer.parents]
        if not open_ones:
            return kept
        orders: list[list[int]] = []
        gains: list[list[float]] = []
        for index in open_ones:
            offer = offers[index]
            survival = self._calibration.survival(offer.id, offer.request_type, offer)
            orders.append(best_first(survival))
            worth = weight(offer.id)
            gains.append([worth * survival[node] for node in orders[-1]])
        crowd = Load(load.num_requests, load.num_rows + fixed, load.num_positions)
        positions = [offers[index].num_positions for index in open_ones]
        widths = best_nodes(crowd, gains, positions, costs.curve, self._objective)
        for index, order, width in zip(open_ones, orders, widths, strict=True):
            kept[index] = sorted(order[:width])
        return kept

    def widen(self, offers: Sequence[Offer], kept: list[list[int]], index: int, least: int) -> None:
        """Keep at least so many nodes of one draft."""
        offer = offers[index]
        survival = self._calibration.survival(offer.id, offer.request_type, offer)
        kept[index] = sorted(best_first(survival)[: max(least, len(kept[index]))])


def _bins(survival: Sequence[float]) -> list[int]:
    last = NUM_BINS - 1
    return [int(alive * NUM_BINS) if alive < 1.0 else last for alive in survival]


def _of(worths: dict[str, _Worth], key: str, memory: float) -> _Worth:
    found = worths.get(key)
    if found is None:
        found = worths[key] = _Worth(memory)
    return found
