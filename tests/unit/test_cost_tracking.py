"""What steps cost by now: what a step teaches of others, and what is forgotten."""

from __future__ import annotations

from math import isfinite
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.planning.cost import CostCurve, Measured, fit
from foredraft.planning.cost_tracking import BACK, LONGEST, CostTracker

CPU = CostCurve((1, 2, 4, 8, 16, 32, 64), (1.0, 1.05, 1.2, 2.0, 3.9, 7.6, 15.0))


def taught(tracker: CostTracker, rows: int, seconds: float, times: int = 1) -> CostCurve:
    """The curve after so many steps of one request at no context."""
    for _ in range(times):
        tracker.learn(rows, 1, 0, 0.0, seconds)
        tracker.passed(seconds)
    return tracker.curve


def test_a_machine_that_slows_down_changes_no_ratio_by_much() -> None:
    curve = taught(CostTracker(CPU), 1, 1.5, 200)
    assert curve.of_rows(1) == pytest.approx(1.5, rel=0.01)
    assert curve.of_rows(2) / curve.of_rows(1) == pytest.approx(1.05, rel=0.05)
    assert 1.3 * 15.0 <= curve.of_rows(64) <= 1.5 * 15.0


@pytest.mark.parametrize("pace", [0.5, 2.0])
def test_rows_that_are_not_tried_follow_those_next_to_them(pace: float) -> None:
    """Start-up was busy, or serving is: whether further rows pay must not seem to change."""
    curve = taught(CostTracker(CPU), 32, pace * CPU.of_rows(32), 300)
    assert curve.of_rows(32) == pytest.approx(pace * CPU.of_rows(32), rel=0.01)
    assert curve.of_rows(64) == pytest.approx(pace * CPU.of_rows(64), rel=0.07)


def test_a_change_of_pace_is_followed_at_once() -> None:
    tracker = CostTracker(CPU)
    taught(tracker, 4, 1.2, 500)
    assert taught(tracker, 4, 1.8, 20).of_rows(4) == pytest.approx(1.8, rel=0.05)
    assert taught(tracker, 4, 1.2, 20).of_rows(4) == pytest.approx(1.2, rel=0.05)


def test_steps_of_several_sizes_correct_the_shape() -> None:
    tracker = CostTracker(CostCurve((1, 2, 4), (1.0, 1.0, 1.0)))
    true, random = {1: 1.0, 4: 1.8}, Random(1)
    for _ in range(500):
        rows = random.choice((1, 4))
        curve = taught(tracker, rows, true[rows] * random.gauss(1.0, 0.05))
    assert curve.of_rows(4) / curve.of_rows(1) == pytest.approx(1.8, rel=0.05)


def test_one_step_that_hung_teaches_little() -> None:
    tracker = CostTracker(CPU)
    usual = taught(tracker, 1, 1.0, 50)
    assert taught(tracker, 1, 99.0).of_rows(1) < 1.1 * usual.of_rows(1)
    assert taught(tracker, 1, 1.0, 5).of_rows(1) == pytest.approx(1.0, rel=0.05)


def test_what_was_just_seen_holds_where_other_points_contradict_it() -> None:
    """Costs never fall: it is the point that nobody has looked at that gives way."""
    tracker = CostTracker(CostCurve((1, 8, 32), (1.0, 1.0, 1.0)))
    taught(tracker, 1, 1.3, 50)
    tracker.passed(1.0)
    curve = taught(tracker, 32, 1.0, 50)
    assert curve.of_rows(32) == pytest.approx(1.0, rel=0.03)
    assert curve.of_rows(8) <= 1.03


def test_what_is_learnt_of_the_last_pass_measured_tilts_no_line_beyond_it() -> None:
    """A crowd whose plain steps take longer than passes would else never draft, and never learn
    what further rows really cost.
    """
    tracker = CostTracker(fit([Measured(n, 1, 0, s) for n, s in ((1, 1.0), (8, 2.0), (16, 4.0))]))
    before = tracker.curve.of_rows(24) - tracker.curve.of_rows(16)
    curve = taught(tracker, 16, 4.8, 500)
    assert curve.of_rows(16) == pytest.approx(4.8, rel=0.01)
    assert curve.of_rows(24) - curve.of_rows(16) <= 1.2 * before
    for _ in range(500):  # and what they cost is learnt where they are tried, far behind it
        taught(tracker, 16, 4.8)
        taught(tracker, 40, 9.6)
    assert tracker.curve.of_rows(40) == pytest.approx(9.6, rel=0.02)


