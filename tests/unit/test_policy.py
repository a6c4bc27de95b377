"""The online choice: against enumeration, and in the situations that it must see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product
from operator import mul
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.core.counts import AcceptanceCounts
from foredraft.planning.adaptive import PROBE_EVERY, AdaptivePolicy
from foredraft.planning.allocation import (
    Costs,
    Objective,
    Prospect,
    allocate,
    best_nodes,
    rows_that_count,
    score,
)
from foredraft.planning.cost import CostCurve
from foredraft.planning.estimates import Estimates, Outlook
from foredraft.planning.policy import (
    MAX_TYPES,
    Judged,
    Load,
    Offer,
    RequestState,
    StepRecord,
    WidthByBatchSize,
)

FREE = CostCurve((1, 64), (1.0, 1.0001))
LINEAR = CostCurve((1, 64), (1.0, 64.0))
CPU = CostCurve((1, 2, 4, 6, 8, 16, 32), (1.0, 1.04, 1.15, 1.55, 2.0, 3.8, 7.5))


def prospect(rates: Sequence[float], filled: float = 1.0, weight: float = 1.0) -> Prospect:
    outlook = Outlook(list(accumulate(rates, mul)), [filled] * len(rates))
    return Prospect(outlook, weight=weight)


rates = st.lists(st.floats(0.0, 1.0), max_size=3)
stairs = st.lists(st.floats(0.0, 0.8), min_size=13, max_size=13)


def curve_of(steps: Sequence[float]) -> CostCurve:
    return CostCurve(tuple(range(1, 15)), tuple(accumulate(steps, initial=1.0)))


weights = st.floats(0.1, 4.0)


@given(
    st.lists(st.tuples(rates, weights), min_size=1, max_size=3), stairs,
    st.sampled_from(list(Objective)),
)  # fmt: skip
def test_the_widths_are_the_best_of_all(
    weighed: list[tuple[list[float], float]], steps: list[float], objective: Objective
) -> None:
    load, requests = Load(len(weighed), len(weighed)), [each for each, _ in weighed]
    prospects = [prospect(each, weight=weight) for each, weight in weighed]
    costs = Costs(curve_of(steps))
    best, plain = allocate(load, prospects, costs, objective)
    every = [
        score(widths, load, prospects, costs, objective)
        for widths in product(*(range(len(each) + 1) for each in requests))
    ]
    assert best.score == pytest.approx(max(every))
    assert best.score == pytest.approx(score(best.widths, load, prospects, costs, objective))
    assert plain.score == pytest.approx(every[0])


@given(
    st.lists(rates, min_size=1, max_size=3), stairs, st.sampled_from(list(Objective)),
    st.integers(0, 2), st.integers(0, 5),
)  # fmt: skip
def test_of_drafts_that_are_there_the_best_nodes_are_verified(
    requests: list[list[float]], steps: list[float], objective: Objective, others: int, read: int
) -> None:
    """By trying every choice, with requests that have no draft and rows that read their context."""
    count = len(requests) + others
    load, curve = Load(count, count + 1, 7), replace(curve_of(steps), row_position_seconds=0.01)
    gains = [list(accumulate(each, mul)) for each in requests]
    positions = [read * (index + 1) for index in range(len(gains))]

    def value(widths: Sequence[int]) -> float:
        rows = rows_that_count(load, objective)
        passes = curve.of_rows(rows + sum(widths)) + curve.beside_rows(count, 7)
        passes += 0.01 * sum(width * each for width, each in zip(widths, positions, strict=True))
        brought = sum(sum(each[:width]) for each, width in zip(gains, widths, strict=True))
        return (rows + brought) / passes

    found = best_nodes(load, gains, positions, curve, objective)
    every = product(*(range(len(each) + 1) for each in gains))
    if read:  # rows cost unlike then, and the likeliest nodes need not be the best
        assert value(found) >= value([0] * len(gains))
    else:
        assert value(found) == pytest.approx(max(map(value, every)))


@given(rates, st.floats(0.0, 1.0), st.floats(0.0, 0.5), stairs)
def test_one_request_whose_drafter_is_often_silent(
    acceptance: list[float], filled: float, draft_ratio: float, steps: list[float]
) -> None:
    """Tokens a second in the long run: silent steps are plain ones, and the drafter is paid."""
    costs = Costs(curve_of(steps), draft_ratio)
    best, _ = allocate(Load(1, 1), [prospect(acceptance, filled)], costs, Objective.THROUGHPUT)
    every = []
    for width in range(len(acceptance) + 1):
        gain = sum(accumulate(acceptance[:width], mul))
        passes = costs.curve.of_rows(1 + width) * filled + (1.0 - filled)
        every.append((1.0 + filled * gain) / (passes + draft_ratio * width))
    assert best.score == pytest.approx(max(every))


def test_prompts_that_fill_the_pass_leave_nothing_to_drafts() -> None:
    one = [prospect([0.8, 0.8, 0.8])]
    alone, _ = allocate(Load(1, 1), one, Costs(CPU), Objective.THROUGHPUT)
    crowded, _ = allocate(Load(2, 200), one, Costs(CPU), Objective.THROUGHPUT)
    assert alone.widths == [3]
    assert crowded.widths == [0]


def test_the_objectives_part_where_prompts_wait() -> None:
    """For the request that decodes a row more is little; for the batch a prompt's row less."""
    one = [prospect([0.8, 0.8, 0.8])]
    crowded, _ = allocate(Load(2, 30), one, Costs(CPU), Objective.LATENCY)
    assert crowded.widths == [3]
    assert allocate(Load(2, 30), one, Costs(CPU), Objective.THROUGHPUT)[0].widths == [0]


