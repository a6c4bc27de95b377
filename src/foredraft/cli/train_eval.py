"""`foredraft train eval`: what an engine would accept of a head's drafts, without running one.

Knows options and a line of figures; `training.acceptance` measures.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from foredraft.cli.console import output_console, separator
from foredraft.cli.option_groups import option_groups
from foredraft.cli.options import JsonFlag, PlaceOptions
from foredraft.cli.train_options import DataOption


@option_groups
def evaluate(
    head: Annotated[
        Path,
        Argument(
            metavar="HEAD",
            help="A directory with an EAGLE-3 head, Medusa heads or a draft model; or of a run.",
            show_default=False,
        ),
    ],
    data: DataOption,
    target: Annotated[
        str | None, Option(help="(default: the model that answered)", metavar="MODEL")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, Option(help="(default: 4, or Medusa's heads)", metavar="N", min=1, max=16)
    ] = None,
    held_out: Annotated[
        float,
        Option(help="Measure on this share of the prompts, as in training; 1: all.", metavar="X"),
    ] = 0.05,
    max_length: Annotated[
        int, Option(help="Tokens of a sequence that are read.", metavar="N", min=3)
    ] = 1024,
    limit: Annotated[int | None, Option(help="Answers at most.", metavar="N", min=1)] = None,
    json_output: JsonFlag = False,
    *,
    place: PlaceOptions,
) -> None:
    """Measure acceptance by position on held-out answers."""
    from foredraft.training.answers import Answers, read_manifest

    manifest = read_manifest(data)
    loaded = place.load(target or manifest.target)
    from foredraft.training.acceptance import Measuring, measured
    from foredraft.training.loop import acceptance_record
    from foredraft.training.opening import kind_of, open_answers, open_features, open_student
    from foredraft.training.target import Target

    directory = head / "best" if (head / "best").is_dir() else head
    sha256 = manifest.target_sha256
    answers = Answers.open(data)
    if held_out != 1:
        _, answers, sha256 = open_answers(data, loaded, held_out)
    features = open_features(data, sha256)
    student = open_student(directory, Target(loaded, features), sha256, num_speculative_tokens)
    measuring = Measuring(max_length, max(max_length, 4096), loaded.device, loaded.eos_ids)
    counts = measured(student, answers[: limit or len(answers)], measuring)
    record = {"method": kind_of(directory), **acceptance_record(counts)}
    if json_output:
        sys.stdout.write(f"{json.dumps(record)}\n")
        return
    console = output_console()
    rates = ", ".join(f"{rate:.1%}" for rate in counts.acceptance_by_position)
    parts = (
        f"{record['method']}, {counts.num_drafts} drafts",
        f"mean acceptance length {counts.mean_acceptance_length:.3f}",
        f"accepted {rates}",
    )
    console.print(separator(console).join(parts), soft_wrap=True)
