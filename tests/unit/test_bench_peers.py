"""Talking with a peer's process."""

from __future__ import annotations

import sys

import pytest

from foredraft.bench.peers import converse


def test_an_answer_longer_than_a_pipe_holds_does_not_block() -> None:
    code = (
        "import sys; sys.stdin.read(); sys.stderr.write('progress 1/1\\n'); sys.stderr.flush()\n"
        "sys.stdout.write('x' * 1_000_000)"
    )
    told: list[str] = []
    answer = converse("a peer", [sys.executable, "-c", code], "request", told.append)
    assert len(answer) == 1_000_000
    assert told == ["1/1"]


def test_a_failing_peer_is_quoted() -> None:
    code = "import sys; sys.stdin.read(); sys.exit('no memory')"
    with pytest.raises(RuntimeError, match="a peer failed:\nno memory"):
        converse("a peer", [sys.executable, "-c", code], "request", lambda _line: None)
