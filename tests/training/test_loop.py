"""The loop: going on after a stop, the schedule, what ends a run and what is kept of it."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from foredraft.core.errors import UserError
from foredraft.models.load import LoadedModel
from foredraft.models.safetensors_writer import save_tensors
from foredraft.training.acceptance import Measuring
from foredraft.training.answers import Answers
from foredraft.training.begin import new_eagle3
from foredraft.training.eagle3 import Eagle3Student
from foredraft.training.freed_memory import freed_memory_kept
from foredraft.training.loop import Loop, Progress, Settings, learning_rate
from foredraft.training.run_directory import RunDirectory, read_log
from foredraft.training.student import Objective
from foredraft.training.target import Target

SETTINGS = Settings(
    steps=12, batch_tokens=400, evaluate_every=4, checkpoint_every=5, log_every=2, patience=0
)
ASKED = {"method": "eagle3", "learning_rate": 1e-3}


class Stop(Exception):  # noqa: N818 - stands for a signal
    """What a run is stopped by."""


class Rig:
    """Makes the same loop again and again, as a command that is given again does."""

    def __init__(
        self,
        loaded: LoadedModel,
        target: Target,
        answers: tuple[Answers, Answers],
        measuring: Measuring,
    ) -> None:
        self.loaded, self.target, self.answers = loaded, target, answers
        self.measuring = measuring

    def loop(self, path: Path, settings: Settings = SETTINGS) -> Loop:
        head = new_eagle3(self.loaded, None, None, seed=3, copied=True)
        student = Eagle3Student(head, self.target, 2, Objective())
        directory = RunDirectory(path, ASKED)
        return Loop(student, self.answers, settings, directory, self.measuring)


@pytest.fixture
def rig(
    loaded: LoadedModel,
    target: Target,
    answers: tuple[Answers, Answers],
    measuring: Measuring,
) -> Rig:
    return Rig(loaded, target, answers, measuring)


def _stop_after(step: int) -> object:
    def report(progress: Progress) -> None:
        if progress.step == step:
            raise Stop

    return report


@pytest.mark.parametrize("stopped_at", [[3], [5], [8], [7, 11]])
def test_a_stopped_run_ends_with_the_same_tensors(
    stopped_at: list[int], rig: Rig, tmp_path: Path
) -> None:
    """Parameters, the optimiser's moments, the log and the best student, to the bit."""
    rig.loop(tmp_path / "whole").run()
    for step in stopped_at:
        with pytest.raises(Stop):
            rig.loop(tmp_path / "parts").run(_stop_after(step))
    rig.loop(tmp_path / "parts").run()
    for name in ("checkpoint/tensors.safetensors", "best/model.safetensors"):
        whole, parts = (load_file(tmp_path / run / name) for run in ("whole", "parts"))
        assert whole.keys() == parts.keys()
        for key, tensor in whole.items():
            assert torch.equal(tensor, parts[key]), key
    logs = [read_log(tmp_path / run) for run in ("whole", "parts")]
    for log in logs:
        for record in log:
            del record["seconds"]
    assert logs[0] == logs[1]


def test_a_finished_run_is_not_run_again(rig: Rig, tmp_path: Path) -> None:
    rig.loop(tmp_path / "run").run()
    log = (tmp_path / "run" / "log.jsonl").read_text()
    steps: list[int] = []
    state = rig.loop(tmp_path / "run").run(lambda progress: steps.append(progress.step))
    assert steps == []
    assert state.step == 12
    assert (tmp_path / "run" / "log.jsonl").read_text() == log


def test_training_helps(rig: Rig, tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=60, evaluate_every=30)
    rig.loop(tmp_path / "run", settings).run()
    losses = [each["loss"] for each in read_log(tmp_path / "run") if "loss" in each]
    assert losses[-1] < 0.75 * losses[0]


def test_it_ends_when_acceptance_has_ceased_to_rise(rig: Rig, tmp_path: Path) -> None:
    # So small a rate changes nothing: the first measurement stays the best.
    settings = replace(SETTINGS, patience=2, evaluate_every=1, learning_rate=1e-12)
    state = rig.loop(tmp_path / "run", settings).run()
    assert (state.step, state.best_step, state.ended) == (3, 1, True)
    assert rig.loop(tmp_path / "run", settings).run().step == 3