@pytest.mark.parametrize("objective", list(Objective))
def test_rows_go_to_the_request_that_is_always_right(objective: Objective) -> None:
    """With either objective, as long as their tokens are worth the same: the other one has its
    turn in steps in which it is likelier.
    """
    steep = Costs(CostCurve((1, 4, 6), (1.0, 1.1, 9.0)))
    pair = [prospect([1.0, 1.0]), prospect([0.9, 0.9])]
    assert allocate(Load(2, 2), pair, steep, objective)[0].widths == [2, 0]


@pytest.mark.parametrize("objective", list(Objective))
def test_the_slow_reader_comes_first_under_latency_alone(objective: Objective) -> None:
    """Both ways in which widths are settled: before drafts are there, and among their nodes."""
    policy = AdaptivePolicy(4, CPU, objective=objective)
    states = [RequestState("fast", "greedy"), RequestState("slow", "greedy")]
    drafts = [Offer(each.id, "greedy", 0, (-1, 0, 1), (0.6, 0.6, 0.6)) for each in states]
    load = Load(6, 6)
    assert len({*policy.widths(load, states)}) == len({*map(len, policy.keep(load, drafts))}) == 1
    for _ in range(30):  # fewer than to the first probe
        judged = [Judged("fast", "", 0, 0, 3, ended=False), Judged("slow", "", 0, 0, 0, False)]
        policy.observe(StepRecord(Load(2, 2), judged, 0, 0.0, CPU.of_rows(2)))
    fast, slow = map(len, policy.keep(load, drafts))
    wide, wider = policy.widths(load, states)
    if objective is Objective.THROUGHPUT:
        assert fast == slow
        assert wide == wider
    else:
        assert fast < slow
        assert wide < wider
    policy.release("fast")
    policy.release("slow")
    assert policy._readers is None or not policy._readers._seen


class Served:
    """One batch of requests that decode, with a coin for each draft token."""

    def __init__(
        self,
        policy: AdaptivePolicy,
        num_requests: int,
        seed: int = 0,
        drafter_seconds: float = 0.0,
    ) -> None:
        """`drafter_seconds`: of a step that asks for anything."""
        self.policy = policy
        self.drafter_seconds = drafter_seconds
        self.spent = 0.0
        self.random = Random(seed)
        self.ids = [str(i) for i in range(num_requests)]
        self.counts = {i: AcceptanceCounts(num_emitted_tokens=1) for i in self.ids}
        self.positions = 100

    def step(self, rate: float, filled: float = 1.0, max_width: int = 99) -> list[int]:
        load = Load(len(self.ids), len(self.ids), self.positions * len(self.ids))
        states = [
            RequestState(i, "greedy", max_width, self.positions, self.counts[i]) for i in self.ids
        ]
        widths = list(self.policy.widths(load, states))
        assert widths == list(self.policy.widths(load, states))  # pure
        judged = []
        for each, width in zip(self.ids, widths, strict=True):
            drafted = width if self.random.random() < filled else 0
            accepted = 0
            while accepted < drafted and self.random.random() < rate:
                accepted += 1
            judged.append(Judged(each, "greedy", width, drafted, accepted, False))
        rows = sum(each.drafted for each in judged)
        curve = self.policy.costs.curve
        seconds = curve.of_step(load.num_rows + rows, load.num_requests, load.num_positions)
        drafting = self.drafter_seconds if any(widths) else 0.0
        self.spent += drafting
        self.policy.observe(StepRecord(load, judged, rows, drafting, seconds))
        return widths

    def steps(self, count: int, rate: float, filled: float = 1.0) -> list[int]:
        """Draft tokens asked for in each step."""
        return [sum(self.step(rate, filled)) for _ in range(count)]