def test_what_a_slow_minute_taught_is_not_kept_of_rows_that_are_not_seen_again() -> None:
    """Rows that look dear are not tried: their cost must come back by what others take."""
    tracker = CostTracker(CPU)
    for _ in range(300):
        taught(tracker, 32, 1.4 * CPU.of_rows(32))
        taught(tracker, 64, 1.4 * CPU.of_rows(64))
    at_once = taught(tracker, 32, CPU.of_rows(32), 30)
    assert at_once.of_rows(64) < 1.25 * CPU.of_rows(64)  # it has followed
    later = taught(tracker, 32, CPU.of_rows(32), int(2 * BACK / LONGEST))
    assert later.of_rows(64) == pytest.approx(CPU.of_rows(64), rel=0.03)
    assert later.of_rows(32) == pytest.approx(CPU.of_rows(32), rel=0.02)


def test_requests_and_context_are_told_from_rows_by_steps_that_carry_them() -> None:
    first = CostCurve(CPU.rows, CPU.seconds, 0.01, 1e-4, 2e-5)
    true = CostCurve(CPU.rows, CPU.seconds, 0.03, 2e-4, 4e-5)
    tracker, random = CostTracker(first), Random(2)
    for _ in range(800):
        requests, drafts = random.choice((1, 8, 32)), random.choice((0, 1, 3))
        positions, rows = requests * random.randrange(50, 2000), requests * (1 + drafts)
        further = drafts * positions
        seconds = true.of_step(rows, requests, positions) + true.row_position_seconds * further
        seconds *= random.gauss(1.0, 0.03)
        tracker.learn(rows, requests, positions, further, seconds)
        tracker.passed(seconds)
    found = tracker.curve
    for rows, requests, positions in ((1, 1, 100), (32, 32, 20_000), (64, 32, 40_000)):
        expected = true.of_step(rows, requests, positions)
        assert found.of_step(rows, requests, positions) == pytest.approx(expected, rel=0.05)
    assert found.request_seconds == pytest.approx(true.request_seconds, rel=0.25)


@pytest.mark.parametrize("rows", [(1,), (4,), (3, 5)])
@pytest.mark.parametrize("seen", [1, 4, 50])
def test_few_points_follow_too(rows: tuple[int, ...], seen: int) -> None:
    curve = CostCurve(rows, tuple(float(each) for each in rows))
    expected = curve.of_rows(seen)
    found = taught(CostTracker(curve), seen, 1.3 * expected, 100)
    assert found.of_rows(seen) == pytest.approx(1.3 * expected, rel=0.02)


steps = st.tuples(
    st.integers(1, 300), st.integers(1, 64), st.integers(0, 100_000),
    st.floats(0.0, 1e5), st.one_of(st.floats(0.0, 1e3), st.sampled_from([0.0, 1e-12, 1e9])),
    st.floats(0.0, 1e4),
)  # fmt: skip


@given(st.lists(steps, max_size=30))
def test_whatever_steps_take_the_costs_are_costs(seen: list[tuple]) -> None:
    tracker = CostTracker(CostCurve(CPU.rows, CPU.seconds, 0.01, 1e-6, 1e-7))
    for rows, requests, positions, further, seconds, passed in seen:
        tracker.learn(rows, requests, positions, further, seconds)
        tracker.passed(passed)
        curve = tracker.curve
        assert list(curve.seconds) == sorted(curve.seconds)
        assert all(isfinite(each) and each > 0.0 for each in curve.seconds)
        assert isfinite(curve.request_seconds)
        assert isfinite(curve.position_seconds)
    known = tracker._known
    assert np.allclose(known, known.T)
    assert np.linalg.eigvalsh(known).min() > -1e-9
