"""A serving engine without a model: arrivals, cost curves and laws of acceptance, and a policy to
be judged.

Knows the scheduler's order (decoding, then prompts, then newcomers, then drafts) and counts time by
a cost curve; knows no torch and no clock. Deterministic: a token's coin is a function of the seed,
the request and its position, so that every policy meets the same luck.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from foredraft.core.counts import AcceptanceCounts
from foredraft.planning.adaptive import AdaptivePolicy
from foredraft.planning.allocation import Costs, Objective, Prospect, allocate
from foredraft.planning.estimates import Outlook
from foredraft.planning.policy import (
    FixedWidth,
    Judged,
    Load,
    Offer,
    Policy,
    RequestState,
    StaticPolicy,
    StepRecord,
    Tried,
)


@dataclass(frozen=True, slots=True)
class Law:
    """How drafts of a request fare: rates by position, from some output token on; and how often
    there is a draft.

    Where drafts are of several `kinds`, the drafter knows which kind it has, and says so: its
    confidence is `stated` of the true rate.
    """

    phases: tuple[tuple[int, tuple[float, ...]], ...]  # (first output token, conditional rates)
    filled: float = 1.0  # P(the drafter finds anything)
    kinds: tuple[tuple[float, float], ...] = ()  # (P(a draft is of the kind), its rate)
    stated: float = 1.0  # confidence / rate

    @classmethod
    def of(cls, *rates: float, filled: float = 1.0) -> Law:
        """The same rates throughout; the last one holds for all further positions."""
        return cls(((0, rates),), filled)

    def rate(self, num_output: int, position: int) -> float:
        """P(draft position is accepted | all before it were), after `num_output` tokens."""
        rates = next(rates for first, rates in reversed(self.phases) if num_output >= first)
        return rates[min(position, len(rates) - 1)]

    @classmethod
    def of_kinds(cls, *kinds: tuple[float, float], filled: float = 1.0, stated: float = 1.0) -> Law:
        """Kinds of drafts, each with its chance and its rate at all positions."""
        rate = sum(chance * rate for chance, rate in kinds)
        return cls(((0, (rate,)),), filled, kinds, stated)

    def kind(self, coin: float) -> float | None:
        """The rate of the kind that a coin draws; None where drafts are of one kind."""
        reached = 0.0
        for chance, rate in self.kinds:
            reached += chance
            if coin < reached:
                return rate
        return self.kinds[-1][1] if self.kinds else None

    def outlook(self, num_output: int, width: int) -> Outlook:
        """What an oracle knows."""
        survival, alive = [], 1.0
        for position in range(width):
            alive *= self.rate(num_output, position)
            survival.append(alive)
        return Outlook(survival, [self.filled] * width)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes, how long it is, how its drafts fare."""

    at: float  # seconds
    num_prompt: int
    num_output: int
    law: Law
    request_type: str = "greedy"
    num_cached: int = 0  # positions before the prompt that the prefix cache holds


@dataclass(frozen=True, slots=True)
class Machine:
    """What runs the requests. `costs` are the true ones."""

    costs: Costs
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    noise: float = 0.0  # relative spread of a step's seconds
    prompt_row_seconds: float | None = None  # None: a prompt's rows cost what others do


