"""`foredraft train ngram`: an n-gram table of a target's answers.

Knows options and a few lines of figures; `training.ngram` does the work.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from foredraft.cli.console import output_console, separator
from foredraft.cli.option_groups import option_groups
from foredraft.cli.options import JsonFlag, ModelArgument
from foredraft.cli.train_options import DataOption
from foredraft.core.errors import ConfigError, UserError

if TYPE_CHECKING:
    from foredraft.training.answers import Answers
    from foredraft.training.ngram import NgramReport


@option_groups
def ngram(
    model: ModelArgument,
    data: DataOption,
    out: Annotated[
        Path, Option(help="The table, for ngram_table_path.", metavar="FILE", show_default=False)
    ],
    order: Annotated[
        int, Option(help="Contexts of 1 to so many tokens.", metavar="N", min=1, max=8)
    ] = 5,
    min_count: Annotated[
        int,
        Option(
            help="Rarer contexts are kept only where they change the likeliest token.",
            metavar="N",
            min=1,
        ),
    ] = 2,
    held_out: Annotated[
        float,
        Option(
            help="Share of the prompts that weights are fitted to and acceptance is measured on.",
            metavar="X",
        ),
    ] = 0.05,
    note: Annotated[
        str, Option(help="Kept in the file: where the answers are from.", metavar="TEXT")
    ] = "",
    json_output: JsonFlag = False,
) -> None:
    """Make an n-gram table of the target's answers; a minute for a million tokens."""
    if not 0 < held_out < 1:
        raise ConfigError(f"--held-out must be between 0 and 1, got {held_out:g}")
    from foredraft.training.answers import Answers
    from foredraft.training.ngram import NgramRecipe, train_ngram

    answers = Answers.open(data)
    _check_target(model, answers)
    recipe = NgramRecipe(order, least_counts=(1, *[min_count] * (order - 1)))
    provenance = {"note": note} if note else {}
    try:
        made = train_ngram(answers, out, recipe, held_out, provenance, _told)
    except OSError as error:
        raise UserError(f"cannot write {str(out)!r}: {error.strerror}") from None
    if json_output:
        sys.stdout.write(f"{json.dumps(_record(made))}\n")
        return
    console = output_console()
    played = made.held_out
    rates = ", ".join(f"{rate:.1%}" for rate in played.acceptance_by_position)
    parts = (
        f"{str(made.path)!r}: {made.num_bytes / 1e6:.1f} MB of {made.num_tokens} tokens",
        f"held out: mean acceptance length {played.mean_acceptance_length:.3f}",
        f"accepted {rates}",
    )
    console.print(separator(console).join(parts), soft_wrap=True)


def _check_target(model: str, answers: Answers) -> None:
    from foredraft.models.built_in import BUILT_IN
    from foredraft.models.fingerprint import fingerprint
    from foredraft.models.registry import cached_path

    manifest = answers.manifest
    if model == manifest.target:
        return
    path = cached_path(model) if model in BUILT_IN else Path(model)
    if path is None or fingerprint(path) != manifest.target_sha256:
        raise UserError(f"the answers are those of {manifest.target!r}, not of {model!r}")


def _told(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _record(made: NgramReport) -> dict[str, object]:
    return {
        "path": str(made.path),
        "bytes": made.num_bytes,
        "tokens": made.num_tokens,
        "contexts": [contexts for contexts, _ in made.sizes],
        "loss": made.loss,
        "mean_acceptance_length": made.held_out.mean_acceptance_length,
        "acceptance_by_position": made.held_out.acceptance_by_position,
    }
