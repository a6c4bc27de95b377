"""Costs: curves through measured points, data sheets, experts."""

from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.planning.cost import CostCurve, Measured, Roofline, distinct_experts, fit


def test_points_are_joined_by_lines_and_the_last_one_goes_on() -> None:
    curve = CostCurve((1, 2, 4, 8), (1.0, 1.0, 1.5, 3.5))
    assert [curve.of_rows(n) for n in (0, 1, 2, 3, 4, 6, 8, 10)] == [
        0.0, 1.0, 1.0, 1.25, 1.5, 2.5, 3.5, 4.5,
    ]  # fmt: skip
    assert CostCurve((4,), (2.0,)).of_rows(8) == 4.0


@pytest.mark.parametrize("rows", [(1, 2, 4, 8), (4,), (3, 5)])
@pytest.mark.parametrize("first", [0, 1, 3, 7, 8, 20])
def test_many_row_counts_at_once_cost_what_each_does(rows: tuple[int, ...], first: int) -> None:
    curve = CostCurve(rows, tuple(0.5 + 0.1 * each for each in rows))
    for count in (0, 1, 12):
        each = [curve.of_rows(first + i) for i in range(count)]
        assert curve.of_each(first, count) == pytest.approx(each)


def test_a_fit_finds_what_each_part_costs() -> None:
    true = CostCurve((1, 2, 4, 8, 16), (1.0, 1.1, 1.3, 2.0, 4.0), 0.05, 1e-4, 3e-5)

    def measured(rows: int, requests: int, positions: int) -> Measured:
        seconds = true.of_step(rows, requests, requests * positions)
        further = (rows - requests) * positions * true.row_position_seconds
        return Measured(rows, requests, requests * positions, seconds + further)

    points = [measured(n, 1, 0) for n in (1, 2, 4, 8)]
    points += [measured(1, 1, 1000), measured(4, 1, 1000), measured(8, 8, 0), measured(16, 16, 0)]
    found = fit(points)
    assert found.rows == (*true.rows, 64)  # where the line through the last two has come to
    assert found.seconds == pytest.approx((*true.seconds, true.of_rows(64)))
    assert found.request_seconds == pytest.approx(0.05)
    assert found.position_seconds == pytest.approx(1e-4)
    assert found.row_position_seconds == pytest.approx(3e-5)


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=12))
def test_a_fit_never_falls_whatever_was_measured(seconds: list[float]) -> None:
    points = [Measured(n + 1, 1, 16, value) for n, value in enumerate(seconds)]
    curve = fit([*points, Measured(1, 1, 512, 0.001), Measured(8, 8, 128, 0.02)])
    assert list(curve.seconds) == sorted(curve.seconds)
    assert curve.seconds[0] > 0
    assert CostCurve.from_json(json.loads(json.dumps(curve.as_json()))) == curve


def test_a_fit_needs_a_plain_pass() -> None:
    with pytest.raises(ValueError, match="a pass of one row is needed"):
        fit([Measured(2, 1, 0, 1.0)])


def test_experts_are_those_that_a_random_routing_reads() -> None:
    assert distinct_experts(8, 2, 1) == pytest.approx(2.0)
    random, total = Random(0), 0
    for _ in range(4000):
        total += len({e for _ in range(5) for e in random.sample(range(8), 2)})
    assert distinct_experts(8, 2, 5) == pytest.approx(total / 4000, rel=0.02)
    assert distinct_experts(8, 8, 3) == 8.0


def test_a_data_sheet_is_flat_until_the_arithmetic_binds() -> None:
    sheet = Roofline(weights_gb=16, bandwidth_gb_s=3350, tflops=990)
    ridge = 990e12 / (2 * 8e9) * 16 / 3350
    assert sheet.seconds(1) == pytest.approx(16 / 3350)
    assert sheet.seconds(0.99 * ridge) == sheet.seconds(1)
    assert sheet.seconds(2 * ridge) == pytest.approx(2 * sheet.seconds(1))
    assert sheet.verify_cost(4) == [1.0] * 5


def test_a_sparse_target_reads_more_the_more_it_verifies_until_all_is_read() -> None:
    sheet = {"weights_gb": 60, "bandwidth_gb_s": 3350, "tflops": 990, "experts": 64}
    sparse = {**sheet, "experts_per_token": 8, "expert_share": 0.9}
    alone, many = Roofline(**sparse), Roofline(**sparse, requests=16)
    assert alone.verify_cost(4)[4] > 2.5
    assert many.verify_cost(4)[4] < 1.2


def test_long_contexts_make_verification_cheap() -> None:
    sheet = {"weights_gb": 16, "bandwidth_gb_s": 3350, "tflops": 300, "requests": 64}
    short = Roofline(**sheet)
    long = Roofline(**sheet, context=16000, kv_kb_per_position=128)
    assert long.verify_cost(4)[4] < short.verify_cost(4)[4]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weights_gb": 0}, "weights_gb must be above 0, got 0"),
        ({"overhead_ms": -1}, "overhead_ms must be 0 or more, got -1"),
        ({"experts": 4, "experts_per_token": 5}, r"experts_per_token must be in 1..4"),
        ({"expert_share": 2}, r"expert_share must be in \[0, 1\], got 2"),
        ({"parameters_b": 0}, "parameters_b must be above 0"),
    ],
)
def test_impossible_data_sheets_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Roofline(**{"weights_gb": 1, "bandwidth_gb_s": 1, "tflops": 1, **values})


@pytest.mark.parametrize(
    ("rows", "seconds", "message"),
    [
        ((), (), "0 row counts"),
        ((2, 1), (1.0, 2.0), "row counts must rise"),
        ((1, 2), (2.0, 1.0), "never fall"),
        ((1,), (0.0,), "above 0"),
    ],
)
def test_impossible_curves_are_refused(rows, seconds, message) -> None:
    with pytest.raises(ValueError, match=message):
        CostCurve(rows, seconds)


def test_requests_are_told_from_rows_by_passes_of_as_many_rows() -> None:
    """A row costs 1, a request beside the first 0.25, whatever the number of rows."""
    points = [Measured(1, 1, 0, 2.0), Measured(8, 1, 0, 9.0), Measured(8, 8, 0, 10.75)]
    points += [Measured(32, 32, 0, 33.0 + 0.25 * 31), Measured(32, 16, 0, 33.0 + 0.25 * 15)]
    curve = fit(points)
    assert curve.request_seconds == pytest.approx(0.25)
    assert curve.of_rows(32) == pytest.approx(33.0)
    assert curve.of_step(32, 16, 0) == pytest.approx(33.0 + 0.25 * 15)