@dataclass(slots=True)
class Played:
    """What came of it."""

    num_tokens: int = 0
    seconds: float = 0.0
    # Of that, while all slots were taken, from the first wave's first tokens on.
    num_full_tokens: int = 0
    num_full_ended: int = 0
    full_seconds: float = 0.0
    num_steps: int = 0  # that could have drafted
    num_plain_steps: int = 0  # ... and did without
    num_asked: int = 0
    num_emitting: int = 0  # requests, over all steps
    ttft: list[float] = field(default_factory=list)  # seconds
    latencies: list[float] = field(default_factory=list)  # of each request: seconds a token

    @property
    def goodput(self) -> float:
        """Output tokens a second."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def full_goodput(self) -> float:
        """Output tokens a second in the steady state: neither the fill nor the drain counts."""
        return self.num_full_tokens / self.full_seconds if self.full_seconds else 0.0

    @property
    def mean_width(self) -> float:
        return self.num_asked / self.num_emitting if self.num_emitting else 0.0

    @property
    def plain_share(self) -> float:
        return self.num_plain_steps / self.num_steps if self.num_steps else 1.0

    @property
    def mean_latency(self) -> float:
        """Seconds a token, the mean over requests; the first token apart."""
        return sum(self.latencies) / len(self.latencies) if self.latencies else 0.0


class _Sequence:
    """A request that runs."""

    def __init__(self, index: int, arrival: Arrival, seed: int) -> None:
        self.id = str(index)
        self.arrival = arrival
        self.num_read = 0
        self.num_output = 0
        self.first_token = 0.0
        self.counts = AcceptanceCounts()
        coins = Random(f"{seed}/{index}")
        self.accept = [coins.random() for _ in range(arrival.num_output)]
        self.find = [coins.random() for _ in range(arrival.num_output)]
        self.kind = [coins.random() for _ in range(arrival.num_output)]

    @property
    def left_to_read(self) -> int:
        return self.arrival.num_prompt - self.num_read

    @property
    def num_positions(self) -> int:
        return self.arrival.num_cached + self.num_read + self.num_output

    @property
    def state(self) -> RequestState:
        return RequestState(
            self.id,
            self.arrival.request_type,
            max(0, self.arrival.num_output - self.num_output - 1),
            self.num_positions,
            self.counts,
        )

    def offer(self, width: int) -> Offer:
        """What the drafter has when it is asked for `width` tokens."""
        law, start = self.arrival.law, self.num_output
        length = width if self.find[start] < law.filled else 0
        kind = law.kind(self.kind[start])
        confidence = None if kind is None else [min(1.0, law.stated * kind)] * length
        parents = range(-1, length - 1)
        return Offer(self.id, self.arrival.request_type, self.num_positions, parents, confidence)

    def accepted(self, length: int) -> int:
        """Of a draft of so many tokens, those that are accepted."""
        law, start = self.arrival.law, self.num_output
        kind = law.kind(self.kind[start])
        for position in range(length):
            rate = law.rate(start, position) if kind is None else kind
            if self.accept[start + position] >= rate:
                return position
        return length


@dataclass(frozen=True, slots=True)
class Steady:
    """How much of the steady state is played: until so many requests have ended in it, or so many
    seconds have passed.
    """

    requests: int
    seconds: float


def simulate(
    policy: Policy,
    trace: Sequence[Arrival],
    machine: Machine,
    seed: int = 0,
    steady: Steady | None = None,
) -> Played:
    """Play `trace`, which is in the order of arrival, to its end, or as far as `steady` says."""
    return _Simulation(policy, trace, machine, seed).run(steady)


class _Simulation:
    def __init__(
        self, policy: Policy, trace: Sequence[Arrival], machine: Machine, seed: int
    ) -> None:
        self._policy, self._machine = policy, machine
        self._waiting = deque(_Sequence(i, arrival, seed) for i, arrival in enumerate(trace))
        self._running: list[_Sequence] = []
        self._noise = Random(f"{seed}/noise")
        self.played = Played()

    def run(self, steady: Steady | None) -> Played:
        while self._waiting or self._running:
            self._admit()
            self._step()
            if steady is not None and (
                self.played.num_full_ended >= steady.requests
                or self.played.full_seconds >= steady.seconds
            ):
                break
        return self.played

    def _admit(self) -> None:
        if not self._running:
            self.played.seconds = max(self.played.seconds, self._waiting[0].arrival.at)
        while (
            self._waiting
            and len(self._running) < self._machine.max_num_seqs
            and self._waiting[0].arrival.at <= self.played.seconds
        ):
            self._running.append(self._waiting.popleft())

    def _step(self) -> None:
        chains = self._chains()
        emitting = [one for one, chain in chains if chain >= one.left_to_read]
        load = Load(
            len(chains),
            sum(chain for _, chain in chains),
            sum(one.num_positions for one, _ in chains),
        )
        widths = self._clip(load, emitting)
        offers = [one.offer(width) for one, width in zip(emitting, widths, strict=True)]
        lengths = self._kept(load, offers)
        drafts = [(n, one.accepted(n)) for one, n in zip(emitting, lengths, strict=True)]
        drafter_seconds = self._drafter_seconds(widths)
        seconds = self._pass_seconds(load, emitting, drafts)
        self.played.seconds += drafter_seconds + seconds
        full = self._note_full(drafts, drafter_seconds + seconds)
        for one, chain in chains:
            one.num_read += min(chain, one.left_to_read)
        running = len(self._running)
        for one, (drafted, accepted) in zip(emitting, drafts, strict=True):
            self._commit(one, drafted, accepted)
        self.played.num_full_ended += (running - len(self._running)) * full
        self._note(load, emitting, offers, widths, drafts, drafter_seconds, seconds)

    def _kept(self, load: Load, offers: Sequence[Offer]) -> list[int]:
        """Draft tokens that are verified: of a chain, those up to the last that is kept."""
        some = [offer for offer in offers if offer.parents]
        kept = self._policy.keep(load, some) if some else ()
        lengths = {offer.id: len(nodes) for offer, nodes in zip(some, kept, strict=True)}
        return [lengths.get(offer.id, 0) for offer in offers]

    def _note_full(self, drafts: Sequence[tuple[int, int]], seconds: float) -> bool:
        slots = self._machine.max_num_seqs
        full = len(self._running) == slots and len(self.played.ttft) >= slots
        if full:
            self.played.num_full_tokens += sum(accepted + 1 for _, accepted in drafts)
            self.played.full_seconds += seconds
        return full

    def _chains(self) -> list[tuple[_Sequence, int]]:
        """Rows of each request: its pending token, or a part of its prompt."""
        budget = self._machine.max_num_batched_tokens
        budget -= sum(not one.left_to_read for one in self._running)
        chains = []
        for one in self._running:
            chain = min(one.left_to_read, budget) if one.left_to_read else 1
            budget -= chain if one.left_to_read else 0
            if chain:
                chains.append((one, chain))
        return chains

    def _clip(self, load: Load, emitting: Sequence[_Sequence]) -> list[int]:
        states = [one.state for one in emitting]
        budget = self._machine.max_num_batched_tokens - load.num_rows
        widths = []
        asked = self._policy.widths(load, states) if states else []
        for width, state in zip(asked, states, strict=True):
            widths.append(max(0, min(width, state.max_width, budget)))
            budget -= widths[-1]
        return widths

    def _drafter_seconds(self, widths: Sequence[int]) -> float:
        curve, ratio = self._machine.costs.curve, self._machine.costs.draft_ratio
        depths = range(max(widths, default=0))
        return ratio * sum(curve.of_rows(sum(w > depth for w in widths)) for depth in depths)

    def _pass_seconds(
        self, load: Load, emitting: Sequence[_Sequence], drafts: Sequence[tuple[int, int]]
    ) -> float:
        curve, reading = self._machine.costs.curve, self._machine.prompt_row_seconds
        rows = load.num_rows + sum(drafted for drafted, _ in drafts)
        read = sum(one.num_positions * n for one, (n, _) in zip(emitting, drafts, strict=True))
        prompt_rows = 0 if reading is None else load.num_rows - load.num_requests
        seconds = curve.of_step(rows - prompt_rows, load.num_requests, load.num_positions)
        seconds += (reading or 0.0) * prompt_rows
        seconds += curve.row_position_seconds * read
        return seconds * max(0.1, self._noise.gauss(1.0, self._machine.noise))

    def _commit(self, one: _Sequence, drafted: int, accepted: int) -> None:
        first = one.num_output == 0
        one.counts.record(drafted, accepted, accepted + 1)
        one.num_output += accepted + 1
        self.played.num_tokens += accepted + 1
        now, arrival = self.played.seconds, one.arrival
        if first:
            one.first_token = now
            self.played.ttft.append(now - arrival.at)
        if one.num_output >= arrival.num_output:
            self._running.remove(one)
            if arrival.num_output > 1:
                spent = now - one.first_token
                self.played.latencies.append(spent / (arrival.num_output - 1))

    def _note(
        self,
        load: Load,
        emitting: Sequence[_Sequence],
        offers: Sequence[Offer],
        widths: Sequence[int],
        drafts: Sequence[tuple[int, int]],
        drafter_seconds: float,
        seconds: float,
    ) -> None:
        played = self.played
        judged = [
            Judged(
                one.id,
                one.arrival.request_type,
                width,
                *draft,
                ended=one not in self._running,
                offer=offer if width else None,
                tried=_tried(offer, *draft),
            )
            for one, offer, width, draft in zip(emitting, offers, widths, drafts, strict=True)
        ]
        if emitting:
            played.num_steps += 1
            played.num_plain_steps += not any(each.speculates for each in judged)
            played.num_asked += sum(widths)
            played.num_emitting += len(emitting)
        rows = sum(drafted for drafted, _ in drafts)
        self._policy.observe(StepRecord(load, judged, rows, drafter_seconds, seconds))
        for each in judged:
            if each.ended:
                self._policy.release(each.id)


def _tried(offer: Offer, drafted: int, accepted: int) -> list[Tried]:
    stated = offer.confidence
    return [
        Tried(i, None if stated is None else stated[i], i < accepted)
        for i in range(min(accepted + 1, drafted))
    ]


@dataclass(frozen=True, slots=True)
class Oracle(StaticPolicy):
    """Knows the laws and the costs, and never has to learn: the best choice for each step."""

    laws: Mapping[str, Law]  # by request id
    costs: Costs
    max_width: int
    objective: Objective = Objective.THROUGHPUT

    def widths(self, load: Load, requests: Sequence[RequestState]) -> Sequence[int]:
        prospects = [
            Prospect(
                self.laws[request.id].outlook(
                    request.counts.num_emitted_tokens, min(self.max_width, request.max_width)
                ),
                request.num_positions,
            )
            for request in requests
        ]
        return allocate(load, prospects, self.costs, self.objective)[0].widths


@dataclass(frozen=True, slots=True)
class Comparison:
    """One trace, played by each policy."""

    fixed: Sequence[Played]  # [K + 1] by width, 0 = plain
    adaptive: Played
    oracle: Played

    @property
    def best_width(self) -> int:
        """The fixed width of the most tokens a second, the least among equals."""
        return max(range(len(self.fixed)), key=lambda width: self.fixed[width].goodput)


def compare(
    trace: Sequence[Arrival],
    machine: Machine,
    max_width: int,
    *,
    objective: Objective = Objective.THROUGHPUT,
    seed: int = 0,
) -> Comparison:
    """Every fixed width, the policy, which begins with the true costs, and the oracle."""
    costs = machine.costs
    laws = {str(index): arrival.law for index, arrival in enumerate(trace)}
    adaptive = AdaptivePolicy(max_width, costs.curve, costs.draft_ratio, objective)
    oracle = Oracle(laws, costs, max_width, objective)
    return Comparison(
        [simulate(FixedWidth(width), trace, machine, seed) for width in range(max_width + 1)],
        simulate(adaptive, trace, machine, seed),
        simulate(oracle, trace, machine, seed),
    )


def poisson(
    rate: float,
    num_requests: int,
    num_prompt: int,
    num_output: int,
    law: Law,
    *,
    num_cached: int = 0,
    seed: int = 0,
) -> list[Arrival]:
    """`rate` requests a second, independent of one another. 0 or less: all come at once."""
    draw, at, trace = Random(f"{seed}/arrivals"), 0.0, []
    for _ in range(num_requests):
        trace.append(Arrival(at, num_prompt, num_output, law, num_cached=num_cached))
        at += draw.expovariate(rate) if rate > 0 else 0.0
    return trace
