"""Policies in the engine: widths that change change no output, costs are measured once, and what
never pays is not asked for.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, SamplingParams
from foredraft.core.errors import ConfigError
from foredraft.engine import build, calibration
from foredraft.engine.calibration import cost_curve, measure
from foredraft.models.decoder import cache_shape
from foredraft.models.load import LoadedModel
from foredraft.planning.adaptive import AdaptivePolicy
from foredraft.planning.cost import CostCurve
from foredraft.planning.cost_tracking import CostTracker
from foredraft.planning.policy import WidthByBatchSize
from foredraft.testing.drafters import RecordingDrafter, RepeatDrafter
from foredraft.testing.pairs import tiny_noisy_pair

from .conftest import GREEDY, PROMPTS, SEEDED

# Rows that are nearly free, and rows that cost what a pass costs.
CHEAP = CostCurve((1, 8, 32), (1.0, 1.05, 1.5))
DEAR = CostCurve((1, 2, 32), (1.0, 2.0, 32.0))
ADAPTIVE = {"policy": "adaptive", "num_speculative_tokens": 5}


@pytest.fixture
def with_costs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Costs that are given, and not corrected by the clock."""

    def set_costs(curve: CostCurve) -> None:
        monkeypatch.setattr(build, "cost_curve", lambda *_, **__: curve)
        monkeypatch.setattr(CostTracker, "learn", lambda *_: None)

    return set_costs


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("objective", ["throughput", "latency"])
@pytest.mark.parametrize("batch", [1, 5])
def test_adaptive_widths_change_no_token(
    target, plain, oracle, with_costs, params, objective, batch
) -> None:
    with_costs(CHEAP)
    drafter = RecordingDrafter(oracle(params))
    llm = LLM(
        target, drafter=drafter, speculative_config={**ADAPTIVE, "objective": objective},
        seed=5, page_size=4, max_num_seqs=batch, max_num_batched_tokens=20,
    )  # fmt: skip
    expected = plain(params)
    outputs = llm.generate(PROMPTS, params)
    assert [list(output.token_ids) for output in outputs] == expected
    assert sum(o.metrics.speculative_decoding.num_accepted_draft_tokens for o in outputs) > 20


def test_a_draft_model_that_comes_and_goes_changes_no_token(with_costs) -> None:
    with_costs(CostCurve((1, 2, 8, 32), (1.0, 1.2, 2.5, 8.0)))
    target, draft = tiny_noisy_pair(1, noise=0.1, vocab_size=32)
    each = [replace(GREEDY, max_tokens=n) for n in (24, 9, 17, 3, 24)]
    plain = LLM(target, seed=5).generate(PROMPTS, each)
    config = {"method": "draft_model", "model": draft, **ADAPTIVE}
    llm = LLM(target, speculative_config=config, seed=5, page_size=4)
    drafted = llm.generate(PROMPTS, each)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]


def test_a_liar_is_hardly_asked_and_plain_steps_call_no_drafter(target, with_costs) -> None:
    with_costs(DEAR)
    drafter = RecordingDrafter(RepeatDrafter(token=31))
    llm = LLM(target, drafter=drafter, speculative_config=ADAPTIVE, seed=5)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    (output,) = llm.generate([PROMPTS[0]], params)
    speculation = output.metrics.speculative_decoding
    assert isinstance(llm.engine.scheduler.policy, AdaptivePolicy)
    assert speculation.num_draft_tokens <= 0.05 * 200


def test_a_width_for_each_batch_size(make_llm, target, plain) -> None:
    config = {
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 3, 1], [4, 8, 0]],
    }
    llm = LLM(target, drafter=RepeatDrafter(token=3), speculative_config=config, seed=5)
    assert isinstance(llm.engine.scheduler.policy, WidthByBatchSize)
    drafted = []
    for batch in (1, 3, 5):
        outputs = llm.generate(PROMPTS[:batch], GREEDY)
        assert [list(o.token_ids) for o in outputs] == plain(GREEDY)[:batch]
        steps = sum(o.metrics.num_steps for o in outputs)
        drafts = sum(o.metrics.speculative_decoding.num_draft_tokens for o in outputs)
        drafted.append(drafts / steps)
    assert drafted[0] > 3.0
    assert drafted[1] == pytest.approx(1.0, abs=0.2)
    assert drafted[2] == 0.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"policy": "clever"}, "policy must be one of fixed, adaptive, got 'clever'"),
        ({"objective": "latency"}, 'objective needs "policy": "adaptive"'),
        ({"recalibrate": True}, 'recalibrate needs "policy": "adaptive"'),
        ({"policy": "adaptive", "objective": "both"}, "objective must be one of throughput, lat"),
        ({"policy": "adaptive", "recalibrate": 1}, "recalibrate must be true or false, got 1"),
        (
            {"num_speculative_tokens_per_batch_size": [[1, 4, 9]]},
            r"\[1, 4, 9\] drafts more than num_speculative_tokens = 5",
        ),
        (
            {"num_speculative_tokens_per_batch_size": [[2, 4, 1]]},
            r"\[2, 4, 1\] must be \[start, end, K\] with start 1",
        ),
        ({"num_speculative_tokens_per_batch_size": [[1, 4]]}, "must be a list of"),
        (
            {"policy": "adaptive", "num_speculative_tokens_per_batch_size": [[1, 4, 2]]},
            'needs "policy": "fixed"',
        ),
    ],
)
def test_mistakes_are_named(target, config, message) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(target, speculative_config={"method": "ngram", **config})


def test_request_types_are_told_apart(make_llm) -> None:
    llm = make_llm()
    kinds = [
        llm._make([1, 2], SamplingParams(temperature=t)).requests[0].request_type
        for t in (0.0, 0.72, 1.0)
    ]
    assert kinds == ["greedy", "temperature 0.7", "temperature 1.0"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(calibration, "cache_directory", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def test_costs_are_measured_for_every_kind_of_pass(target: LoadedModel) -> None:
    shape = cache_shape(target.config, target.cache_dtype)
    points = measure(target.model, shape, target.device, budget=0.3)
    kinds = {(point.rows, point.requests) for point in points}
    assert {(1, 1), (5, 1), (8, 1), (8, 8), (32, 32)} <= kinds
    assert all(point.seconds > 0 for point in points)


def test_costs_are_kept_and_measured_again_when_asked_or_unreadable(
    target: LoadedModel, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = cache_shape(target.config, target.cache_dtype)
    asked = []

    def measured(*given: object) -> list[object]:
        asked.append(given)
        return measure(*given, budget=0.0)

    monkeypatch.setattr(calibration, "measure", measured)
    first = cost_curve(target, shape)
    assert cost_curve(target, shape) == first
    assert len(asked) == 1
    cost_curve(target, shape, recalibrate=True)
    assert len(asked) == 2
    (path,) = home.rglob("*.json")
    for damage in ("", "[]", "{}", '{"rows": [1], "seconds": [-1]}', '{"rows": 3, "seconds": 4}'):
        path.write_text(damage)
        curve = cost_curve(target, shape)
        assert CostCurve.from_json(json.loads(path.read_text())) == curve
    assert len(asked) == 7
    assert list(home.rglob("*.part")) == []


def test_a_home_that_cannot_be_written_to_stops_nothing(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setattr(calibration, "cache_directory", lambda: blocked)
    monkeypatch.setattr(calibration, "measure", lambda *given: measure(*given, budget=0.0))
    assert cost_curve(target, cache_shape(target.config, target.cache_dtype)).rows[0] == 1
