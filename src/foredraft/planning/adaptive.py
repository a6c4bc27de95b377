"""The online choice: each step the widths that promise most tokens a second, 0 included.

Knows promises and costs, and learns both from the steps it is told of; knows no torch, no model
and no clock. Drafting begins only where it promises `MARGIN` more than plain decoding does, and
ends where it promises less: near the break-even nothing flutters. What is not drafted can't be
learnt: now and then one request gets a token or two more than pays (a probe), from a credit that
grows by `PROBE_SHARE` of the time and pays for what the probe took; and a step now and then is
plain.

Drafts that cost next to nothing and say what they are worth are asked for where they promise
anything at all, and cut when they are there (`Offers`); for all others the width is settled by
what is usual for the request.
"""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.planning.allocation import (
    Allocation,
    Costs,
    Objective,
    Prospect,
    allocate,
    score,
)
from foredraft.planning.cost import CostCurve
from foredraft.planning.cost_tracking import CostTracker
from foredraft.planning.estimates import Estimates
from foredraft.planning.offers import CHEAP, Offers
from foredraft.planning.policy import (
    NEVER,
    Judged,
    Load,
    Offer,
    RequestState,
    StepRecord,
    Stopping,
)
from foredraft.planning.readers import Readers

MARGIN = 0.02
# Of the time at most; of a drafter that pays for each token, of the time that decoding takes.
PROBE_SHARE, DEAR_SHARE = 0.01, 0.005
PROBE_EVERY = 32  # steps; one that was accepted is followed by another at once
PROBE_WIDTH = 2  # 1 where each token is paid for: the first is what tells most
LARGEST_CREDIT = 8  # probes
FIRST_PLAIN, PLAIN_EVERY = 16, 256  # steps from one plain step to the next at most; doubles
# Plain steps of one kind that follow one another: every so many is looked at, choice and seconds.
# What a choice takes comes off every step.
LOOK_EVERY = 16
# Of other steps every so many teaches what steps cost, once costs have been seen for a while, and
# every plain one that was due.
LEARN_EVERY, UNSETTLED = 4, 512
DRAFT_RATE = 0.1  # of a step's news about the drafter's own cost


