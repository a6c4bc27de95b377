"""What all benchmarks do with a result, and while they run: bars, a table, JSON, a file.

Knows terminals and files; knows no benchmark.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from foredraft.cli.console import message_console, output_console
from foredraft.core.errors import UserError

Progress = Callable[[str, int, int], None]  # what, done, of


def deliver(
    result: Mapping[str, Any],
    output: Path | None,
    json_output: bool,
    table: Callable[[Mapping[str, Any]], RenderableType],
) -> None:
    """Write and show a result; one that can't be written goes to stdout whole, so it isn't lost."""
    text = json.dumps(result, indent=1)
    failure: UserError | None = None
    if output is not None:
        try:
            output.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            reason = f"{error.strerror}; the result is on stdout"
            failure = UserError(f"cannot write --output {str(output)!r}: {reason}")
    if json_output or failure is not None:
        sys.stdout.write(text + "\n")
    else:
        output_console().print(table(result))
    if failure is not None:
        raise failure


def check_output(output: Path | None) -> None:
    """Whether the result can be written, before an hour is spent on it. Changes no file.

    Raises UserError.
    """
    if output is None:
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        existed = output.exists()
        with output.open("a", encoding="utf-8"):
            pass
        if not existed:
            output.unlink()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"cannot write --output {str(output)!r}: {reason}") from None


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """A bar a phase on stderr, where that is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = message_console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:
        known: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in known:
                known[what] = bars.add_task(what, total=total)
            bars.update(known[what], completed=done)

        yield show