def test_it_drafts_at_once_and_fully_where_all_is_accepted() -> None:
    served = Served(AdaptivePolicy(5, CPU), 1)
    widths = served.steps(60, rate=1.0)
    assert widths[0] > 0
    assert sum(widths[20:]) / 40 > 4.5


def test_it_falls_silent_where_nothing_is_accepted_and_goes_on_asking_now_and_then() -> None:
    served = Served(AdaptivePolicy(5, CPU), 1)
    served.steps(40, rate=0.0)
    later = served.steps(640, rate=0.0)
    assert 1 <= sum(width > 0 for width in later) <= 640 / PROBE_EVERY + 1
    assert max(later) <= 2


def test_probes_are_paid_from_their_share_of_the_time() -> None:
    """A row costs as much as a pass here: one per cent of the time is one row in a hundred."""
    served = Served(AdaptivePolicy(5, LINEAR), 1)
    served.steps(40, rate=0.0)
    assert sum(served.steps(2000, rate=0.0)) <= 1.1 * 2000 / 100


def test_a_probe_that_takes_long_is_a_debt() -> None:
    """A draft model reads a whole prompt for its first draft: 50 passes here."""
    served = Served(AdaptivePolicy(5, CPU, 0.9), 1, drafter_seconds=50.0)
    served.steps(4000, rate=0.0)
    assert 0.0 < served.spent <= 0.01 * 4000 + 2 * 50.0


@pytest.mark.parametrize(("rate", "pays"), [(0.45, False), (0.97, True)])
def test_a_drafter_with_rows_of_its_own_is_asked_for_all_or_nothing(
    rate: float, pays: bool
) -> None:
    """Two guesses beside six rows of a window: without the window there would be no guesses."""
    policy, coins, load = AdaptivePolicy(8, CPU), Random(0), Load(1, 1, 100)
    counts = AcceptanceCounts(num_emitted_tokens=1)
    widths = []
    for _ in range(400):
        (width,) = policy.widths(load, [RequestState("r", "greedy", 99, 100, counts)])
        accepted = 0
        while accepted < min(2, width) and coins.random() < rate:
            accepted += 1
        own, guesses = (6, 2) if width else (0, 0)
        judged = Judged("r", "greedy", width, guesses, accepted, False, num_own=own)
        seconds = CPU.of_step(1 + own + guesses, 1, 100)
        policy.observe(StepRecord(load, [judged], own + guesses, 0.0, seconds))
        widths.append(width)
    assert set(widths[1:]) <= {0, 8}
    assert (sum(widths[200:]) > 8 * 150) is pays


def test_a_drafter_that_stops_being_right_is_noticed_within_some_tens_of_tokens() -> None:
    served = Served(AdaptivePolicy(5, CPU), 1)
    served.steps(300, rate=0.95)
    after = served.steps(60, rate=0.0)
    assert sum(after[:40]) <= 90
    assert sum(width > 0 for width in after[40:]) <= 4


def test_a_drafter_that_is_right_again_is_heard() -> None:
    served = Served(AdaptivePolicy(5, CPU), 1)
    served.steps(300, rate=0.0)
    after = served.steps(150, rate=0.95)
    assert sum(after[100:]) / 50 > 3.5


def test_a_full_batch_is_left_alone_where_an_empty_one_is_drafted_for() -> None:
    drafted = []
    for batch in (1, 4, 16):
        widths = Served(AdaptivePolicy(5, CPU), batch).steps(60, rate=0.7)
        drafted.append(sum(widths[20:]) / 40 / batch)
    assert drafted[0] > 1.5
    assert drafted[0] > drafted[1] > drafted[2]
    assert drafted[2] < 0.1


def test_silent_drafts_are_no_failures() -> None:
    """A drafter that has something in one step of five, and is right then."""
    served = Served(AdaptivePolicy(5, CPU), 1)
    assert sum(served.steps(200, rate=0.95, filled=0.2)[50:]) / 150 > 4


def test_a_request_near_its_end_is_not_drafted_beyond_it() -> None:
    served = Served(AdaptivePolicy(5, FREE), 1)
    assert served.step(1.0, max_width=2) == [2]
    assert served.step(1.0, max_width=0) == [0]


