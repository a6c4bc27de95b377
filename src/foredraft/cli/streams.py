"""The standard streams as every command sees them, whatever the caller connected.

Knows file descriptors and exit codes; knows nothing of what is written. One behaviour everywhere:

- a reader of stdout that leaves early (`| head -1`) ends the command quietly with 141, which is
  what a shell reports for a program that SIGPIPE ended;
- any other failure to write stdout (a full disk) is one line on stderr and exit code 2;
- what stderr can't take is dropped: the exit code still says how it went;
- characters that an encoding lacks are written as escapes, never an error.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

CLOSED_PIPE = 141  # 128 + SIGPIPE


class OutputError(Exception):
    """stdout can't be written. No OSError, so that no library on the way takes it for its own."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(f"cannot write to stdout: {reason.strerror}")
        self.closed_pipe = reason.errno in (errno.EPIPE, errno.ESHUTDOWN)


class _Guarded:
    """A text stream whose failures to write go to `failed`; everything else is the stream's own."""

    def __init__(self, stream: TextIO, failed: Callable[[OSError], None]) -> None:
        self._stream = stream
        self._failed = failed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._fail(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        _to_nowhere(self._stream)
        self._failed(error)


def _raise(error: OSError) -> None:
    raise OutputError(error) from None


def _drop(_error: OSError) -> None:
    """Nobody is left to tell."""


def _to_nowhere(stream: TextIO) -> None:
    """Point the descriptor at the null device: what is still buffered would fail again at exit."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Standard streams with the behaviour above; stdout is flushed at the end.

    Raises OutputError where stdout can't be written or is closed. A closed stderr is the null
    device.
    """
    before = sys.stdout, sys.stderr
    nowhere: TextIO | None = None
    if sys.stderr is None:
        nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - closed below
    messages: Any = _Guarded(nowhere or sys.stderr, _drop)
    sys.stderr = messages
    try:
        if sys.stdout is None:
            raise OutputError(OSError(errno.EBADF, "it is closed"))
        output: Any = _Guarded(sys.stdout, _raise)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        sys.stdout = output
        yield
        output.flush()
    finally:
        messages.flush()
        sys.stdout, sys.stderr = before
        if nowhere is not None:
            nowhere.close()
