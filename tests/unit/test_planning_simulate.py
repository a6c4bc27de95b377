"""The policy, judged by the simulator: against the best fixed width, plain decoding and an oracle.

Times are those of a cost curve, so nothing here depends on the machine that runs it.
"""

from __future__ import annotations

from random import Random

import pytest

from foredraft.planning.adaptive import AdaptivePolicy
from foredraft.planning.allocation import Costs, Objective
from foredraft.planning.cost import CostCurve
from foredraft.planning.laws import Arrival, Law
from foredraft.planning.policy import FixedWidth
from foredraft.planning.simulate import (
    Machine,
    compare,
    poisson,
    simulate,
)
from foredraft.planning.speedup import expected_tokens

# Two cores: rows are nearly free up to four, then they cost what arithmetic costs.
CPU = CostCurve(
    (1, 2, 3, 4, 5, 6, 8, 12, 16, 32),
    (7.1e-3, 7.4e-3, 7.8e-3, 8.3e-3, 10e-3, 11.5e-3, 14.5e-3, 24e-3, 34e-3, 140e-3),
    request_seconds=2e-4,
    position_seconds=9e-7,
    row_position_seconds=2e-7,
)
# One draft, often right; n-grams, often silent; a law too flat to guess.
RIGHT, SOMETIMES = Law.of(0.8, 0.85, 0.9), Law.of(0.6, 0.85, 0.9, filled=0.35)
FLAT = Law.of(0.02)


def machine(num_requests: int, draft_cost: float = 0.0, noise: float = 0.0) -> Machine:
    return Machine(Costs(CPU, draft_cost), max_num_seqs=num_requests, noise=noise)


def trace(num_requests: int, law: Law, prompt: int = 40, answer: int = 128) -> list[Arrival]:
    return poisson(0, max(8, 2 * num_requests), prompt, answer, law)


@pytest.mark.parametrize("law", [RIGHT, SOMETIMES], ids=["often right", "often silent"])
@pytest.mark.parametrize("draft_cost", [0.0, 0.15])
def test_alone_it_reaches_the_best_fixed_width(law: Law, draft_cost: float) -> None:
    played = compare(trace(1, law), machine(1, draft_cost), 6)
    best = played.fixed[played.best_width].goodput
    assert best > 1.03 * played.fixed[0].goodput
    assert played.adaptive.goodput >= 0.97 * best
    assert played.oracle.goodput >= 0.99 * best


@pytest.mark.parametrize("law", [RIGHT, SOMETIMES, FLAT], ids=["right", "silent", "flat"])
@pytest.mark.parametrize("objective", list(Objective))
def test_under_load_it_loses_nothing_to_plain_decoding(law: Law, objective: Objective) -> None:
    played = compare(trace(32, law, answer=96), machine(32), 2, objective=objective)
    assert played.best_width == 0
    assert played.adaptive.goodput >= 0.98 * played.fixed[0].goodput


@pytest.mark.parametrize("num_requests", [2, 4, 8, 16])
def test_between_the_two_it_is_near_the_better_of_plain_and_fixed(num_requests: int) -> None:
    for law in (RIGHT, SOMETIMES):
        played = compare(trace(num_requests, law), machine(num_requests, noise=0.03), 4)
        best = played.fixed[played.best_width].goodput
        assert played.adaptive.goodput >= 0.95 * best


@pytest.mark.parametrize("num_requests", [2, 4, 8])
def test_each_objective_is_the_better_one_at_what_it_is_for(num_requests: int) -> None:
    """Where drafts say what they are worth, requests differ, and prompts keep coming."""
    laws = Law.of_kinds((0.6, 0.9), (0.4, 0.5)), Law.of_kinds((0.1, 0.9), (0.9, 0.25))
    requests = [Arrival(0.0, 100, 96, laws[i % 2]) for i in range(8 * num_requests)]
    batch, reader = (
        simulate(AdaptivePolicy(6, CPU, objective=objective), requests, machine(num_requests))
        for objective in Objective
    )
    assert batch.goodput >= 0.99 * reader.goodput
    assert reader.mean_latency <= 1.01 * batch.mean_latency


def steep(num_requests: int) -> Machine:
    """A row that costs more than a flat law brings."""
    curve = CostCurve((1, 2, 32), (1.0, 1.1, 6.0))
    return Machine(Costs(curve), max_num_seqs=num_requests)


@pytest.mark.parametrize("num_requests", [1, 8, 32, 64])
def test_flat_laws_are_left_alone(num_requests: int) -> None:
    arrivals = poisson(0, max(16, 2 * num_requests), 40, 160, FLAT)
    host = steep(num_requests)
    adaptive = simulate(AdaptivePolicy(5, host.costs.curve), arrivals, host)
    plain = simulate(FixedWidth(0), arrivals, host)
    assert adaptive.plain_share >= 0.95
    assert adaptive.goodput >= 0.98 * plain.goodput


def test_long_prompts_and_short_answers_are_left_alone_in_a_full_batch() -> None:
    arrivals = poisson(0, 64, 2000, 8, RIGHT)
    adaptive = simulate(AdaptivePolicy(5, CPU), arrivals, machine(32))
    plain = simulate(FixedWidth(0), arrivals, machine(32))
    assert adaptive.plain_share >= 0.95
    assert adaptive.goodput >= 0.98 * plain.goodput


