"""Writes a stream of text as it comes, each token in the colour of its origin.

Knows stream deltas and consoles; knows nothing of how tokens are made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from foredraft.cli.console import ORIGIN_STYLES, coloured, visible

if TYPE_CHECKING:
    from foredraft.engine.outputs import RequestOutput, StreamDelta


class Pieces(Protocol):
    """What is asked of a streaming detokenizer."""

    def push(self, ids: list[int]) -> str: ...


class OriginSpans:
    """Splits the text of a stream into spans of one origin.

    The engine's text may lag behind its tokens (a stop string in the making, half a character), so
    each token's own text is queued with its origin, and the text that arrives takes as many
    characters from the queue.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._queue: deque[tuple[int, str]] = deque()  # characters still to come, their origin
        self._origin = "plain"

    def take(self, delta: StreamDelta) -> Iterator[tuple[str, str]]:
        """`(text, origin)` spans that together are exactly `delta.text`."""
        for token, origin in zip(delta.token_ids, delta.origins, strict=True):
            piece = self._pieces.push([token])
            if piece:
                self._queue.append((len(piece), str(origin.value)))
        text = delta.text
        while text:
            if not self._queue:  # text of the engine's own, such as the last half of a character
                yield text, self._origin
                return
            length, self._origin = self._queue.popleft()
            if length > len(text):
                self._queue.appendleft((length - len(text), self._origin))
            yield text[:length], self._origin
            text = text[length:]


class TokenWriter:
    """Writes deltas to one console: coloured and escaped on a terminal, as they are to a pipe."""

    def __init__(self, console: Console, pieces: Pieces) -> None:
        self._console = console
        self._spans = OriginSpans(pieces)
        self._coloured = coloured(console)
        self._terminal = console.is_terminal
        self.ends_with_newline = True

    def write(self, delta: StreamDelta) -> None:
        for text, origin in self._spans.take(delta):
            self.write_text(text, ORIGIN_STYLES[origin])
        self._console.file.flush()

    def write_text(self, text: str, style: Style) -> None:
        if not text:
            return
        self.ends_with_newline = text.endswith("\n")
        shown = visible(text) if self._terminal else text
        if self._coloured:  # rendered directly: rich would wrap lines and strip blanks
            shown = style.render(shown, color_system=ColorSystem.STANDARD)
        self._console.file.write(shown)

    def end_line(self) -> None:
        if not self.ends_with_newline:
            self._console.file.write("\n")
            self.ends_with_newline = True
        self._console.file.flush()


def write_stream(writer: TokenWriter, deltas: Iterable[StreamDelta]) -> RequestOutput:
    """Write a whole stream and return its finished output."""
    output: RequestOutput | None = None
    for delta in deltas:
        writer.write(delta)
        output = delta.finished or output
    if output is None:
        raise RuntimeError("the stream ended without a finished output")
    return output