def test_the_log_tells_loss_and_acceptance(rig: Rig, tmp_path: Path) -> None:
    rig.loop(tmp_path / "run").run()
    records = read_log(tmp_path / "run")
    measured = [each for each in records if "mean_acceptance_length" in each]
    assert [each["step"] for each in measured] == [4, 8, 12]
    for each in measured:
        assert len(each["acceptance_by_position"]) == 2
        assert 1.0 <= each["mean_acceptance_length"] <= 3.0
    losses = [each for each in records if "loss" in each]
    assert [each["step"] for each in losses] == [2, 4, 6, 8, 10, 12]
    assert losses[-1]["tokens"] == measured[-1]["tokens"]


def test_a_loss_that_is_no_number_ends_the_run(rig: Rig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the loss of step \d+ is .*below 1e\+30"):
        rig.loop(tmp_path / "run", replace(SETTINGS, learning_rate=1e30)).run()


def test_another_run_is_not_gone_on_with(rig: Rig, tmp_path: Path) -> None:
    rig.loop(tmp_path / "run")
    with pytest.raises(UserError, match=r"learning_rate 0.001, asked for is 0.01"):
        RunDirectory(tmp_path / "run", {**ASKED, "learning_rate": 1e-2})
    with pytest.raises(UserError, match="holds a run with loss null"):
        RunDirectory(tmp_path / "run", {**ASKED, "loss": "tv"})
    RunDirectory(tmp_path / "run", {**ASKED, "versions": {"torch": "9"}})


def test_what_is_no_run_stays_as_it_is(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="is not empty and holds no training run"):
        rig.loop(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"format": "diary"}))
    with pytest.raises(UserError, match="is not of a training run"):
        rig.loop(tmp_path)


def test_a_checkpoint_of_another_student_is_refused(rig: Rig, tmp_path: Path) -> None:
    rig.loop(tmp_path / "run").run()
    state = tmp_path / "run" / "checkpoint" / "state.json"
    state.write_text(json.dumps({"epoch": 3}))
    with pytest.raises(UserError, match="is no checkpoint of this student"):
        rig.loop(tmp_path / "run")
    state.write_text("{")
    with pytest.raises(UserError, match="cannot read"):
        rig.loop(tmp_path / "run")


def test_a_half_written_line_of_the_log_is_left_out(rig: Rig, tmp_path: Path) -> None:
    rig.loop(tmp_path / "run").run()
    before = read_log(tmp_path / "run")
    with (tmp_path / "run" / "log.jsonl").open("a") as log:
        log.write('{"step": 13, "lo')
    assert read_log(tmp_path / "run") == before


def test_a_damaged_line_of_the_log_is_told(rig: Rig, tmp_path: Path) -> None:
    rig.loop(tmp_path / "run").run()
    with (tmp_path / "run" / "log.jsonl").open("a") as log:
        log.write('{"step"\n')
    asked = json.loads((tmp_path / "run" / "run.json").read_text())
    with pytest.raises(UserError, match=r"cannot read .*log\.jsonl"):
        RunDirectory(tmp_path / "run", asked).rewind_log(1)


@pytest.mark.skipif(sys.platform == "win32", reason="limits of processes")
def test_files_of_tensors_are_everybody_s_and_say_when_there_is_no_room(tmp_path: Path) -> None:
    import resource

    tensors = {"weight": torch.ones(1000)}
    save_tensors(tmp_path / "a", tensors)
    (tmp_path / "b").write_bytes(b"")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            save_tensors(tmp_path / "c", tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_the_rate_rises_and_falls() -> None:
    settings = Settings(learning_rate=1.0, warmup=0.1, final_rate=0.2)
    rates = [learning_rate(settings, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[9] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.6)  # half way down
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)
    assert 0.2 < rates[-1] < 0.21


def test_freed_memory_is_kept_where_glibc_is() -> None:
    with freed_memory_kept() as kept:
        assert kept == (platform.libc_ver()[0] == "glibc")


def test_a_run_is_not_gone_on_with_while_it_goes_on(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "run", ASKED)
    held = (
        "import fcntl, sys; lock = open(sys.argv[1], 'wb'); fcntl.lockf(lock, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", held, str(tmp_path / "run" / "lock")]
    RunDirectory(tmp_path / "other", ASKED)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=r"a run is going on in .*run': wait for it"):
            RunDirectory(tmp_path / "run", ASKED)
        other.communicate()
    RunDirectory(tmp_path / "run", ASKED)
