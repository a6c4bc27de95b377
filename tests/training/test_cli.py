"""`foredraft train`: what it prints, what it refuses, and that what it makes drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli.main import main
from foredraft.testing.models import write_tiny_checkpoint

QUICK = ["--steps", "6", "--batch-tokens", "600", "--evaluate-every", "3", "--held-out", "0.15"]
PLACE = ["--threads", "1", "--kernels", "reference", "--dtype", "float32"]
STUDENTS = {
    "eagle3": ["--num-speculative-tokens", "3", "--draft-vocab-size", "20"],
    "medusa": ["--num-heads", "2"],
    "draft": ["--layers", "2", "--draft-vocab-size", "16", "--num-speculative-tokens", "3"],
}


@pytest.fixture
def command(target_directory: Path, answers_directory: Path, tmp_path: Path) -> list[str]:
    """What follows the student's name."""
    files = ["--data", str(answers_directory), "--out", str(tmp_path / "run")]
    return [str(target_directory), *files, *QUICK, *PLACE]


def _lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["train", *arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def _fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["train", *arguments]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.count("\n") == 1
    return written.err


@pytest.mark.parametrize("student", STUDENTS)
def test_json_tells_every_measurement_and_the_best(
    student: str, command: list[str], answers_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *steps, last = _lines(capsys, student, *command, *STUDENTS[student])
    assert [each["step"] for each in steps] == [3, 6]
    assert all(each["of"] == 6 for each in steps)
    best = max(steps, key=lambda each: sum(each["acceptance_by_position"]))
    assert last["best"]["acceptance_by_position"] == best["acceptance_by_position"]
    # Rounded as it is written: a draft in a hundred may differ.
    data = ["--data", str(answers_directory), "--held-out", "0.15"]
    count = ["--num-speculative-tokens", str(len(best["acceptance_by_position"]))]
    (found,) = _lines(capsys, "eval", last["directory"], *data, *count, *PLACE)
    assert found["method"] == last["speculative_config"]["method"]
    assert found["acceptance_by_position"] == pytest.approx(
        best["acceptance_by_position"], abs=0.02
    )


@pytest.mark.parametrize("student", ["eagle3", "draft"])
def test_the_config_that_is_printed_drafts(
    student: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = _lines(capsys, student, *command, *STUDENTS[student])[-1]["speculative_config"]
    prompt = ["hello there", "--max-tokens", "20", "--ignore-eos", *PLACE]
    outputs = []
    for options in (["--no-speculation"], ["--speculative-config", json.dumps(config)]):
        assert main(["generate", command[0], *prompt, *options, "--json"]) == 0
        outputs += json.loads(capsys.readouterr().out)["outputs"]
    assert outputs[0]["token_ids"] == outputs[1]["token_ids"]
    assert outputs[1]["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def test_a_person_is_told_in_three_lines(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "run.png"
    assert main(["train", "medusa", *command, "--plot", str(plot)]) == 0
    written = capsys.readouterr().out
    assert written.startswith("best at step ")
    assert "mean acceptance length" in written
    assert written.count("\n") == 3
    assert plot.read_bytes().startswith(b"\x89PNG")
    # The same command again goes on where there is nothing left to do.
    assert main(["train", "medusa", *command]) == 0
    assert capsys.readouterr().out == written


def test_medusa_keeps_the_accuracies_of_its_ranks(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _lines(capsys, "medusa", *command, "--num-heads", "2")
    values = json.loads((tmp_path / "run" / "best" / "config.json").read_text())
    accuracies = values["foredraft"]["accuracies"]
    assert [len(rates) for rates in accuracies] == [10, 10]
    assert all(0 <= rate <= 1 for rates in accuracies for rate in rates)


def test_a_run_with_other_settings_is_refused(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _lines(capsys, "medusa", *command)
    error = _fails(capsys, "medusa", *command, "--learning-rate", "0.01")
    assert "holds a run with learning_rate 0.001, asked for is 0.01" in error


def test_answers_of_another_target_are_refused(
    answers_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_tiny_checkpoint(tmp_path / "other", seed=9)
    files = ["--data", str(answers_directory), "--out", str(tmp_path / "run")]
    error = _fails(capsys, "eagle3", str(other), *files)
    assert "holds answers of another model" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--learning-rate", "3"], "--learning-rate must be between 0 and 1, got 3"),
        (["--epochs", "0"], "--epochs must be above 0, got 0"),
        (["--warmup", "1"], "--warmup must be from 0 up to, not at, 1"),
        (["--held-out", "1"], "held out must be between 0 and 1, got 1"),
        (["--held-out", "0.0001"], "0 are held out"),
        (["--max-length", "3"], "has two tokens within max_length 3"),
        (["--plot", "run.bmp"], "give a name in .png"),
        (["--device", "tpu"], "valid are cpu, cuda"),
        (["--loss", "mse"], "'mse' is not one of"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], words: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in _fails(capsys, "eagle3", *command, *options)


def test_data_that_is_none_is_refused(
    target_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--data", str(tmp_path), "--out", str(tmp_path / "run")]
    error = _fails(capsys, "draft", str(target_directory), *files)
    assert "`foredraft train data` makes them" in error


def test_what_is_no_head_is_refused(
    answers_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = _fails(capsys, "eval", str(tmp_path), "--data", str(answers_directory))
    assert "no config.json; give a head's or a draft model's directory" in error


def test_more_drafts_than_heads_are_refused(
    command: list[str], answers_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = _lines(capsys, "medusa", *command, "--num-heads", "2")[-1]["directory"]
    data = ["--data", str(answers_directory), "--num-speculative-tokens", "3"]
    assert "3 drafts were asked for" in _fails(capsys, "eval", directory, *data)
