"""How a plan measures: turns by steps, memory that was touched, passes read meanwhile."""

from __future__ import annotations

import pytest

from foredraft import SamplingParams
from foredraft.bench.plan.measure import BEFORE_A_RUN, Bench, Runner, in_turns
from foredraft.bench.plan.plan import PlanSettings, _drafter
from foredraft.bench.plan.readings import Readings
from foredraft.testing.models import tiny_model

PROMPTS = [[5, 6, 7, 5, 6], [9, 8, 7]]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_passes_are_read_in_turn_and_taken_once() -> None:
    readings = Readings(tiny_model(seed=3), (1, 3), 8)
    assert readings.taken() == {}
    readings.read()
    assert set(readings.taken()) == {1}
    readings.read()
    readings.read()
    taken = readings.taken()
    assert set(taken) == {1, 3}
    assert min(taken.values()) > 0
    assert readings.taken() == {}


def test_a_prompt_is_answered_a_step_each_in_turn() -> None:
    bench, order = Bench(tiny_model(seed=3), {}, 12), []

    def watched(name: str) -> Runner:
        runner = bench.runner(None)
        step = runner.llm.engine.step

        def noted():
            order.append(name)
            return step()

        runner.llm.engine.step = noted
        return runner

    make = [(name, lambda name=name: watched(name)) for name in "ab"]
    found = in_turns(make, [[p] for p in PROMPTS], PARAMS, 1, lambda *_: None, lambda: None)
    answers = order[-48:]
    for i in range(0, 24, 2):  # of each pair one is a's, one b's
        assert set(answers[i : i + 2]) == {"a", "b"}
    assert found[0].token_ids == found[1].token_ids
    assert [len(each) for each in found[0].token_ids[0]] == [12, 12]
    assert all(len(spent.steps) == 11 for spent in found[0].spent[0])


def test_several_requests_are_run_one_configuration_after_another() -> None:
    bench, read = Bench(tiny_model(seed=3), {}, 12), []
    make = [(name, lambda: bench.runner(None, 2)) for name in "ab"]
    found = in_turns(make, [PROMPTS], PARAMS, 1, lambda *_: None, lambda: read.append(1))
    assert len(read) == 2 * BEFORE_A_RUN
    assert found[0].token_ids == found[1].token_ids


def test_touching_memory_leaves_no_record() -> None:
    runner = Bench(tiny_model(seed=3), {}, 12).recording({"method": "ngram"}, 3)
    runner.touch_memory(40)
    assert runner.recorder is not None
    assert runner.recorder.texts == []
    list(runner.answer(PROMPTS[:1], PARAMS))
    assert len(runner.recorder.texts) == 1


@pytest.mark.parametrize(
    ("config", "runs"),
    [
        ({"method": "ngram"}, False),
        ({"method": "early_exit", "exit_layer": 1}, True),
        ({"method": "combined", "drafters": [
            {"method": "suffix"}, {"method": "early_exit", "exit_layer": 1}]}, True),
    ],
)  # fmt: skip
def test_drafters_that_run_a_model_are_told_from_others(config, runs: bool) -> None:
    assert _drafter(tiny_model(seed=3), config, PlanSettings()).runs_a_model is runs
