"""How far a batch is: a function of the caller's, or a bar on a terminal.

Knows numbers of prompts; knows no prompt and no step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from foredraft.core.errors import InvalidRequest

# False: nothing. True: a bar on stderr, where that is a terminal. Or f(done, total).
Progress = bool | Callable[[int, int], None]


@contextmanager
def reporting(progress: Progress, total: int) -> Iterator[Callable[[int], None]]:
    """A function that is told how many of `total` prompts are done. Raises InvalidRequest."""
    if callable(progress):
        report = progress
        yield lambda done: report(done, total)
    elif progress is True:
        with _bar(total) as move:
            yield move
    elif progress is False:
        yield lambda done: None
    else:
        raise InvalidRequest(f"progress must be True, False or a function, got {progress!r}")


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        progress.TextColumn("prompts"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    )
    bar = progress.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    )
    with bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)
