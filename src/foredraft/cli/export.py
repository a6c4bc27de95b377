"""`foredraft export`: a model's first layers as a draft model, or a head for another engine.

Knows how to say it; `models.export` and `models.heads.other_engines` write.
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
from foredraft.cli.options import JsonFlag, ModelArgument, PlaceOptions
from foredraft.core.errors import ConfigError, UserError


class StoredDtype(StrEnum):
    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class Engine(StrEnum):
    VLLM = "vllm"
    SGLANG = "sglang"
    HF = "hf"


def export(
    model: ModelArgument,
    directory: Annotated[
        Path, Argument(metavar="DIRECTORY", help="New or empty.", show_default=False)
    ],
    layers: Annotated[
        int | None,
        Option(help="Layers to keep, from the first on.", metavar="N", show_default=False),
    ] = None,
    head: Annotated[
        Path | None,
        Option(help="Instead: an EAGLE-3 head or Medusa heads of the model.", metavar="DIR"),
    ] = None,
    to: Annotated[
        Engine | None,
        Option("--to", help="Who loads the head: vllm, sglang, or hf: complete in itself."),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, Option(help="Drafts a step, of the head.", metavar="N", min=1, max=16)
    ] = None,
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
    """Write a model's first layers as a model of their own, or a head for another engine."""
    if layers is None:
        _export_head(model, directory, head, to, num_speculative_tokens, json_output)
        return
    if head is not None or to is not None:
        raise ConfigError("--layers cuts a model, --head and --to export a head: give one of them")
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


def _export_head(
    model: str,
    directory: Path,
    head: Path | None,
    to: Engine | None,
    num_speculative_tokens: int | None,
    json_output: bool,
) -> None:
    if head is None or to is None:
        raise ConfigError(
            "say what to export: --layers N, or --head DIR with --to vllm, sglang or hf"
        )
    loaded = PlaceOptions().load(model)
    from foredraft.models.heads.other_engines import export_head

    source = head / "best" if (head / "best").is_dir() else head
    try:
        written = export_head(source, directory, to.value, loaded, num_speculative_tokens)
    except OSError as error:
        raise UserError(f"cannot write {str(directory)!r}: {error.strerror}") from None
    if json_output:
        facts = {
            "directory": str(written.directory),
            "engine": written.engine,
            "method": written.method,
            "bytes": written.num_bytes,
            "speculative_config": written.speculative_config,
            "arguments": written.arguments,
        }
        sys.stdout.write(json.dumps(facts) + "\n")
        return
    arguments = written.arguments
    if to is not Engine.SGLANG:
        arguments = ("--speculative-config", json.dumps(written.speculative_config), *arguments)
    sys.stdout.write(
        f"{visible(str(written.directory))}: {written.method} for {written.engine}, "
        f"{written.num_bytes / 2**20:,.1f} MiB\n"
        f"draft with it: {shlex.join(arguments)}\n"
    )