def test_a_batch_that_hovers_around_the_threshold_loses_nothing() -> None:
    """Arrivals that keep the number of requests going up and down."""
    arrivals = poisson(1.2, 60, 40, 96, RIGHT, seed=4)
    played = compare(arrivals, machine(8, noise=0.03), 4)
    fixed = [each.mean_latency for each in played.fixed]
    assert played.adaptive.mean_latency <= 1.05 * min(fixed)
    assert played.adaptive.seconds <= 1.02 * min(each.seconds for each in played.fixed)


@pytest.mark.parametrize("num_requests", [4, 8, 16])
def test_prompts_that_keep_coming_do_not_make_drafts_look_cheap(num_requests: int) -> None:
    """A step that reads a prompt is long: what drafts add to it looks small beside that, and is
    paid in full.
    """
    lengths = Random(0)
    arrivals = [
        Arrival(0.0, 180, lengths.randrange(24, 128), lengths.choice([RIGHT, SOMETIMES, FLAT]))
        for _ in range(16 * num_requests)
    ]
    adaptive = AdaptivePolicy(5, CPU, objective=Objective.LATENCY)
    played = simulate(adaptive, arrivals, machine(num_requests, noise=0.03))
    plain = simulate(FixedWidth(0), arrivals, machine(num_requests, noise=0.03))
    assert played.mean_latency <= 1.03 * plain.mean_latency


def test_a_drafter_that_turns_bad_costs_less_than_any_fixed_width() -> None:
    law = Law(((0, (0.9,)), (48, (0.02,))))
    arrivals = [Arrival(0.0, 40, 200, law) for _ in range(10)]
    host = steep(1)
    fixed = [simulate(FixedWidth(w), arrivals, host).goodput for w in range(6)]
    adaptive = simulate(AdaptivePolicy(5, host.costs.curve), arrivals, host)
    assert adaptive.goodput >= 1.05 * max(fixed)


def test_costs_that_were_measured_wrong_are_corrected() -> None:
    """A busy machine at start-up: rows looked free, and are not."""
    wrong = CostCurve(CPU.rows, tuple(20e-3 for _ in CPU.rows))
    arrivals = trace(8, RIGHT, answer=1500)
    policy = AdaptivePolicy(4, wrong)
    first = simulate(policy, arrivals, machine(8))
    then = simulate(policy, arrivals, machine(8))
    plain = simulate(FixedWidth(0), arrivals, machine(8))
    always = simulate(FixedWidth(4), arrivals, machine(8))
    assert always.goodput < 0.5 * plain.goodput
    assert first.goodput >= 0.6 * plain.goodput
    assert then.goodput >= 0.98 * plain.goodput


def test_fixed_widths_come_to_what_the_closed_form_says() -> None:
    arrivals = [Arrival(0.0, 1, 20_000, Law.of(0.7, 0.8))]
    host = Machine(Costs(CostCurve((1, 4), (1.0, 1.6)), 0.1))
    played = simulate(FixedWidth(3), arrivals, host)
    expected = expected_tokens([0.7, 0.8, 0.8]) / (1.6 + 0.3)
    assert played.goodput == pytest.approx(expected, rel=0.02)


def test_the_same_seed_plays_the_same_and_another_one_does_not() -> None:
    def goodput(seed: int) -> float:
        policy = AdaptivePolicy(4, CPU)
        return simulate(policy, trace(4, RIGHT), machine(4, noise=0.05), seed).goodput

    assert goodput(1) == goodput(1)
    assert goodput(1) != goodput(2)


def test_all_that_arrive_are_served_to_their_length() -> None:
    arrivals = poisson(5.0, 20, 70, 33, RIGHT, seed=2)
    played = simulate(FixedWidth(5), arrivals, machine(3))
    assert played.num_tokens == 20 * 33
    assert len(played.ttft) == len(played.latencies) == 20
    assert played.seconds >= arrivals[-1].at


def alone(law: Law, draft_cost: float, num_output: int) -> tuple[Machine, list[Arrival]]:
    return Machine(Costs(CPU, draft_cost), 1), [Arrival(0.0, 1, num_output, law)]


@pytest.mark.parametrize("draft_cost", [0.0, 0.05, 0.4, 1.0, 4.0])
def test_a_drafter_that_is_never_right_costs_one_per_cent_of_the_time(draft_cost: float) -> None:
    """Looking for whether it is right by now included; what is learnt at the start apart."""
    host, arrivals = alone(Law.of(0.0), draft_cost, 4000)
    adaptive = AdaptivePolicy(4, CPU, draft_cost)
    simulate(adaptive, arrivals, host)
    then = simulate(adaptive, arrivals, host)
    plain = simulate(FixedWidth(0), arrivals, host)
    assert then.goodput >= 0.99 * plain.goodput
    assert then.num_plain_steps < then.num_steps


@pytest.mark.parametrize(("draft_cost", "rate"), [(0.0, 0.9), (0.1, 0.9), (0.3, 0.9), (0.3, 0.97)])
def test_a_drafter_that_begins_to_be_right_is_found(draft_cost: float, rate: float) -> None:
    """Within 500 tokens, then as good as the best fixed width."""
    law = Law(((0, (0.0,)), (2000, (rate,))))
    host, arrivals = alone(law, draft_cost, 4000)
    ours = simulate(AdaptivePolicy(4, CPU, draft_cost), arrivals, host)
    plain = simulate(FixedWidth(0), arrivals, host).seconds / 4000
    right = [Arrival(0.0, 1, 4000, Law.of(rate))]
    best = min(simulate(FixedWidth(k), right, host).seconds / 4000 for k in range(5))
    assert best < 0.9 * plain
    assert ours.seconds <= 2000 * plain * 1.01 + 500 * plain + 1500 * best * 1.03
