"""Streams on a terminal and in a pipe: colours by origin, and nothing that steers the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from foredraft.cli.console import visible
from foredraft.cli.stream import OriginSpans, TokenWriter
from foredraft.core.acceptance import Origin
from foredraft.engine.outputs import StreamDelta

PLAIN, ACCEPTED, RECOVERED, BONUS = Origin.PLAIN, Origin.ACCEPTED, Origin.RECOVERED, Origin.BONUS


class Pieces:
    """Token i is the i-th of the given texts."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def push(self, ids: list[int]) -> str:
        return "".join(self.texts[token] for token in ids)


def _written(terminal: bool, pieces: Pieces, *deltas: StreamDelta) -> str:
    file = io.StringIO()
    console = Console(
        file=file,
        force_terminal=terminal,
        color_system="standard" if terminal else None,
        no_color=False,
    )
    writer = TokenWriter(console, pieces)
    for delta in deltas:
        writer.write(delta)
    return file.getvalue()


def test_each_token_has_the_colour_of_its_origin() -> None:
    delta = StreamDelta("abcd", [0, 1, 2, 3], [ACCEPTED, RECOVERED, BONUS, PLAIN])
    text = _written(True, Pieces("a", "b", "c", "d"), delta)
    assert text == "\x1b[32ma\x1b[0m\x1b[33mb\x1b[0m\x1b[36mc\x1b[0md"


def test_a_pipe_gets_the_text_as_it_is() -> None:
    delta = StreamDelta("a\x1b[31m[red]b", [0, 1], [ACCEPTED, BONUS])
    assert _written(False, Pieces("a\x1b[31m", "[red]b"), delta) == "a\x1b[31m[red]b"


def test_a_model_cannot_steer_the_terminal() -> None:
    hostile = "\x1b]0;title\x07\r[bold red]\u202e\x9b2J"
    text = _written(True, Pieces(hostile), StreamDelta(hostile, [0], [PLAIN]))
    assert text == "\\x1b]0;title\\x07\\x0d[bold red]\\u202e\\x9b2J"


@pytest.mark.parametrize("text", ["", "plain words\n\ttabbed", "émoji 🙂", "[red]markup[/red]"])
def test_ordinary_text_is_shown_unchanged(text: str) -> None:
    assert visible(text) == text


def test_text_that_lags_behind_its_tokens_keeps_their_colours() -> None:
    spans = OriginSpans(Pieces("one ", "two ", "three"))
    first = list(spans.take(StreamDelta("on", [0, 1], [ACCEPTED, BONUS])))
    second = list(spans.take(StreamDelta("e two thr", [2], [RECOVERED])))
    third = list(spans.take(StreamDelta("ee", [], [])))
    assert first == [("on", "accepted")]
    assert second == [("e ", "accepted"), ("two ", "bonus"), ("thr", "recovered")]
    assert third == [("ee", "recovered")]


def test_text_without_tokens_of_its_own_is_still_written() -> None:
    spans = OriginSpans(Pieces(""))
    assert list(spans.take(StreamDelta("\ufffd", [0], [ACCEPTED]))) == [("\ufffd", "plain")]
