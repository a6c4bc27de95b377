"""Predictions, what is recommended, and the file that it is written to."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.bench.plan.check import checked
from foredraft.bench.plan.measure import Spent, TimedStep, Turns, usual_mean
from foredraft.bench.plan.plan import spread_over_tasks
from foredraft.bench.plan.predict import Drafting, Line, Machine, Prediction, predict
from foredraft.bench.plan.recommend import Candidate, Trial, choose_trials, ranges, recommend
from foredraft.bench.plan.trace import DraftedStep
from foredraft.bench.workload import Item
from foredraft.cli.plan_config_file import read_speculative_config, toml
from foredraft.core.errors import ConfigError
from foredraft.planning.cost import CostCurve

FREE = CostCurve((1, 64), (1.0, 1.0))
DEAR = CostCurve((1, 2, 64), (1.0, 2.0, 64.0))
NOTHING = Line(0.0)


def chain(position: int, drafted: int, accepted: int) -> DraftedStep:
    return DraftedStep(position, tuple(range(-1, drafted - 1)), tuple(range(accepted)))


# Half of the steps find nothing; the others have 3 of 4 accepted.
HALF = [[chain(0, 4, 3), chain(4, 0, 0), chain(5, 4, 3), chain(9, 0, 0)]]


def candidate(curve: CostCurve, name: str = "ngram", drafter: Line = NOTHING) -> Candidate:
    drafting, machine = Drafting(HALF, drafter, NOTHING), Machine(curve, 0.0)
    loads = {n: [predict(drafting, machine, k, n) for k in range(1, 5)] for n in (1, 4)}
    return Candidate({"method": name}, drafting, loads)


def test_plain_decoding_is_predicted_to_be_itself() -> None:
    for curve in (FREE, DEAR):
        for requests in (1, 3):
            found = predict(Drafting(HALF, Line(9.0), NOTHING), Machine(curve, 0.2), 0, requests)
            assert found.speedup == pytest.approx(1.0)


def test_steps_that_find_nothing_cost_one_row() -> None:
    machine = Machine(DEAR, 0.0)
    found = predict(Drafting(HALF, NOTHING, NOTHING), machine, 4)
    assert found.tokens == pytest.approx(10 / 4)
    assert found.step_cost == pytest.approx((5 + 1) / 2)
    free = predict(Drafting(HALF, NOTHING, NOTHING), Machine(FREE, 0.0), 4)
    assert free.speedup == pytest.approx(2.5)


def test_the_drafters_time_and_the_rest_count() -> None:
    found = predict(Drafting(HALF, Line(0.5, 0.25), Line(1.0)), Machine(FREE, 1.0), 4)
    # Of a mean step: a pass, 2 nodes, a rest; of a plain one: a pass and a rest.
    assert found.step_cost == pytest.approx((1.0 + 0.5 + 0.25 * 2 + 1.0) / 2.0)


def test_a_drafter_that_runs_a_model_is_shared_and_may_change_what_passes_cost() -> None:
    curve = CostCurve((1, 64), (1.0, 1.0))
    alone = Drafting(HALF, Line(0.5), NOTHING)
    together = Drafting(HALF, Line(0.5), NOTHING, shared=True, pass_factor=0.5)
    machine = Machine(curve, 0.0)
    assert predict(alone, machine, 4, 3).step_cost == pytest.approx(1.0 + 3 * 0.5)
    # One in eight steps of three requests finds nothing and is a plain pass.
    cost = 0.5 + 0.5 * 7 / 8 + 1 / 8
    assert predict(together, machine, 4, 3).step_cost == pytest.approx(cost)


def test_several_requests_draft_independently() -> None:
    found = predict(Drafting(HALF, NOTHING, NOTHING), Machine(DEAR, 0.0), 4, requests=2)
    assert found.step_cost == pytest.approx((2 + 4) / 2)  # the costs are linear: the mean will do
    steps = CostCurve((1, 2, 6, 10), (1.0, 1.0, 1.0, 5.0))
    found = predict(Drafting(HALF, NOTHING, NOTHING), Machine(steps, 0.0), 4, requests=2)
    assert found.step_cost == pytest.approx(0.25 * 1 + 0.5 * 1 + 0.25 * 5)


def test_a_line_never_falls_and_is_never_below_0() -> None:
    line = Line.through((1.0, 3.0), (5.0, 7.0))
    assert (line.at(0), line.at(8)) == (pytest.approx(2.0), pytest.approx(10.0))
    assert Line.through((1.0, 3.0), (5.0, 1.0)) == Line(2.0, 0.0)
    assert Line.through((2.0, 1.0), (4.0, 3.0)) == Line(0.0, 2.0 / 3.0)
    assert Line.through((0.0, 0.0), (0.0, 0.0)) == Line(0.0, 0.0)


def test_a_curve_is_corrected_by_the_passes_that_were_seen() -> None:
    curve = CostCurve((1, 5), (1.0, 2.0), position_seconds=0.01)
    seen = {1: (100, 100.0, 4.0), 5: (100, 100.0, 3.0), 3: (2, 100.0, 99.0)}
    machine = Machine.seen(curve, seen, 0.0)
    assert machine.pass_seconds(1, 100) == pytest.approx(4.0)
    # At 5 rows it was seen to be no dearer than it was thought to be, and it never falls.
    assert machine.pass_seconds(5, 100) == pytest.approx(4.0)
    assert Machine.seen(curve, {}, 0.0).curve == curve


def test_costs_of_other_minutes_are_those_of_passes_read_then() -> None:
    curve = CostCurve((1, 5, 9), (1.0, 1.2, 1.4), 0.1, 0.01, 0.001)
    before, now = {1: 2.0, 5: 3.0, 9: 4.0}, {1: 4.0, 5: 3.0, 9: 8.0}
    then = Machine(curve, 0.3).when(before, now)
    assert then.curve.of_rows(1) == pytest.approx(2.0)
    assert then.curve.of_rows(5) == pytest.approx(2.0)  # 1.2, but no pass costs less than a smaller
    assert then.curve.of_rows(9) == pytest.approx(2.8)
    assert (then.plain_rest, then.slowness) == (0.3, 2.0)
    for nothing in ({}, {5: 9.0}):  # a pass of one row wasn't read
        assert Machine(curve, 0.3).when(before, nothing) == Machine(curve, 0.3)
    assert then.curve.position_seconds == pytest.approx(0.02)
    same = Machine(curve, 0.3).when(before, before)
    assert all(same.curve.of_rows(n) == pytest.approx(curve.of_rows(n)) for n in range(1, 20))


def test_a_drafter_that_runs_a_model_is_as_slow_as_passes_are() -> None:
    fast = Machine(CostCurve((1, 64), (1.0, 1.0)), 0.0)
    slow = fast.when({1: 1.0}, {1: 2.0})
    paid, free = Drafting(HALF, Line(1.0), NOTHING, True), Drafting(HALF, Line(1.0), NOTHING)
    assert predict(paid, slow, 4).speedup == pytest.approx(predict(paid, fast, 4).speedup)
    assert predict(free, slow, 4).speedup > predict(free, fast, 4).speedup


def test_predictions_are_judged_at_the_costs_of_the_check() -> None:
    (trial,) = choose_trials([candidate(DEAR)], {"speculative_config": None}, 1, 1)

    def turns(tokens: int, seconds: float) -> Turns:
        return Turns("", [[Spent([TimedStep(1, 0, tokens, 0, 0.0, seconds, 0.0)])]], [[[1]]])

    steps = trial.on(Machine(FREE, 0.0))
    assert steps.speedup > trial.predicted.speedup
    result = checked(
        turns(10, 10.0), [turns(10, 10.0 / steps.speedup)], [trial], Machine(FREE, 0.0)
    )
    (found,) = result["configs"]
    assert found["predicted"] == trial.predicted.speedup
    assert found["predicted_at_pace"] == pytest.approx(found["measured"])
    assert result["num_close"] == 1
    plain = Trial("plain", {}, Prediction(0, 1, 1.0, 1.0), trial.drafting)
    assert plain.on(Machine(FREE, 0.0)) == plain.predicted


def test_nothing_is_recommended_where_nothing_pays() -> None:
    found = recommend([candidate(DEAR)], Machine(DEAR, 0.0), [1, 4])
    assert found["speculative_config"] is None
    assert found["reasons"][0] == "plain decoding: nothing pays here"
    assert "ngram: at its best" in found["reasons"][1]


def test_the_best_drafter_is_recommended_with_its_reasons() -> None:
    free, slow = candidate(FREE), candidate(FREE, "suffix", Line(1.0))
    found = recommend([slow, free], Machine(FREE, 0.0), [1, 4])
    assert found["label"] == "ngram"
    assert found["speculative_config"] == {"method": "ngram", "num_speculative_tokens": 3}
    words = " ".join(found["reasons"])
    assert "speed-up 2.50 for one request = 2.50 tokens a step" in words
    assert "finds a draft in 50% of its steps; accepted by position: 100%, 100%, 100%, 0%" in words
    assert "next best: suffix" in words


def test_draft_lengths_by_load_are_ranges() -> None:
    assert ranges([1, 2, 4, 8, 16], [8, 8, 4, 1, 0]) == [[1, 2, 8], [3, 4, 4], [5, 8, 1]]
    assert ranges([4, 8], [0, 2]) == [[1, 4, 0], [5, 8, 2]]
    curve = CostCurve((1, 5, 6, 64), (1.0, 1.0, 9.0, 99.0))
    found = recommend([candidate(curve)], Machine(curve, 0.0), [1, 4])
    config = found["speculative_config"]
    assert config["num_speculative_tokens"] == 3
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 1, 3]]


def test_trials_reach_from_the_worst_to_the_best() -> None:
    candidates = [candidate(FREE), candidate(DEAR, "suffix")]
    advice = recommend(candidates, Machine(FREE, 0.0), [1, 4])
    trials = choose_trials(candidates, advice, 1, 4)
    assert trials[0].config == advice["speculative_config"]
    predicted = [trial.predicted.speedup for trial in trials[1:]]
    assert predicted == sorted(predicted)
    assert predicted[0] < 1 < predicted[-1]
    assert len(choose_trials(candidates, advice, 1, 99)) == 8
    assert choose_trials(candidates, advice, 1, 0) == []


def test_prompts_are_taken_from_all_tasks_in_turn() -> None:
    items = [Item(f"{task}{n}", task, ("x",)) for task in ("a", "b") for n in range(2)]
    assert [item.id for item in spread_over_tasks(items, 3)] == ["a0", "b0", "a1"]
    assert len(spread_over_tasks(items, 9)) == 4


def timed(seconds: float) -> TimedStep:
    return TimedStep(1, 0, tokens=2, nodes=0, drafter=0.0, target=seconds, rest=0.0)


def test_a_busy_minute_does_not_count() -> None:
    assert usual_mean([1.0] * 19 + [100.0]) == pytest.approx(1.0 + 0.5 / 20)
    assert usual_mean([]) == 0.0


def test_answers_of_all_repeats_count_alike() -> None:
    repeats = [[Spent([timed(1.0)])], [Spent([timed(3.0)])]]
    found = Turns("x", repeats)
    assert found.tokens_per_second() == pytest.approx(4 / (1.0 + 1.5))  # the second one is bounded
    assert Turns("x").tokens_per_second() == 0.0


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner.filter(lambda v: v is not None), max_size=3)
    | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


@given(st.text(), st.dictionaries(st.text(), VALUES, max_size=4), st.text())
def test_a_configuration_file_is_read_back(model: str, config: dict[str, Any], words: str) -> None:
    found = tomllib.loads(toml(model, config, [words]))
    assert found == {"model": model, "speculative_config": without_nulls(config)}


def test_a_configuration_file_may_say_plain(tmp_path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(toml("m", None, ["nothing pays"]))
    assert read_speculative_config(str(path)) is None
    path.write_text(toml("m", {"method": "ngram"}))
    assert read_speculative_config(str(path)) == {"method": "ngram"}


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"x = ", "is not TOML"), (b"\xff", "is not TOML"), (b"model = 'm'", "needs a table")],
)
def test_a_damaged_configuration_file_is_refused(tmp_path, data: bytes, words: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=words):
        read_speculative_config(str(path))
    with pytest.raises(ConfigError, match="cannot read"):
        read_speculative_config(str(tmp_path / "none.toml"))
