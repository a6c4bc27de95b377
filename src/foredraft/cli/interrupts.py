"""Ctrl-C while the libraries that run a model are being imported.

Knows signals and typer's commands; knows no command.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typer.core import TyperCommand


class ModelCommand(TyperCommand):
    """A command that runs a model: it starts with the imports this takes, each of them whole.

    An interrupt inside them can get lost: torch takes whatever numpy's import raises for the lack
    of it. Or it comes out later, as an ImportError: numpy refuses to be imported again.
    """

    def invoke(self, ctx: Any) -> Any:
        with held_interrupts():
            import foredraft.engine.llm  # noqa: F401 - for what comes along with it
        return super().invoke(ctx)


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Raise a KeyboardInterrupt that falls into the block at its end.

    Changes nothing where interrupts are ignored, or in another thread than the main one.
    """
    here = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if not here or before in (None, signal.SIG_IGN):
        yield
        return
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        raise KeyboardInterrupt
