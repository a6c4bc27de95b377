"""Reads JSON that a client wrote, strictly: what two parsers could read differently is refused.

Knows bytes and JSON; knows no field. UTF-8 alone, every key once, numbers that are numbers, and
bounds on depth and on digits.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

from foredraft.server.errors import APIError

MAX_DEPTH = 128
MAX_DIGITS = 32
_TOO_DEEP = f"is nested more than {MAX_DEPTH} deep"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JSONRefusedError(ValueError):
    """What is wrong, as it follows the name of what was read."""


def parse_body(data: bytes) -> Any:
    """The value of a request's body. Raises APIError (400) that says what is wrong."""
    try:
        return parse_text(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 at byte {error.start}"
    except JSONRefusedError as error:
        what = str(error)
    raise APIError(400, f"the body {what}", code="invalid_json")


def parse_text(text: str) -> Any:
    """The value of a text. Raises JSONRefusedError."""
    try:
        value = json.loads(
            text,
            object_pairs_hook=_once_each,
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_number,
        )
    except json.JSONDecodeError as error:
        raise JSONRefusedError(f"is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise JSONRefusedError(_TOO_DEEP) from None
    _check_depth(value)
    if _SURROGATE.search(text):
        _check_text(value)
    return value


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, times = Counter(key for key, _ in pairs).most_common(1)[0]
        raise JSONRefusedError(f"has the key {twice[:60]!a} {times} times in one object")
    return found


def _no_constant(name: str) -> Any:
    raise JSONRefusedError(f"holds {name}, which is no number in JSON")


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise JSONRefusedError(f"holds a number of {len(digits)} digits, at most {MAX_DIGITS}")
    return int(digits)


def _number(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise JSONRefusedError("holds a number too large for 64 bits")
    return number


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        level = [each for each in level if isinstance(each, dict | list)]
        depth += bool(level)
        if depth > MAX_DEPTH:
            raise JSONRefusedError(_TOO_DEEP)
        level = [
            child for each in level for child in (each.values() if isinstance(each, dict) else each)
        ]


def _check_text(value: Any) -> None:
    """Halves of surrogate pairs have no UTF-8: no answer could repeat them."""
    rest = [value]
    while rest:
        each = rest.pop()
        if isinstance(each, str):
            try:
                each.encode()
            except UnicodeEncodeError:
                raise JSONRefusedError("holds half of a surrogate pair, which is no text") from None
        elif isinstance(each, dict):
            rest += [*each.keys(), *each.values()]
        elif isinstance(each, list):
            rest += each
