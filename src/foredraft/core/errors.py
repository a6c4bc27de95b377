"""The mistakes a user can make. Knows nothing of who shows them.

Whoever faces a person (the command, the server) turns a `UserError` into one line; everything else
is a fault of ours.
"""

from __future__ import annotations

LONGEST_MESSAGE = 1000  # characters


class UserError(ValueError):
    """A user's mistake: one line with the offending value and what would be valid.

    The value may come from a file that anyone made: characters that do not belong on a line are
    escaped, and a long message loses its middle.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(_one_line(message))


class InvalidRequest(UserError):  # noqa: N818 - reads as what it is: `raise InvalidRequest(...)`
    """A request that cannot be honoured: a field, a prompt, a row without any allowed token."""


class ModelError(UserError):
    """Model files that cannot be used, or a model whose output is not a number."""


class QueueFull(UserError):  # noqa: N818 - likewise
    """More requests than may wait: come again later."""


class EngineClosed(RuntimeError):  # noqa: N818 - likewise
    """The engine takes no requests any more: it was closed, or its thread has died."""


class IntegrityError(RuntimeError):
    """State that contradicts itself: a fault of ours, found by a `check_integrity`."""


class ConfigError(UserError):
    """An engine or speculation setting that is unknown or out of range."""


def _one_line(text: str) -> str:
    text = " ".join(text.splitlines())
    if len(text) > LONGEST_MESSAGE:
        text = f"{text[: LONGEST_MESSAGE // 2]} ... {text[-LONGEST_MESSAGE // 4 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
