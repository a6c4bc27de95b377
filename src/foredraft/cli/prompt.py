"""Text that a user gives: as an argument, in a file, on stdin. It must be UTF-8 text.

Knows where text comes from; knows nothing of what it is for.
"""

from __future__ import annotations

import sys
from pathlib import Path

from foredraft.core.errors import UserError


def check_text(text: str, what: str) -> str:
    """`text`, unless it was made of bytes that are not UTF-8, which Python keeps as surrogates.

    Raises UserError that says `what`.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{what} is not UTF-8 text") from None
    return text


def read_text(path: Path, what: str) -> str:
    """The text of a file that the user named; raises UserError with the path."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{what} {str(path)!r} is not UTF-8 text") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"cannot read {what} {str(path)!r}: {reason}") from None


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from the argument, the file or a piped stdin, less one final newline.

    Raises UserError for no prompt, two prompts, and for what is not text.
    """
    if prompt is not None and prompt_file is not None:
        raise UserError("the prompt is given twice: as an argument and by --prompt-file")
    if prompt is None:
        prompt = _read_stdin() if prompt_file is None else read_text(prompt_file, "--prompt-file")
        prompt = prompt.removesuffix("\n")
    if not prompt:
        raise UserError("the prompt is empty")
    return check_text(prompt, "the prompt")


def _read_stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError("no prompt: give it as an argument, by --prompt-file or on stdin")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        raise UserError("the prompt on stdin is not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"cannot read stdin: {error.strerror}") from None
