"""`foredraft bench serve`, `simulate` and `replay` on a tiny model: JSON, tables, bad flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli.main import main
from foredraft.drafters.ngram import NgramDrafter
from foredraft.engine import calibration

SMALL = (
    "--max-tokens", "12", "--requests", "4", "--rounds", "2", "--widths", "0,2",
    "--speculative-config", '{"method": "ngram"}',
)  # fmt: skip


@pytest.fixture(autouse=True)
def _costs_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "cache_directory", lambda: tmp_path / "cache")


def serve(
    capsys: pytest.CaptureFixture[str], tiny: Path, workload: Path, *arguments: str
) -> dict[str, Any]:
    command = ["bench", "serve", str(tiny), "--workload", str(workload), *SMALL, *arguments]
    assert main([*command, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_serving_has_the_documented_form_and_the_simulator_reads_it(
    tiny: Path, workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, plot = tmp_path / "serve.json", tmp_path / "serve.svg"
    result = serve(
        capsys, tiny, workload, "--concurrency", "1,3", "--output", str(file), "--plot", str(plot)
    )
    assert json.loads(file.read_text()) == result
    assert plot.read_text().startswith("<?xml")
    assert {"machine", "versions", "revision", "arguments", "date", "kernels"} <= set(result)
    labels = ["plain", "K=2", "adaptive, throughput", "adaptive, latency"]
    places = [(point["label"], point["concurrency"]) for point in result["points"]]
    assert places == [(label, n) for n in (1, 3) for label in labels]
    for point in result["points"]:
        assert point["tokens_per_second"] > 0
        assert len(point["tokens_per_second_by_round"]) == 2
        assert set(point["ttft_ms"]) == set(point["itl_ms"]) == {"p50", "p99"}
        assert point["identical_to_plain"] is True
        assert point["requests_ended"] >= 8
        assert point["preemptions"] == 0
        assert point["step_overhead"] > 0.0
    plain, fixed = result["points"][:2]
    assert (plain["width"], plain["width_0_share"], plain["mean_acceptance_length"]) == (0, 1, 1)
    assert 1.0 < fixed["width"] <= 2.0  # less near the ends of answers
    assert fixed["mean_acceptance_length"] > 1.0
    assert [each["label"] for each in result["comparisons"][:3]] == labels[1:]
    whats = {each["what"] for each in result["verdicts"]}
    assert "of the best fixed width" in whats
    assert "of the better of plain and fixed" in whats
    assert result["warm_up"]["adaptive, throughput"]["requests"] >= 8
    assert set(result["costs"]) == {"calibrated", "learnt", "draft_ratio"}

    assert main(["bench", "simulate", str(file), "--json"]) in (0, 1)  # tiny steps are all noise
    simulated = json.loads(capsys.readouterr().out)
    assert [(p["concurrency"], p["width"]) for p in simulated["points"]] == [
        (1, 0), (1, 2), (3, 0), (3, 2)
    ]  # fmt: skip
    assert [each["concurrency"] for each in simulated["best"]] == [1, 3]
    assert main(["bench", "simulate", str(file)]) in (0, 1)
    assert "Best width" in capsys.readouterr().out


def test_a_replay_has_the_form_of_what_it_replays(
    tiny: Path, workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.json"
    result = serve(capsys, tiny, workload, "--concurrency", "1,3", "--output", str(file))
    places = [(point["label"], point["concurrency"]) for point in result["points"]]
    command = ["bench", "replay", str(tiny), "--result", str(file), "--workload", str(workload)]
    assert main([*command, "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert [(point["label"], point["concurrency"]) for point in replayed["points"]] == places
    assert all(point["tokens_per_second"] > 0 for point in replayed["points"])
    again = replayed["points"][1]  # the same answers and the same drafter
    assert again["mean_acceptance_length"] == pytest.approx(
        result["points"][1]["mean_acceptance_length"], rel=0.1
    )
    assert len(replayed["errors"]) == len(places)
    assert "of the best fixed width" in {each["what"] for each in replayed["verdicts"]}
    assert main(command) == 0
    assert "of 8 points within 10%" in capsys.readouterr().out

    other = tmp_path / "other.jsonl"
    other.write_text('{"id": "x", "task": "t", "turns": ["something else"]}')
    command[-1] = str(other)
    assert main(command) == 2
    assert "the result is of other prompts" in capsys.readouterr().err
    file.write_text(json.dumps({**result, "temperature": 1.2}))
    assert main(command) == 2
    assert "only greedy answers are known" in capsys.readouterr().err


def test_arrivals_by_chance_at_a_temperature(
    tiny: Path, workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = serve(
        capsys, tiny, workload, "--rate", "40", "--requests", "8", "--temperature", "1.2",
        "--objective", "throughput", "--rounds", "1",
    )  # fmt: skip
    assert [(point["label"], point["rate"]) for point in result["points"]] == [
        ("plain", 40.0), ("K=2", 40.0), ("adaptive, throughput", 40.0)
    ]  # fmt: skip
    assert all(point["identical_to_plain"] for point in result["points"])  # the seeds are the same
    assert all(point["ttft_ms"]["p50"] > 0 for point in result["points"])


def test_prompts_are_made_as_long_as_asked_for(
    tiny: Path, workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = serve(
        capsys, tiny, workload, "--concurrency", "2", "--prompt-tokens", "70", "--max-tokens", "4",
        "--objective", "none", "--rounds", "1",
    )  # fmt: skip
    assert [point["label"] for point in result["points"]] == ["plain", "K=2"]
    assert set(result["prompt_lengths"]) == {70}
    assert {each[0] for each in result["lengths"] if each} == {70}


def test_the_table_states_points_and_promises(
    tiny: Path, workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "serve", str(tiny), "--workload", str(workload), *SMALL]
    assert main([*command, "--concurrency", "1", "--hopeless", "--rounds", "1"]) == 0
    shown = capsys.readouterr().out
    assert "adaptive, latency" in shown
    assert "steps of width 0" in shown


MISTAKES = {
    "--concurrency": ("0", "--concurrency must be whole numbers in 1..1024"),
    "--widths": ("1,x", "--widths must be whole numbers in 0..64"),
    "--rate": ("0", "--rate must be numbers above 0"),
    "--seconds": ("0", "--seconds must be above 0, got 0"),
    "--temperature": ("-1", "--temperature must be 0 or more, got -1"),
    "--objective": ("speed", "--objective must be one of throughput, latency, both, none"),
    "--speculative-config": ('{"policy": "adaptive"}', "leave policy out"),
    "--plot": ("x.pdf", "give a name in .png or .svg"),
    "--prompt-tokens": ("100000000", "valid with such answers are up to"),
    "--max-tokens": ("99999", "answers of 99999 tokens leave no room for a prompt"),
    "--url": ("nowhere", "--url must be like http://localhost:8000, got 'nowhere'"),
}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--rate", "1e-9"],
            "--rate 1e-09 sends 2e-08 requests in 20 seconds: raise it or --seconds",
        ),
        (["--rate", "1e9"], "--rate 1e+09 would send 2.66667e+10 requests, more than 100000"),
        (["--rate", "1e308", "--seconds", "1e308"], "requests, more than 100000"),
        (["--rate", "1", "--seconds", "1e6", "--requests", "200000"], "would send 200000 requests"),
        (["--rate", "1", "--seconds", "4e3"], "takes 5.33e+03 seconds for 5333 requests, more"),
    ],
)
def test_arrivals_that_never_end_are_refused(
    arguments: list[str],
    words: str,
    tiny: Path,
    workload: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "serve", str(tiny), "--workload", str(workload), *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert words in lines[0]


@pytest.mark.parametrize("option", MISTAKES)
def test_a_mistake_is_one_clear_line(
    option: str, tiny: Path, workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value, words = MISTAKES[option]
    assert main(["bench", "serve", str(tiny), "--workload", str(workload), option, value]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert words in lines[0]


def test_a_server_leaves_no_choice_of_widths(
    tiny: Path, workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "serve", str(tiny), "--workload", str(workload), *SMALL]
    assert main([*command, "--url", "http://127.0.0.1:1"]) == 2
    assert "--url excludes --widths, --speculative-config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "cannot read result"), ("{", "is not JSON"), ("[]", "must be a JSON object"),
     ("{}", "the result lacks 'points'"),
     ('{"points": [], "fixed": {}, "max_tokens": 9, "lengths": [[1, 9]], "prompt_lengths": [1], '
      '"rounds": 1, "window": {}, "step_costs": '
      '{"decoding": [{}]}, "costs": {"calibrated": {"rows": [[1]]}}}', "is damaged: KeyError")],
)  # fmt: skip
def test_what_is_no_result_is_refused(
    text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    if text is not None:
        file.write_text(text)
    assert main(["bench", "simulate", str(file)]) == 2
    assert words in capsys.readouterr().err


def test_help_cuts_no_option_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["bench", "serve", "--help"]) == 0
    assert "…" not in capsys.readouterr().out


def test_a_drafter_that_fails_is_no_result(
    tiny: Path, workload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serving goes on without it, and would be measured as if it drafted."""

    def fail(*_: object) -> None:
        raise ValueError("out of order")

    monkeypatch.setattr(NgramDrafter, "propose", fail)
    command = ["bench", "serve", str(tiny), "--workload", str(workload), *SMALL]
    with pytest.raises(RuntimeError, match="K=2: the drafter failed"):
        main([*command, "--concurrency", "1", "--rounds", "1", "--objective", "none"])
