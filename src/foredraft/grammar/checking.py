"""Whether a grammar can be compiled at all, found where it can do no harm and in bounded time.

Knows grammars as llguidance's text, and the process that tries them; knows no model.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading

from foredraft.core.errors import InvalidRequest
from foredraft.core.structured_outputs import StructuredOutputs

WALL_SECONDS = 20.0  # of the process, on a machine that is busy; its own time is bounded by itself
# Small ones of these are known to be harmless, and need no process: nothing in them multiplies.
SMALL_SCHEMA, SMALL_REGEX = 2048, 256  # characters
_MULTIPLIES = re.compile(r'"(\$ref|\$dynamicRef|pattern|patternProperties|allOf|oneOf|format)"')
MOST_LINES = (
    1000  # of a Lark grammar: one rule a line at most, and rules nest as deep as their number
)
_AT_ONCE = threading.Semaphore(2)  # processes, however many ask
_RULE = re.compile(r"^\s*[?!]?[A-Za-z_]", re.MULTILINE)


def is_harmless(structured: StructuredOutputs) -> bool:
    """Whether compiling takes little for its size alone."""
    kind = structured.kind
    if kind == "json":
        text = str(structured.json)
        return len(text) <= SMALL_SCHEMA and not _MULTIPLIES.search(text)
    if kind == "regex":
        text = str(structured.regex)
        return len(text) <= SMALL_REGEX and "{" not in text
    return kind in ("choice", "json_object")


def check_size(structured: StructuredOutputs) -> None:
    """Raise InvalidRequest for a Lark grammar of more rules than may be nested."""
    if structured.kind == "grammar":
        count = len(_RULE.findall(str(structured.grammar)))
        if count > MOST_LINES:
            raise InvalidRequest(
                f"structured_outputs.grammar has {count} lines of rules, {MOST_LINES} at most are "
                "read"
            )


def fault_in_process(grammar: str) -> str:
    """llguidance's message on a grammar, empty where it has none, from a process of its own.

    Raises InvalidRequest where the machine is too busy to tell.
    """
    command = [sys.executable, "-m", "foredraft.grammar.check_process"]
    try:
        with _AT_ONCE:
            done = subprocess.run(
                command,
                input=grammar.encode(),
                capture_output=True,
                timeout=WALL_SECONDS,
                check=False,
            )
    except subprocess.TimeoutExpired as error:
        raise InvalidRequest(
            f"the structure of structured_outputs was not compiled within {WALL_SECONDS:g} seconds"
        ) from error
    if done.returncode != 0:
        return "it takes too long, or too much memory, to compile"
    return done.stdout.decode(errors="replace")


def described(message: str) -> str:
    """llguidance's message as one line: where, and why."""
    message = message.replace("<non-verbose/>", "").strip()
    lines = message.splitlines()
    place = re.match(r"(?:at )?(\d+)\((\d+)\): (.*)", message)
    where = ""
    if place is not None:
        where = f"line {place[1]}, column {place[2]}: "
        lines[0] = place[3]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    carets = [i for i, line in enumerate(lines) if i and line.strip() and not line.strip(" ^")]
    if errors and carets:
        # The expression stands above the mark, both indented by four.
        column = lines[carets[0]].index("^") - 3
        return f"at character {column} of the expression: {errors[0]}"
    if "NoExtension" in message:
        return "nothing can satisfy it"
    return f"{where}{lines[0] if lines else message}"