def test_long_contexts_change_what_a_draft_is_worth() -> None:
    """Where keys and values are most of a pass a row is cheap beside it; where every row reads
    them anew it is dear.
    """
    shared = replace(CPU, position_seconds=1e-3)
    anew = replace(CPU, row_position_seconds=1e-3)
    one = Prospect(Outlook([0.4, 0.2, 0.1], [1.0] * 3), num_positions=8000)
    load = Load(1, 1, 8000)
    assert allocate(load, [one], Costs(shared), Objective.THROUGHPUT)[0].widths == [3]
    assert allocate(load, [one], Costs(anew), Objective.THROUGHPUT)[0].widths == [0]


def test_a_dear_drafter_drafts_less() -> None:
    widths = [
        allocate(Load(1, 1), [prospect([0.8] * 8)], Costs(FREE, ratio), Objective.THROUGHPUT)[0]
        for ratio in (0.0, 0.1, 0.3, 0.9)
    ]
    assert [sum(each.widths) for each in widths] == sorted(
        (sum(each.widths) for each in widths), reverse=True
    )
    assert widths[0].widths == [8]
    assert widths[3].widths == [0]


def test_the_drafters_cost_is_learnt_from_steps() -> None:
    policy = AdaptivePolicy(4, CPU, draft_ratio=0.5)
    load, counts = Load(1, 1), AcceptanceCounts(num_emitted_tokens=1)
    for _ in range(80):
        (width,) = policy.widths(load, [RequestState("a", counts=counts)])
        judged = Judged("a", "", width or 1, width or 1, width or 1, False)
        rows = judged.drafted
        policy.observe(StepRecord(load, [judged], rows, 0.1 * rows, CPU.of_rows(1 + rows)))
    assert policy.costs.draft_ratio == pytest.approx(0.1, rel=0.2)


def test_near_the_break_even_nothing_flutters() -> None:
    """A row costs what it brings: drafting needs a margin to begin."""
    served = Served(AdaptivePolicy(1, CostCurve((1, 2), (1.0, 1.5))), 1, seed=3)
    widths = served.steps(600, rate=0.5)
    changes = sum((a > 0) != (b > 0) for a, b in pairwise(widths))
    assert changes < 60


def test_a_new_request_leans_on_its_type_and_then_on_itself() -> None:
    estimates = Estimates()
    for _ in range(100):
        estimates.add(Judged("old", "greedy", 3, 3, 0, False))
    assert estimates.outlook("fresh", "greedy", 1).survival[0] < 0.1
    assert estimates.outlook("fresh", "temperature 1.0", 1).survival[0] > 0.5
    for _ in range(20):
        estimates.add(Judged("fresh", "greedy", 3, 3, 3, False))
    assert estimates.outlook("fresh", "greedy", 1).survival[0] > 0.5
    estimates.release("fresh")
    assert estimates.outlook("fresh", "greedy", 1).survival[0] < 0.4


def test_an_ended_request_is_forgotten() -> None:
    policy = AdaptivePolicy(4, CPU)
    for number in range(50):
        judged = Judged(str(number), "greedy", 4, 4, 2, ended=False)
        policy.observe(StepRecord(Load(1, 1), [judged], 4, 0.0, 1.0))
        policy.observe(StepRecord(Load(1, 1), [replace(judged, ended=True)], 4, 0.0, 1.0))
        policy.release(str(number))
    assert not policy._estimates._requests
    assert not policy._last_draft


def test_types_without_end_are_told_apart_up_to_a_number() -> None:
    estimates = Estimates()
    for number in range(10 * MAX_TYPES):
        accepted = 2 if number < MAX_TYPES else 0
        estimates.add(Judged("", f"kind {number}", 2, 2, accepted, ended=True))
    assert len(estimates._types) == MAX_TYPES + 1  # all further ones share what they teach
    first, later, new = (
        estimates.outlook("", kind, 1).survival[0] for kind in ("kind 0", "kind 70", "kind 999")
    )
    assert first > later == new


def test_batch_sizes_choose_widths() -> None:
    policy = WidthByBatchSize(((1, 2, 5), (3, 8, 1)))
    chosen = [policy.widths(Load(n, n), [RequestState("a")] * 2) for n in (1, 2, 3, 8, 9)]
    assert chosen == [[5, 5], [5, 5], [1, 1], [1, 1], [0, 0]]


@pytest.mark.parametrize(
    "ranges", [(), ((2, 4, 1),), ((1, 4, 1), (6, 8, 0)), ((1, 0, 1),), ((1, 4, -1),)]
)
def test_batch_sizes_must_follow_one_another(ranges: tuple[tuple[int, int, int], ...]) -> None:
    with pytest.raises(ValueError, match=r"\[start, end, K\]"):
        WidthByBatchSize(ranges)
