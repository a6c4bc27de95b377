"""`foredraft plan`: what it answers, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli.main import main
from foredraft.planning.speedup import best_draft_length

COSTS = "1,1.04,1.1,1.16,1.4,1.6"


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_it_answers_without_a_model(capsys) -> None:
    found = answer(capsys, "--alpha", "0.8", "--draft-cost", "0.05")
    best = best_draft_length([0.8] * 16, 0.05, [1.0] * 17)
    assert found["best"]["num_draft_tokens"] == best.num_draft_tokens
    assert found["best"]["speedup"] == pytest.approx(best.speedup)
    assert found["by_length"][2]["expected_tokens"] == pytest.approx(2.44)
    assert found["ceiling"] == pytest.approx(best.speedup)
    assert answer(capsys, "--alpha", "1")["ceiling"] is None


def test_measured_costs_bound_the_draft(capsys) -> None:
    found = answer(capsys, "--acceptance", "0.6,0.85", "--verify-cost", COSTS)
    assert [each["num_draft_tokens"] for each in found["by_length"]] == list(range(6))
    assert found["acceptance"] == [0.6, 0.85, 0.85, 0.85, 0.85]
    assert found["best"]["num_draft_tokens"] == 3


def test_it_finds_a_tree_and_plays_loads(capsys) -> None:
    found = answer(
        capsys, "--alpha", "0.7", "--verify-cost", COSTS, "--tree", "0.6,0.2", "--loads", "1,8"
    )
    assert found["tree"]["speedup"] > 1.5
    alone, many = found["loads"]
    assert alone["policy_speedup"] > 1.3
    assert many["requests"] == 8
    assert many["policy_speedup"] > 0.97


def test_a_data_sheet_will_do(capsys) -> None:
    sheet = json.dumps({"weights_gb": 16, "bandwidth_gb_s": 3350, "tflops": 990, "requests": 256})
    found = answer(capsys, "--alpha", "0.8", "--roofline", sheet, "--max-draft", "4")
    assert found["verify_cost"][4] > 2.0


def test_it_shows_tables(capsys) -> None:
    assert main(["plan", "--alpha", "0.8", "--max-draft", "3", "--tree", "0.5,0.3"]) == 0
    shown = capsys.readouterr().out
    assert "best draft length 3: 2.95 tokens" in " ".join(shown.split())
    assert "best tree" in shown


@pytest.mark.parametrize("name", ["plan.png", "plan.svg"])
def test_it_draws(capsys, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    answer(capsys, "--alpha", "0.7", "--verify-cost", COSTS, "--loads", "1", "--plot", str(path))
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --alpha or --acceptance"),
        (["--alpha", "0.5", "--acceptance", "0.5"], "give either --alpha or --acceptance"),
        (["--alpha", "1.5"], "a rate must be in 0..1, got 1.5"),
        (["--alpha", "nan"], "a rate must be in 0..1, got nan"),
        (["--acceptance", "0.5,x"], "--acceptance must be numbers with commas between"),
        (["--alpha", "0.5", "--draft-cost", "-1"], "--draft-cost must be 0 or more, got -1.0"),
        (["--alpha", "0.5", "--draft-cost", "nan"], "--draft-cost must be 0 or more, got nan"),
        (["--alpha", "0.5", "--verify-cost", "2,1"], "must be above 0 and never fall"),
        (["--alpha", "0.5", "--verify-cost", "1"], "needs the costs of 2 rows or more"),
        (["--alpha", "0.5", "--tree", "0.9,0.3"], "at most 1 together"),
        (["--alpha", "0.5", "--loads", "4"], "--loads needs what rows cost"),
        (["--alpha", "0.5", "--verify-cost", "1,2", "--loads", "0"], "--loads must be in 1..1024"),
        (["--alpha", "0.5", "--verify-cost", "1,2", "--roofline", "{}"], "say the same thing"),
        (["--alpha", "0.5", "--roofline", "[]"], "must be a JSON object"),
        (["--alpha", "0.5", "--roofline", "{"], "is not JSON"),
        (["--alpha", "0.5", "--roofline", "{}"], "needs weights_gb, bandwidth_gb_s, tflops"),
        (["--alpha", "0.5", "--roofline", '{"watts": 3}'], "--roofline has no 'watts'"),
        (["--alpha", "0.5", "--roofline", '{"tflops": "x"}'], "tflops must be a number"),
        (["--alpha", "0.5", "--plot", "plan.gif"], "give a name in .png or .svg"),
        (["--alpha", "0.5", "--plot", "no/such/plan.png"], "there is no directory"),
    ],
)
def test_mistakes_are_named(capsys, arguments: list[str], message: str) -> None:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
