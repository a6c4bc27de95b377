"""Consoles, the colours of tokens, and text that is safe to show on a terminal.

Knows terminals; knows neither engine nor models.
"""

from __future__ import annotations

import re
import sys

from rich.console import Console
from rich.style import Style
from rich.text import Text

# Where a token came from -> its style. Plain tokens keep the terminal's own colour.
ORIGIN_STYLES = {
    "accepted": Style(color="green"),
    "recovered": Style(color="yellow"),
    "bonus": Style(color="cyan"),
    "plain": Style(),
}
ORIGIN_WORDS = {
    "accepted": "accepted draft",
    "recovered": "recovered",  # the target's own token after a rejected draft
    "bonus": "bonus",  # one more after a fully accepted draft
    "plain": "plain",  # nothing was drafted
}

# C0 without tab and newline, DEL, C1, line separators, and what reorders text.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\u200e\u200f]"
)


def visible(text: str) -> str:
    """`text` with every character that could steer a terminal written as an escape (`\\x1b`)."""
    return _UNSAFE.sub(lambda match: _escaped(match.group()), text)


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def one_line(text: str) -> str:
    """`text` on one line that cannot steer a terminal, for messages that quote what files hold."""
    return visible(" ".join(text.split()))


def separator(console: Console) -> str:
    """What stands between the figures of a line, in characters that the stream's encoding has."""
    return " | " if console.options.ascii_only else " · "


def output_console() -> Console:
    """stdout; rich decides on colour (a terminal, NO_COLOR, FORCE_COLOR, TERM)."""
    return Console(file=sys.stdout, highlight=False, markup=False, emoji=False)


def message_console() -> Console:
    """stderr, for progress and notes that must not mix with the output."""
    return Console(file=sys.stderr, highlight=False, markup=False, emoji=False)


def coloured(console: Console) -> bool:
    """Whether this console shows colours."""
    return console.is_terminal and console.color_system is not None and not console.no_color


def legend() -> Text:
    """One line that says what the colours mean."""
    line = Text.assemble(("tokens:", "dim"))
    for origin, style in ORIGIN_STYLES.items():
        line.append("  ")
        line.append(ORIGIN_WORDS[origin], style=style)
    return line
