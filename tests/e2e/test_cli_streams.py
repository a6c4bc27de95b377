"""Whatever stdin, stdout and stderr are: closed, full, left early, or short of characters."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from foredraft.cli.console import separator
from foredraft.cli.streams import CLOSED_PIPE, OutputError, guarded_streams

CODE = "import sys; from foredraft.cli.main import main; sys.exit(main())"


def _foredraft(*arguments: str, redirect: str = "", **environment: str) -> list[str]:
    """Exit code, stdout and stderr of the command as a shell runs it."""
    done = subprocess.run(
        ["sh", "-c", f'"$0" "$@" {redirect}', sys.executable, "-c", CODE, *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return [str(done.returncode), done.stdout, done.stderr]


def _into_a_closed_pipe(*arguments: str) -> subprocess.CompletedProcess[str]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, "-c", CODE, *arguments],
            stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    finally:
        os.close(writer)


def _commands(tiny: Path) -> list[Sequence[str]]:
    generate = ["generate", str(tiny), "hello", "--max-tokens", "8"]
    return [generate, [*generate, "--json"], ["info"], ["--help"], ["--version"]]


def test_a_reader_that_left_early_is_141_and_silence(tiny: Path) -> None:
    for arguments in _commands(tiny):
        done = _into_a_closed_pipe(*arguments)
        assert done.returncode == CLOSED_PIPE, arguments
        assert done.stderr.count("\n") <= 1  # the summary line of `generate`, which goes to stderr
        assert "Error" not in done.stderr


def test_a_full_disk_is_one_line(tiny: Path) -> None:
    for arguments in _commands(tiny):
        code, _, messages = _foredraft(*arguments, redirect="> /dev/full")
        assert code == "2", arguments
        assert "foredraft: cannot write to stdout: No space left on device\n" in messages
        assert "Traceback" not in messages


def test_closed_streams_are_one_line_each(tiny: Path) -> None:
    for command in ("generate", "chat"):
        code, _, messages = _foredraft(command, str(tiny), redirect="<&-")
        assert code == "2"
        assert messages.startswith("foredraft: ")
        assert messages.count("\n") == 1
    code, _, messages = _foredraft("info", redirect=">&-")
    assert (code, messages) == ("2", "foredraft: cannot write to stdout: it is closed\n")
    assert _foredraft("info", "no-such-model", redirect="2>&-") == ["2", "", ""]
    code, text, _ = _foredraft("info", redirect="2>&-")
    assert code == "0"
    assert "cores" in text


def test_an_ascii_stream_gets_plain_characters(tiny: Path) -> None:
    arguments = ["generate", str(tiny), "hello", "--max-tokens", "8"]
    code, _, summary = _foredraft(*arguments, PYTHONIOENCODING="ascii")
    assert code == "0"
    assert summary.startswith("8 tokens | ")
    assert summary.isascii()
    assert _foredraft("--help", PYTHONIOENCODING="ascii")[0] == "0"


def test_the_separator_fits_the_encoding() -> None:
    for encoding, expected in (("utf-8", " · "), ("ascii", " | ")):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        assert separator(Console(file=stream)) == expected


def test_text_beyond_the_encoding_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    with guarded_streams():
        sys.stdout.write("caf\u00e9 \udcff")
    assert written.getvalue() == b"caf\\xe9 \\udcff"
    assert sys.stdout is stream


def test_what_is_no_failure_of_stdout_passes_through() -> None:
    with pytest.raises(OSError, match="ours"), guarded_streams():
        raise OSError("ours")


class _Broken(io.StringIO):
    def write(self, _text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_failing_stderr_is_ignored_and_a_failing_stdout_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", _Broken())
    with guarded_streams():
        sys.stderr.write("nobody reads this")
    monkeypatch.setattr(sys, "stdout", _Broken())
    with pytest.raises(OutputError) as caught, guarded_streams():
        sys.stdout.write("nor this")
    assert caught.value.closed_pipe
