"""When a request ends, decided token by token in one function, and the text that may be shown until
then.

Knows tokens, text and the stop rules; knows nothing of drafts: a token accepted from a draft ends a
request exactly where the same token of plain decoding would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.engine.outputs import FinishReason


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends one request, compiled from its sampling parameters and the context that is left."""

    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    include_stop_string: bool
    min_tokens: int
    max_tokens: int  # already cut to the context length


@dataclass(frozen=True, slots=True)
class Stop:
    """A reason to end: `text_end` is where the visible text is cut (None: keep all of it)."""

    finish_reason: FinishReason
    stop_reason: str | int | None = None
    text_end: int | None = None


def check_stop(
    rules: StopRules,
    token: int,
    num_output: int,
    text: str,
    num_new_chars: int,
    complete: bool = False,
) -> Stop | None:
    """Decide after appending `token`, the `num_output`-th output token, whose text ends `text`.

    Only matches that end within the last `num_new_chars` characters are new. A stop wins over
    length on the same token. Stop strings and stop ids count only from `min_tokens` on, and so does
    `complete`: the grammar of the answer leaves nothing to follow.
    """
    if num_output >= rules.min_tokens:
        # The text of a stop token is shown only where stop strings are.
        hides = num_new_chars > 0 and not rules.include_stop_string
        before = len(text) - num_new_chars if hides else None
        if token in rules.eos_token_ids:
            return Stop("stop", text_end=before)
        if token in rules.stop_token_ids:
            return Stop("stop", token, before)
        if rules.stop_strings and num_new_chars:
            found = find_stop_string(rules.stop_strings, text, num_new_chars)
            if found is not None:
                string, start = found
                end = start + len(string) if rules.include_stop_string else start
                return Stop("stop", string, end)
        if complete:
            return Stop("stop")
    if num_output >= rules.max_tokens:
        return Stop("length")
    return None


def find_stop_string(
    stop_strings: Sequence[str], text: str, num_new_chars: int
) -> tuple[str, int] | None:
    """The stop string that ends first in the new characters (the one that starts first among
    those), with its start.
    """
    best: tuple[int, int, str] | None = None
    for string in stop_strings:
        start = text.find(string, max(0, len(text) - num_new_chars - len(string) + 1))
        if start >= 0:
            candidate = (start + len(string), start, string)
            best = candidate if best is None else min(best, candidate)
    return None if best is None else (best[2], best[1])


def safe_text_length(stop_strings: Sequence[str], text: str) -> int:
    """How much of an unfinished `text` may be shown: all but a tail that could still become a stop
    string.
    """
    held = 0
    for string in stop_strings:
        for length in range(min(len(string) - 1, len(text)), held, -1):
            if text.endswith(string[:length]):
                held = length
                break
    return len(text) - held
