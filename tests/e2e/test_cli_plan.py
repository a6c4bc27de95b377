"""`foredraft plan MODEL --workload FILE`: its JSON form, tables and files, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft.cli.main import main


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("foredraft.engine.calibration.BUDGET_SECONDS", 0.1)


def test_it_measures_recommends_checks_and_writes(
    tiny: Path, workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "plan.toml", tmp_path / "plan.svg"
    arguments = [
        "plan", str(tiny), "--workload", str(workload), "--max-tokens", "24", "--max-draft", "3",
        "--concurrency", "1,4", "--check", "3", "--repeats", "1", "--only-given",
        "--speculative-config", '{"method": "ngram"}',
        "--speculative-config", '{"method": "recycling", "num_speculative_tokens": 2}',
        "--output-config", str(file), "--plot", str(plot), "--json",
    ]  # fmt: skip
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert {"machine", "versions", "revision", "arguments", "date"} <= set(result)
    assert result["verify_cost"][0] == pytest.approx(1.0)
    ngram, recycling = result["drafters"]
    assert [len(each["by_load"]["4"]) for each in (ngram, recycling)] == [3, 2]
    assert sum(ngram["length_shares"]) == pytest.approx(1.0)
    assert recycling["best_tree"]["speedup"] >= 1.0
    assert "best_tree" not in ngram
    check = result["check"]
    assert len(check["configs"]) == 3
    assert all(each["identical_to_plain"] for each in check["configs"])
    # Widths change no text, so that the tokens of a step are known but for what a memory adds.
    for each in check["configs"]:
        assert each["tokens"]["predicted"] == pytest.approx(each["tokens"]["measured"], rel=0.35)
    assert plot.stat().st_size > 1000
    advice = result["recommendation"]["speculative_config"]
    assert main(["generate", str(tiny), "hello", "--max-tokens", "4", "--speculative-config",
                 str(file), "--json"]) == 0  # fmt: skip
    assert (advice is None) == ("no_speculation = true" in file.read_text())


def test_it_shows_tables(
    tiny: Path, workload: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    arguments = ["plan", str(tiny), "--workload", str(workload), "--max-tokens", "12"]
    arguments += ["--prompts", "2", "--repeats", "1", "--concurrency", "2,8"]
    assert main(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("ngram", "suffix", "recycling", "by requests at once", "checked with 2 at once"):
        assert words in shown
    assert "prediction" not in shown  # nobody says what is expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny"], "needs a workload to plan for: --workload FILE"),
        (["tiny", "--workload", "w", "--alpha", "0.5"], "--alpha is for a plan without a MODEL"),
        (["--workload", "w"], "--workload needs a MODEL"),
        (["--alpha", "0.5", "--threads", "1"], "--threads needs a MODEL"),
        (["tiny", "--workload", "w", "--concurrency", "2,1"], "must be rising integers in 1..256"),
        (["tiny", "--workload", "w", "--concurrency", "x"], "must be rising integers in 1..256"),
        (["tiny", "--workload", "w", "--only-given"], "--only-given needs a --speculative-config"),
        (["tiny", "--workload", "w", "--speculative-config", "null"], "measured anyway"),
        (["tiny", "--workload", "w", "--output-config", "x.json"], "a name that ends in .toml"),
        (["tiny", "--workload", "w", "--output-config", "no/x.toml"], "there is no directory"),
        (["tiny", "--workload", "nowhere.jsonl"], "cannot read workload"),
        (["tiny", "--workload", "w", "--speculative-config", "no.toml"], "cannot read --specul"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"method": "nothing"}', "unknown speculative method 'nothing'"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "must be 1 or more to plan for"),
        ('{"method": "draft_model"}', "needs the option 'model'"),
    ],
)
def test_configurations_that_cannot_be_are_refused(
    tiny: Path, workload: Path, config: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", str(tiny), "--workload", str(workload), "--speculative-config", config]
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
