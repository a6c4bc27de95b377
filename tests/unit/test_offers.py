"""Drafts that are there: what confidence turns out to be worth, and which nodes are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain, combinations, pairwise, product
from operator import mul
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.core.counts import AcceptanceCounts
from foredraft.planning.adaptive import AdaptivePolicy
from foredraft.planning.allocation import Costs, Objective
from foredraft.planning.confidence import Calibration
from foredraft.planning.confident import ConfidentOnly
from foredraft.planning.cost import CostCurve
from foredraft.planning.laws import Arrival, Law
from foredraft.planning.offers import Offers
from foredraft.planning.policy import (
    FixedWidth,
    Judged,
    Load,
    Offer,
    RequestState,
    StepRecord,
    Tried,
)
from foredraft.planning.simulate import Machine, simulate

CPU = CostCurve((1, 2, 4, 6, 8, 16, 32), (1.0, 1.04, 1.15, 1.55, 2.0, 3.8, 7.5))


def alike(request_id: str) -> float:
    """All tokens are worth the same."""
    return 1.0


def offer(
    parents: Sequence[int], confidence: Sequence[float] | None, id_: str = "r", *,
    may_cut: bool = True,
) -> Offer:  # fmt: skip
    return Offer(id_, "greedy", 10, tuple(parents), confidence, may_cut)


@st.composite
def trees(draw: st.DrawFn) -> Offer:
    size = draw(st.integers(0, 4))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    confidence = [draw(st.floats(0.0, 1.0)) for _ in range(size)]
    return offer(parents, confidence, may_cut=draw(st.booleans()))


def closed_sets(one: Offer) -> list[tuple[int, ...]]:
    """All choices of nodes that hold their parents; only the whole where nothing may be cut."""
    nodes = range(len(one.parents))
    if not one.may_cut:
        return [tuple(nodes)]
    every = chain.from_iterable(combinations(nodes, n) for n in range(len(one.parents) + 1))
    return [
        chosen
        for chosen in every
        if all(one.parents[n] < 0 or one.parents[n] in chosen for n in chosen)
    ]


@given(st.lists(trees(), min_size=1, max_size=2), st.integers(0, 5))
def test_the_nodes_kept_are_the_best_of_all_choices(drafts: list[Offer], prompt_rows: int) -> None:
    offers = Offers(Objective.THROUGHPUT)
    load = Load(len(drafts), len(drafts) + prompt_rows)
    known = Calibration()
    survival = [known.survival("r", "greedy", each) for each in drafts]

    def value(choice: Sequence[Sequence[int]]) -> float:
        gained = sum(
            alive[node]
            for alive, nodes, each in zip(survival, choice, drafts, strict=True)
            for node in nodes
            if each.may_cut
        )
        fixed = sum(len(n) for n, each in zip(choice, drafts, strict=True) if not each.may_cut)
        rows = load.num_rows + sum(map(len, choice))
        return (load.num_rows + fixed + gained) / CPU.of_rows(rows)

    kept = offers.keep(load, drafts, Costs(CPU), alike)
    for nodes, each in zip(kept, drafts, strict=True):
        assert tuple(nodes) in closed_sets(each)
    best = max(value(choice) for choice in product(*map(closed_sets, drafts)))
    assert value(kept) == pytest.approx(best)


@given(trees(), st.integers(0, 3))
def test_a_draft_makes_those_wait_that_have_none(draft: Offer, others: int) -> None:
    """Under latency: tokens a second of all that decode, theirs included."""
    draft = replace(draft, may_cut=True)
    load = Load(1 + others, 1 + others)
    alive = Calibration().survival("r", "greedy", draft)

    def value(nodes: Sequence[int]) -> float:
        seconds = CPU.of_rows(1 + others + len(nodes))
        return (1.0 + others + sum(alive[node] for node in nodes)) / seconds

    (kept,) = Offers(Objective.LATENCY).keep(load, [draft], Costs(CPU), alike)
    assert tuple(kept) in closed_sets(draft)
    assert value(kept) == pytest.approx(max(map(value, closed_sets(draft))))


def test_confidence_that_overstates_is_corrected_by_what_happens() -> None:
    known, coins = Calibration(), Random(0)
    for _ in range(400):
        known.add("other", "greedy", [Tried(0, 0.9, coins.random() < 0.3)])
    assert known.survival("new", "greedy", offer([-1], [0.9]))[0] == pytest.approx(0.3, abs=0.1)
    assert known.survival("new", "greedy", offer([-1], [0.2]))[0] == pytest.approx(0.2, abs=0.02)
    assert known.survival("new", "sampled", offer([-1], [0.9]))[0] == pytest.approx(0.9)


def test_a_request_whose_drafts_fail_is_told_from_its_type() -> None:
    known = Calibration()
    for _ in range(100):
        known.add("good", "greedy", [Tried(0, 0.8, True)])
    for _ in range(20):
        known.add("bad", "greedy", [Tried(0, 0.8, False)])
    rates = {who: known.survival(who, "greedy", offer([-1], [0.8]))[0] for who in ("good", "bad")}
    assert rates["bad"] < 0.3 < 0.7 < rates["good"]
    known.release("bad")
    fresh = known.survival("bad", "greedy", offer([-1], [0.8]))
    assert fresh == known.survival("nobody", "greedy", offer([-1], [0.8]))


@given(trees())
def test_survival_falls_along_every_path(draft: Offer) -> None:
    alive = Calibration().survival("r", "greedy", draft)
    assert all(p < 0 or alive[i] <= alive[p] for i, p in enumerate(draft.parents))


def taught(objective: Objective, rate: float, stated: float) -> Offers:
    """Drafts of four tokens that were accepted at `rate`."""
    offers, coins = Offers(objective), Random(1)
    for _ in range(200):
        accepted = 0
        while accepted < 4 and coins.random() < rate:
            accepted += 1
        tried = [Tried(i, stated, i < accepted) for i in range(min(4, accepted + 1))]
        draft = offer(range(-1, 3), [stated] * 4)
        offers.add(
            Judged("r", "greedy", 4, 4, accepted, False, offer=draft, tried=tried), dear=True
        )
        offers.add_seconds(0.02, 1)
    return offers


def test_it_asks_where_some_of_the_recent_drafts_would_pay() -> None:
    state = RequestState("r", "greedy", 99, 10)
    good = taught(Objective.THROUGHPUT, 0.8, 0.8)
    hopeless = taught(Objective.THROUGHPUT, 0.02, 0.8)
    for load, pays in ((Load(1, 1), True), (Load(1, 200), False)):
        assert good.asks(load, [state], [4], Costs(CPU), alike) == [4 if pays else 0]
        assert hopeless.asks(load, [state], [4], Costs(CPU), alike) == [0]
    unknown = Offers(Objective.THROUGHPUT)
    assert unknown.asks(Load(1, 1), [state], [4], Costs(CPU), alike) == [4]


def test_one_whose_tokens_are_worth_more_is_asked_where_others_are_not() -> None:
    doubtful = taught(Objective.LATENCY, 0.35, 0.35)
    states = [RequestState("worth more", "greedy", 99, 10), RequestState("less", "greedy", 99, 10)]
    weights = {"worth more": 4.0, "less": 0.25}
    load = Load(8, 8)  # a row more costs about half a token
    assert doubtful.asks(load, states, [4, 4], Costs(CPU), alike) == [0, 0]
    assert doubtful.asks(load, states, [4, 4], Costs(CPU), lambda id_: weights[id_]) == [4, 0]


def test_a_dear_drafter_is_told_when_to_stop() -> None:
    """One more token only while its gain pays for its row and for itself, in tokens a second of
    now; a drafter that believes twice too much is asked for twice as much.
    """
    costs = Costs(CPU, 0.1)
    fair = taught(Objective.THROUGHPUT, 0.8, 0.8).stopping(Load(1, 1), 4, costs)
    rows = [CPU.of_rows(n) for n in range(1, 6)]
    expected = [after - before + 0.1 for before, after in pairwise(rows)]
    assert fair.least_path == pytest.approx(expected, rel=0.15)
    boastful = taught(Objective.THROUGHPUT, 0.4, 0.8).stopping(Load(1, 1), 4, costs)
    assert boastful.least_path[0] == pytest.approx(2 * expected[0], rel=0.2)
    dearer = AdaptivePolicy(4, CPU, 0.1).stopping(Load(1, 1)).least_path
    assert len(dearer) == 4
    assert AdaptivePolicy(4, CPU, 0.0).stopping(Load(1, 1)).least_path == ()


def test_a_probe_of_a_drafter_set_aside_takes_what_it_has() -> None:
    """One whose beliefs never reach what pays would else give nothing to be judged by."""
    policy, load = AdaptivePolicy(4, CPU, 0.5), Load(8, 8)
    for _ in range(400):
        least = policy.stopping(load).least_path
        if not any(least):
            break
        policy.observe(StepRecord(load, [Judged("r", "greedy", 0, 0, 0, False)] * 8, 0, 0.0, 2.0))
    assert list(least) == [0.0] * 4
    assert sum(policy.widths(load, [RequestState("r", counts=talked())])) == 1


def talked() -> AcceptanceCounts:
    counts = AcceptanceCounts()
    counts.record(0, 0, 1)
    return counts


def test_a_threshold_cuts_where_it_may_and_leaves_the_rest_to_the_policy() -> None:
    policy = ConfidentOnly(FixedWidth(4), 0.5)
    drafts = [
        offer([-1, 0, 1], [0.9, 0.4, 0.9]),  # nothing below a node that is left out
        offer([-1, -1, 1], [0.4, 0.5, 0.6]),
        offer([-1, 0], [0.1, 0.1], may_cut=False),
        offer([-1, 0], None),
    ]
    assert [list(nodes) for nodes in policy.keep(Load(4, 4), drafts)] == [
        [0], [1, 2], [0, 1], [0, 1]
    ]  # fmt: skip
    assert policy.stopping(Load(1, 1)).confidence_threshold == 0.5
    assert policy.widths(Load(1, 1), [RequestState("r")]) == [4]


@pytest.mark.parametrize("stated", [1.0, 0.6])
@pytest.mark.parametrize("num_requests", [1, 4])
def test_drafts_that_tell_themselves_apart_beat_every_fixed_width(
    num_requests: int, stated: float
) -> None:
    """Half of the drafts are nearly sure, half nearly hopeless; a width fits neither."""
    law = Law.of_kinds((0.5, 0.95), (0.5, 0.1), filled=0.9, stated=stated)
    trace = [Arrival(0.0, 1, 160, law) for _ in range(12 * num_requests)]
    machine = Machine(Costs(CPU, 0.002), num_requests)
    fixed = [simulate(FixedWidth(k), trace, machine).goodput for k in range(7)]
    ours = simulate(AdaptivePolicy(6, CPU, 0.002), trace, machine).goodput
    assert ours >= 1.03 * max(fixed)


def test_hopeless_drafts_are_hardly_asked_for() -> None:
    law = Law.of_kinds((1.0, 0.02), stated=30.0)
    trace = [Arrival(0.0, 1, 160, law) for _ in range(40)]
    machine = Machine(Costs(CPU, 0.002), 8)
    plain = simulate(FixedWidth(0), trace, machine).goodput
    played = simulate(AdaptivePolicy(4, CPU, 0.002), trace, machine)
    assert played.goodput >= 0.98 * plain
    assert played.plain_share >= 0.9


def test_rates_multiply_along_a_chain() -> None:
    alive = Calibration().survival("r", "greedy", offer(range(-1, 3), [0.9, 0.8, 0.7, 0.6]))
    assert alive == pytest.approx(list(accumulate([0.9, 0.8, 0.7, 0.6], mul)))