class AdaptivePolicy:
    """Widths by measured costs and measured acceptance."""

    def __init__(
        self,
        max_width: int,
        curve: CostCurve,
        draft_ratio: float = 0.0,
        objective: Objective = Objective.THROUGHPUT,
        *,
        catches_up: bool = True,
    ) -> None:
        """`draft_ratio`: a first guess at drafting one token / a pass of the target over one row,
        corrected by what steps take; so is `curve`. `catches_up`: a draft after a step without one
        costs more than drafting.
        """
        self._catches_up = catches_up
        self.max_width = max_width
        self.costs = Costs(curve, draft_ratio)
        self._tracker = CostTracker(curve)
        self.objective = objective
        self._readers = Readers() if objective is Objective.LATENCY else None
        self._estimates = Estimates()
        self._offers = Offers(objective)
        self._drafts = False  # the last step drafted, probes apart
        self._credit = 0.0  # seconds that probes may take
        self._since_probe = 0  # steps
        self._since_plain = 0  # steps
        self._plain_every = FIRST_PLAIN
        self._num_steps = 0
        # The drafter wants rows of its own: what narrower drafts bring can't be told from what
        # wide ones did.
        self._all_or_none = False
        self._kind = (0, 0, 0)  # requests, rows before drafts, rows of the last step
        self._alike = 0  # steps of that kind, one after another
        self._last_draft: dict[str, int] = {}  # step of each request's last draft
        self._last_tried: dict[str, int] = {}  # ... of which something was verified

    def widths(self, load: Load, requests: Sequence[RequestState]) -> Sequence[int]:
        """The best widths for `requests`, and now and then a probe."""
        caps = [max(0, min(self.max_width, request.max_width)) for request in requests]
        plain_is_due = self._since_plain >= self._plain_every
        if plain_is_due or self._as_before(load):
            widths = [0] * len(requests)
        elif self._offers.tell and not self._is_dear:
            widths = self._offers.asks(load, requests, caps, self.costs, self._weight)
        else:
            widths = self._usual_widths(load, requests, caps)
        if self._probes(load):
            self._add_probe(requests, caps, widths)
        return widths

    def _as_before(self, load: Load) -> bool:
        """Whether a step like this one was found not worth drafting for a moment ago."""
        plain = (load.num_requests, load.num_rows, load.num_rows)
        return plain == self._kind and not self._drafts and self._alike % LOOK_EVERY != 0

    def _usual_widths(
        self, load: Load, requests: Sequence[RequestState], caps: Sequence[int]
    ) -> list[int]:
        """The best by what is known of requests before there is a draft."""
        prospects = [
            Prospect(
                self._estimates.outlook(request.id, request.request_type, cap),
                request.num_positions,
                self._weight(request.id),
            )
            for request, cap in zip(requests, caps, strict=True)
        ]
        best, plain = allocate(load, prospects, self.costs, self.objective)
        if self._all_or_none:
            value = score(caps, load, prospects, self.costs, self.objective)
            best = Allocation(list(caps), value)
        pays = best.score >= plain.score * (1.0 if self._drafts else 1.0 + MARGIN)
        return best.widths if pays else plain.widths

    def stopping(self, load: Load) -> Stopping:
        """The rule of what pays, for a drafter whose tokens cost something; a probe of one that is
        set aside is to tell what it is worth, whatever it believes.
        """
        if not self._is_dear:
            return NEVER
        if not self._drafts and self._probes(load):
            return Stopping(least_path=[0.0] * self.max_width)
        return self._offers.stopping(load, self.max_width, self.costs)

    def keep(self, load: Load, offers: Sequence[Offer]) -> Sequence[Sequence[int]]:
        """The nodes that pay, and now and then a probe."""
        kept = self._offers.keep(load, offers, self.costs, self._weight)
        cut = [
            (self._last_tried.get(offer.id, 0), index)
            for index, offer in enumerate(offers)
            if len(kept[index]) < min(PROBE_WIDTH, len(offer.parents))
        ]
        if cut and self._probes(load):
            self._offers.widen(offers, kept, min(cut)[1], PROBE_WIDTH)
        return kept

    def _weight(self, request_id: str) -> float:
        """Of a request's token."""
        return 1.0 if self._readers is None else self._readers.weight(request_id)

    def _probes(self, load: Load) -> bool:
        if self._since_probe < PROBE_EVERY or self._credit <= 0.0:
            return False
        return self._credit >= self._probe_seconds(load)

    def _probe_seconds(self, load: Load) -> float:
        """What a probe adds to a step."""
        curve, rows, width = self.costs.curve, load.num_rows, self._probe_width
        drafting = width * self.costs.draft_ratio * curve.of_rows(1)
        return curve.of_rows(rows + width) - curve.of_rows(rows) + drafting

    @property
    def _probe_width(self) -> int:
        if self._all_or_none:
            return self.max_width
        return 1 if self._is_dear else PROBE_WIDTH

    @property
    def _is_dear(self) -> bool:
        """Whether drafting a token costs too much to ask on the off chance."""
        return self.costs.draft_ratio >= CHEAP

    def _add_probe(
        self, requests: Sequence[RequestState], caps: Sequence[int], widths: list[int]
    ) -> None:
        """Widen the draft of the request that has waited longest for one."""
        open_ones = [
            (self._last_draft.get(request.id, 0), index)
            for index, request in enumerate(requests)
            if widths[index] < caps[index] and request.counts.num_emitted_tokens
        ]
        if open_ones:
            index = min(open_ones)[1]
            widths[index] = min(caps[index], max(widths[index] + 1, self._probe_width))

    def explain(self, record: StepRecord) -> str:
        """By what drafts promise it "pays" or "loses"; a "probe" is to learn acceptance, a "sample"
        (a plain step now and then) to learn costs.
        """
        asked = [judged.asked for judged in record.requests if judged.asked]
        if not asked:
            due = self._since_plain >= self._plain_every
            return "sample" if self._drafts and due else "loses"
        if self._probes(record.load) and len(asked) == 1 and asked[0] <= self._probe_width:
            return "probe"
        return "pays"

    def observe(self, record: StepRecord) -> None:
        """Learn acceptance and costs from a step."""
        asked = [judged for judged in record.requests if judged.asked]
        plain_was_due = self._since_plain >= self._plain_every
        probed = self._note_probe(record, asked)
        if asked:
            only_probe = probed and len(asked) == 1 and asked[0].asked <= self._probe_width
            self._drafts = self._drafts or not only_probe
            self._learn_drafts(record, asked)
        elif not plain_was_due:
            self._drafts = False
        if plain_was_due:
            self._plain_every = min(2 * self._plain_every, PLAIN_EVERY)
        self._since_plain = self._since_plain + 1 if record.num_draft_rows else 0
        self._num_steps += 1
        if self._readers is not None:
            self._readers.add(record.requests)
        kind = record.load.num_requests, record.load.num_rows, record.num_rows
        self._alike = self._alike + 1 if kind == self._kind and not asked else 0
        self._kind = kind
        if plain_was_due or self._teaches():
            self._learn_seconds(record)
        self._tracker.passed(record.seconds + record.drafter_seconds)

    def _teaches(self) -> bool:
        """Whether this step is one of those by which costs are learnt."""
        if self._alike:
            return self._alike % LOOK_EVERY == 0
        return self._num_steps <= UNSETTLED or self._num_steps % LEARN_EVERY == 0

    def _learn_drafts(self, record: StepRecord, asked: Sequence[Judged]) -> None:
        self._learn_draft_ratio(record.drafter_seconds, asked)
        self._all_or_none = self._all_or_none or any(judged.num_own for judged in asked)
        dear = self._is_dear
        for judged in asked:
            if dear or not self._offers.tell:
                self._estimates.add(judged)
            self._offers.add(judged, dear=dear)
            if not judged.ended:
                self._last_draft[judged.id] = self._num_steps
                if judged.drafted:
                    self._last_tried[judged.id] = self._num_steps
        self._offers.add_seconds(record.drafter_seconds, len(asked))

    def release(self, request_id: str) -> None:
        """Forget a request; what it taught of its type stays."""
        self._estimates.release(request_id)
        self._offers.release(request_id)
        if self._readers is not None:
            self._readers.release(request_id)
        self._last_draft.pop(request_id, None)
        self._last_tried.pop(request_id, None)

    def _note_probe(self, record: StepRecord, asked: Sequence[Judged]) -> bool:
        """Whether the step carried a probe, as `widths` would have said."""
        probed = bool(asked) and self._probes(record.load)
        self._since_probe += 1
        share = PROBE_SHARE
        if self._is_dear:  # rows of prompts earn nothing: what it costs, decoding is to pay
            share = DEAR_SHARE * len(record.requests) / max(1, record.load.num_rows)
        self._credit += share * (record.seconds + record.drafter_seconds)
        if not probed:
            return False
        load, cost = record.load, self._probe_seconds(record.load)
        found = any(judged.num_rows for judged in asked)
        accepted = sum(judged.accepted for judged in asked)
        spent, brought = cost if found else 0.0, 0.0
        if not self._drafts:  # nobody else was asked: it is all the probe's
            plain = self.costs.curve.of_step(load.num_rows, load.num_requests, load.num_positions)
            # More than twice a plain step is another's doing.
            more = min(plain, max(0.0, record.seconds - plain)) if found else 0.0
            spent = max(spent, record.drafter_seconds + more)
            # Else a dear drafter that is right again would have to wait after each probe.
            brought = accepted * plain / load.num_rows if self._is_dear else 0.0
        # A draft model may have had a whole prompt to read first: a debt, to be paid before the
        # next probe.
        self._credit = min(self._credit - spent + brought, LARGEST_CREDIT * cost)
        if spent < cost:  # next to nothing: try again soon
            self._since_probe = PROBE_EVERY // 2
        elif not accepted or self._drafts:
            self._since_probe = 0
        return True

    def _learn_draft_ratio(self, drafter_seconds: float, asked: Sequence[Judged]) -> None:
        if self._catches_up and any(map(self._skipped, asked)):
            return  # what a draft model reads of what it has missed is no measure of a draft
        widths, passes = sorted(judged.asked for judged in asked), 0.0
        for i, width in enumerate(widths):  # so many draft until the shortest is done, and so on
            deeper = width - widths[i - 1] if i else width
            passes += deeper * self.costs.curve.of_rows(len(widths) - i)
        ratio = self.costs.draft_ratio
        ratio += DRAFT_RATE * (drafter_seconds / passes - ratio)
        self.costs = Costs(self.costs.curve, ratio)

    def _skipped(self, judged: Judged) -> bool:
        return self._last_draft.get(judged.id) != self._num_steps - 1

    def _learn_seconds(self, record: StepRecord) -> None:
        load, drafted = record.load, record.num_draft_rows
        if load.num_rows != load.num_requests or not load.num_requests:
            return  # rows of prompts have no logits: they would teach too low a cost
        further = drafted * load.num_positions / load.num_requests
        rows, requests, positions = load.num_rows + drafted, load.num_requests, load.num_positions
        self._tracker.learn(rows, requests, positions, further, record.seconds)
        self.costs = Costs(self._tracker.curve, self.costs.draft_ratio)
