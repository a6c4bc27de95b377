"""One run of `foredraft train eagle3 | medusa | draft`, from options to the last line printed.

Knows files, bars and lines; the training room trains.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.cli.console import message_console, output_console, separator, visible
from foredraft.cli.options import PlaceOptions
from foredraft.cli.plots import PNG, check_plot, write_plot
from foredraft.cli.train_options import ResultOptions, TrainingOptions, precision_on
from foredraft.core.errors import UserError

if TYPE_CHECKING:
    from foredraft.training.acceptance import Measuring
    from foredraft.training.answers import Answers
    from foredraft.training.loop import Progress
    from foredraft.training.student import Objective, Student
    from foredraft.training.target import Target


@dataclass(frozen=True)
class Source:
    """What a student is made of."""

    target: Target
    sha256: str
    training: Answers
    objective: Objective


@dataclass(frozen=True)
class Course:
    """What one command trains: everything that differs between students."""

    method: str  # of a speculative config
    options: Mapping[str, Any]  # the student's own, which a run that goes on has to repeat
    learning_rate: float  # where none is asked for
    begin: Callable[[Source], Student]
    config: Mapping[str, Any]  # of the speculative config beside method and model
    finish: Callable[[Path, Source, Answers, Measuring], None] = lambda *_: None


@dataclass(frozen=True)
class Files:
    """What a run reads and writes."""

    data: Path
    out: Path
    results: ResultOptions


def train(
    course: Course, model: str, files: Files, training: TrainingOptions, place: PlaceOptions
) -> None:
    """Train, show how it goes, and say how to draft with the result."""
    settings, objective = training.settings(course.learning_rate), training.objective()
    check_plot(files.results.plot, PNG)
    loaded = place.load(model)
    settings = replace(settings, precision=precision_on(training.precision, loaded.device))
    import torch

    from foredraft.training.acceptance import Measuring
    from foredraft.training.freed_memory import freed_memory_kept
    from foredraft.training.loop import Loop
    from foredraft.training.opening import open_answers, open_features
    from foredraft.training.run_directory import RunDirectory
    from foredraft.training.target import Target

    if place.threads is not None:
        torch.set_num_threads(place.threads)
    answers, held_out, sha256 = open_answers(files.data, loaded, training.held_out)
    asked = {
        "method": course.method,
        "target_sha256": sha256,
        "answers": {"training": len(answers), "held_out": len(held_out)},
        **asdict(settings),
        **asdict(objective),
        "draft_vocab_size": training.draft_vocab_size,
        **course.options,
        "versions": answers.manifest.versions,
    }
    directory = RunDirectory(files.out, asked)
    target = Target(loaded, open_features(files.data, sha256))
    source = Source(target, sha256, answers, objective)
    student = course.begin(source)
    student.module.to(loaded.device)
    measuring = Measuring(settings.max_length, settings.batch_tokens, loaded.device, loaded.eos_ids)
    try:
        with freed_memory_kept(), _shown(files.results.json_output) as report:
            loop = Loop(student, (answers, held_out), settings, directory, measuring)
            loop.run(report)
        course.finish(directory.best, source, held_out, measuring)
    except OSError as error:
        raise UserError(f"cannot write to {str(files.out)!r}: {error.strerror}") from None
    _conclude(course, files, directory.records())


@contextmanager
def _shown(json_output: bool) -> Iterator[Callable[[Progress], None]]:
    """A line of JSON for each measurement, or a bar with the time left on a terminal."""
    from rich import progress

    if json_output:
        yield _json_line
        return
    console = message_console()
    columns = (
        progress.TextColumn("step"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("loss {task.fields[loss]}"),
        progress.TextColumn("{task.fields[accepted]}"),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    bars = progress.Progress(*columns, console=console, disable=not console.is_terminal)
    with bars:
        task = bars.add_task("", total=None, loss="-", accepted="")

        def show(state: Progress) -> None:
            bars.update(task, total=state.steps, completed=state.step, loss=f"{state.loss:.3f}")
            if state.acceptance:
                rates = " ".join(f"{rate:.0%}" for rate in state.acceptance)
                bars.update(task, accepted=f"accepted {rates}")

        yield show


def _json_line(state: Progress) -> None:
    if not state.acceptance:
        return
    values = {
        "step": state.step,
        "of": state.steps,
        "tokens": state.state.tokens,
        "loss": round(state.loss, 4),
        "acceptance_by_position": [round(rate, 4) for rate in state.acceptance],
    }
    sys.stdout.write(f"{json.dumps(values)}\n")
    sys.stdout.flush()


def _conclude(course: Course, files: Files, records: list[dict[str, Any]]) -> None:
    """The best measurement, the picture, and the config that drafts with it."""
    measured = [each for each in records if "mean_acceptance_length" in each]
    best = max(measured, key=lambda each: float(each["mean_acceptance_length"]))
    path = files.out / "best"
    config = {"method": course.method, "model": str(path), **course.config}
    if files.results.json_output:
        result = {"best": best, "directory": str(path), "speculative_config": config}
        sys.stdout.write(f"{json.dumps(result)}\n")
    else:
        rates = ", ".join(f"{rate:.1%}" for rate in best["acceptance_by_position"])
        parts = (
            f"best at step {best['step']}, after {best['tokens']:,} tokens",
            f"mean acceptance length {best['mean_acceptance_length']:.2f}",
            f"accepted {rates}",
        )
        sys.stdout.write(
            f"{separator(output_console()).join(parts)}\n{visible(str(path))}\n"
            f"draft with it: --speculative-config {shlex.quote(json.dumps(config))}\n"
        )
    if files.results.plot is not None:
        from foredraft.training.plot import training_png

        write_plot(
            files.results.plot, lambda _: training_png(records, f"{course.method}, {files.out}")
        )
