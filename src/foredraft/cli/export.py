"""`foredraft export`: a model's first layers as a draft model of their own.

Knows how to say it; `models.export` writes.
"""

from __future__ import annotations

import json
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from typer import Argument, Option

from foredraft.cli.console import message_console, visible
from foredraft.cli.options import JsonFlag, ModelArgument


class StoredDtype(StrEnum):
    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


def export(
    model: ModelArgument,
    directory: Annotated[
        Path, Argument(metavar="DIRECTORY", help="New or empty.", show_default=False)
    ],
    layers: Annotated[
        int, Option(help="Layers to keep, from the first on.", metavar="N", show_default=False)
    ],
    dtype: Annotated[
        StoredDtype,
        Option(
            help="Of the stored matrices: bfloat16, float32, or auto: those of a directory as "
            "they are, those of a GGUF file in bfloat16.",
            metavar="DTYPE",
        ),
    ] = StoredDtype.AUTO,
    force: Annotated[bool, Option("--force", help="Replace an earlier export.")] = False,
    json_output: JsonFlag = False,
) -> None:
    """Write a model's first layers, final norm and head as a model of their own: a weak draft."""
    from foredraft.cli.download import fetch_once
    from foredraft.models.export import check_destination, export_layers

    check_destination(directory, force)  # before a model is fetched
    fetch_once(model)
    console = message_console()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("writing", total=None)
        written = export_layers(
            model,
            directory,
            layers,
            dtype=dtype.value,
            force=force,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if json_output:
        facts = {
            "model": model,
            "directory": str(written.directory),
            "layers": written.num_layers,
            "source_layers": written.source_layers,
            "parameters": written.num_parameters,
            "bytes": written.num_bytes,
        }
        sys.stdout.write(json.dumps(facts) + "\n")
        return
    config = {"method": "draft_model", "model": str(written.directory)}
    sys.stdout.write(
        f"{visible(str(written.directory))}: {written.num_layers} of {written.source_layers} "
        f"layers, {written.num_parameters:,} parameters, {written.num_bytes / 2**20:,.1f} MiB\n"
        f"draft with it: --speculative-config {shlex.quote(json.dumps(config))}\n"
    )
