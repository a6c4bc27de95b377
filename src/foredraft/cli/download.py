"""Fetching a built-in model with a progress bar, once.

Knows progress bars and where to say what a licence asks for; `models.registry` knows where models
come from and where they are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from foredraft.cli.console import message_console
from foredraft.models.registry import BUILT_IN, Stage, cached_path, pull

WORDS: dict[Stage, str] = {"download": "downloading", "unpack": "unpacking"}


def fetch_once(model: str) -> None:
    """Fetch a built-in model that is not there yet, with a bar; nothing for any other model."""
    if model in BUILT_IN and cached_path(model) is None:
        fetch(model)


def fetch_draft(config: Mapping[str, Any] | None) -> None:
    """`fetch_once` for the draft model that a speculative config names, if any."""
    model = (config or {}).get("model")
    if isinstance(model, str):
        fetch_once(model)


def fetch(model: str) -> Path:
    """The file of a built-in model, fetched with a bar on stderr where that is a terminal.

    Raises ModelError for an unknown name or a failed download.
    """
    console = message_console()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[Stage, TaskID] = {}

        def show(stage: Stage, done: int, total: int) -> None:
            if stage not in WORDS:  # "verify" is over as soon as it is told
                return
            if stage not in tasks:
                if stage == "download" and not console.is_terminal:
                    console.print(f"fetching {model} ...")
                tasks[stage] = bars.add_task(f"{WORDS[stage]} {model}", total=total)
            bars.update(tasks[stage], completed=done)

        def announce(notice: str) -> None:
            console.print(notice, soft_wrap=True)

        return pull(model, show, announce)
