"""A serving engine without a model: arrivals, cost curves and laws of acceptance, and a policy to
be judged.

Knows the scheduler's order (decoding, then prompts, then newcomers, then drafts) and counts time by
a cost curve; knows no torch and no clock. Deterministic, as far as its requests are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from foredraft.planning.adaptive import AdaptivePolicy
from foredraft.planning.allocation import Costs, Objective, Prospect, allocate
from foredraft.planning.laws import Arrival, Law
from foredraft.planning.policy import (
    FixedWidth,
    Load,
    Offer,
    Policy,
    RequestState,
    StaticPolicy,
    StepRecord,
)
from foredraft.planning.running import ByLaw, Running


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
    requests = (ByLaw(index, arrival, seed) for index, arrival in enumerate(trace))
    return play(policy, requests, machine, seed, steady)


def play(
    policy: Policy,
    requests: Iterable[Running],
    machine: Machine,
    seed: int = 0,
    steady: Steady | None = None,
    observe: Callable[[StepRecord], None] | None = None,
) -> Played:
    """As `simulate`, of any requests. `observe` is told of every step; `policy` forgets those that
    are left over.
    """
    return _Simulation(policy, requests, machine, seed, observe).run(steady)


class _Simulation:
    def __init__(
        self,
        policy: Policy,
        requests: Iterable[Running],
        machine: Machine,
        seed: int,
        observe: Callable[[StepRecord], None] | None,
    ) -> None:
        self._policy, self._machine, self._observe = policy, machine, observe
        self._waiting = deque(requests)
        self._running: list[Running] = []
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
        for one in self._running:
            self._policy.release(one.id)
        return self.played

    def _admit(self) -> None:
        if not self._running:
            self.played.seconds = max(self.played.seconds, self._waiting[0].at)
        while (
            self._waiting
            and len(self._running) < self._machine.max_num_seqs
            and self._waiting[0].at <= self.played.seconds
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
        kept = self._kept(load, offers)
        accepted = [
            one.accepted(offer, nodes) if nodes else []
            for one, offer, nodes in zip(emitting, offers, kept, strict=True)
        ]
        drafter_seconds = self._drafter_seconds(widths)
        seconds = self._pass_seconds(load, emitting, kept)
        self.played.seconds += drafter_seconds + seconds
        for one, chain in chains:
            one.read(chain)
        running, said = len(self._running), self.played.num_tokens
        slots = self._machine.max_num_seqs
        full = running == slots and len(self.played.ttft) >= slots
        for one, nodes, path in zip(emitting, kept, accepted, strict=True):
            self._commit(one, len(nodes), len(path))
        if full:
            self.played.num_full_tokens += self.played.num_tokens - said
            self.played.num_full_ended += running - len(self._running)
            self.played.full_seconds += drafter_seconds + seconds
        judged = [
            one.judged(width, offer, nodes, path)
            for one, width, offer, nodes, path in zip(
                emitting, widths, offers, kept, accepted, strict=True
            )
        ]
        rows = sum(map(len, kept))
        self._note(StepRecord(load, judged, rows, drafter_seconds, seconds))

    def _kept(self, load: Load, offers: Sequence[Offer]) -> list[Sequence[int]]:
        """Nodes of each draft that are verified."""
        some = [offer for offer in offers if offer.parents]
        chosen = iter(self._policy.keep(load, some) if some else ())
        return [next(chosen) if offer.parents else () for offer in offers]

    def _chains(self) -> list[tuple[Running, int]]:
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

    def _clip(self, load: Load, emitting: Sequence[Running]) -> list[int]:
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
        self, load: Load, emitting: Sequence[Running], kept: Sequence[Sequence[int]]
    ) -> float:
        curve, reading = self._machine.costs.curve, self._machine.prompt_row_seconds
        rows = load.num_rows + sum(map(len, kept))
        read = sum(
            one.num_positions * len(nodes) for one, nodes in zip(emitting, kept, strict=True)
        )
        prompt_rows = 0 if reading is None else load.num_rows - load.num_requests
        seconds = curve.of_step(rows - prompt_rows, load.num_requests, load.num_positions)
        seconds += (reading or 0.0) * prompt_rows
        seconds += curve.row_position_seconds * read
        return seconds * max(0.1, self._noise.gauss(1.0, self._machine.noise))

    def _commit(self, one: Running, drafted: int, accepted: int) -> None:
        first, now = one.num_output == 0, self.played.seconds
        one.counts.record(drafted, accepted, accepted + 1)
        one.emitted(now, accepted + 1)
        self.played.num_tokens += accepted + 1
        if first:
            one.first_token = now
            self.played.ttft.append(now - one.at)
        if one.left_to_say <= 0:
            self._running.remove(one)
            if one.num_answer > 1:
                spent = now - one.first_token
                self.played.latencies.append(spent / (one.num_answer - 1))

    def _note(self, record: StepRecord) -> None:
        played, judged = self.played, record.requests
        if judged:
            played.num_steps += 1
            played.num_plain_steps += not any(each.speculates for each in judged)
            played.num_asked += sum(each.asked for each in judged)
            played.num_emitting += len(judged)
        self._policy.observe(record)
        if self._observe is not None:
            self._observe(record)
        for each in judged:
            if each.ended:
                self._policy.release(each.id)


@dataclass(frozen=True, slots=True)
class Oracle(StaticPolicy):
    """Knows the laws and the costs, and never has to learn: the best choice for each step, all
    tokens being worth the same.
    """

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
