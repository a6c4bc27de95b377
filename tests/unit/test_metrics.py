"""The numbers behind the metrics, from steps that are made up."""

from __future__ import annotations

import pytest

from foredraft.core.counts import AcceptanceCounts
from foredraft.engine.tally import Distribution, PlainCosts, Tally
from foredraft.planning.adaptive import AdaptivePolicy
from foredraft.planning.cost import CostCurve
from foredraft.planning.policy import FixedWidth, Judged, Load, NoDrafts, RequestState, StepRecord


def step(seconds, requests=1, draft_rows=0, drafter=0.0, prompt_rows=0, judged=()):
    load = Load(requests, requests + prompt_rows, 10)
    return StepRecord(load, judged, draft_rows, drafter, seconds)


def test_a_distribution_counts_each_value_once_at_the_first_bound_it_does_not_pass():
    values = Distribution((0.0, 1.0, 2.0))
    for value in (0.0, 0.5, 1.0, 1.5, 9.0):
        values.add(value)
    values.add(0.0, times=3)
    values.add(7.0, times=0)
    assert values.counts == [4, 2, 1, 1]
    assert values.total == 12.0


def test_a_step_costs_what_plain_steps_of_as_many_requests_took():
    tally, policy = Tally(4), FixedWidth(4)
    tally.stepped(step(7.0, draft_rows=4, drafter=1.0), policy)  # nothing to compare with yet
    assert tally.steps.mean_step_cost is None
    for seconds in (1.0, 3.0):
        tally.stepped(step(seconds), policy)
    tally.stepped(step(50.0, requests=2), policy)
    before = tally.steps.decode_seconds, tally.steps.plain_seconds
    tally.stepped(step(2.5, draft_rows=4, drafter=0.5), policy)
    assert tally.steps.decode_seconds - before[0] == 3.0
    assert tally.steps.plain_seconds - before[1] == 2.0
    tally.stepped(step(9.0, prompt_rows=5), policy)  # reads a prompt: no measure
    assert tally.steps.decode_seconds - before[0] == 3.0
    assert tally.steps.busy_seconds == 8.0 + 4.0 + 50.0 + 3.0 + 9.0
    assert tally.steps.num_steps == 6


def test_a_policy_that_knows_costs_is_asked():
    curve = CostCurve((1, 8), (2.0, 4.0), request_seconds=0.5, position_seconds=0.1)
    policy = AdaptivePolicy(4, curve)
    assert PlainCosts().of(Load(1, 1, 10), policy) == curve.of_step(1, 1, 10)
    tally = Tally(4)
    tally.stepped(step(6.0, draft_rows=4, drafter=3.0), policy)
    assert tally.steps.mean_step_cost == pytest.approx(9.0 / curve.of_step(1, 1, 10))


def test_a_width_has_the_reason_that_mattered():
    judged = [
        Judged("a", "x", 4, 4, 1, False),
        Judged("b", "x", 4, 4, 4, True, limit="max_tokens"),  # it would not have been more
        Judged("c", "x", 2, 0, 0, False, limit="pages"),
        Judged("d", "y", 0, 0, 0, False, limit="request"),
    ]
    tally = Tally(4)
    tally.stepped(step(1.0, requests=4, judged=judged), FixedWidth(4))
    tally.stepped(step(1.0, requests=4, judged=judged[:1]), NoDrafts())
    widths = tally.types["x"].widths
    assert {reason: values.total for reason, values in widths.items()} == {
        "fixed": 8.0, "pages": 2.0, "disabled": 4.0,
    }  # fmt: skip
    assert set(tally.types["y"].widths) == {"request"}


def test_an_adaptive_policy_explains_itself():
    """Dear rows: hardly ever worth it, so what is drafted is a probe."""
    policy = AdaptivePolicy(5, CostCurve((1, 2, 32), (1.0, 2.0, 32.0)))
    words = []
    for _ in range(400):
        load = Load(1, 1, 10)
        (width,) = policy.widths(load, [_state()])
        record = StepRecord(load, [Judged("a", "x", width, width, 0, False)], width, 0.0, 1.0)
        words.append((policy.explain(record), width > 0))
        policy.observe(record)
    assert set(words) >= {("loses", False), ("probe", True)}
    assert all(word in ("pays", "probe") for word, drafted in words if drafted)
    assert words.count(("loses", False)) > 300


def test_a_plain_step_now_and_then_is_a_sample():
    policy = AdaptivePolicy(5, CostCurve((1, 8, 32), (1.0, 1.05, 1.5)))
    words = []
    for _ in range(60):
        load = Load(1, 1, 10)
        (width,) = policy.widths(load, [_state()])
        record = StepRecord(load, [Judged("a", "x", width, width, width, False)], width, 0.0, 1.1)
        words.append(policy.explain(record))
        policy.observe(record)
    assert set(words) <= {"pays", "sample"}
    assert 1 <= words.count("sample") <= 5


def _state():
    counts = AcceptanceCounts()
    counts.record(0, 0, 1)
    return RequestState("a", "x", num_positions=10, counts=counts)
