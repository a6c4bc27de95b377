"""What a template's operators, methods and filters may be given, so that no result outgrows it.

Knows which of them give more than they take, and by how much; knows no node and no template.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from foredraft.models.template_budget import MAX_BITS, TemplateLimit, check_size, passed, weigh

MAX_WIDTH = 999  # of a formatted field, an indentation, the digits of a rounded number
LONG_NUMBER = re.compile(r"\d{4,}")
_STAR_WIDTH = re.compile(r"%[#0\- +\d.]*\*")
# Methods of these types that give no more than they were given, or are checked below.
BUILT_IN = (str, bytes, int, float, list, tuple, dict)
_METHODS = frozenset(
    (
        "capitalize", "casefold", "center", "copy", "count", "endswith", "find", "get",
        "index", "is_integer", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit",
        "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle",
        "isupper", "items", "join", "keys", "ljust", "lower", "lstrip", "partition",
        "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition",
        "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase",
        "title", "upper", "values", "zfill",
    )
)  # fmt: skip


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Raises TemplateLimit for a result out of all proportion."""
    numbers = isinstance(left, int) and isinstance(right, int)
    if operator == "%" and isinstance(left, str | bytes):
        check_percent(left, right)
    elif numbers and operator in ("*", "**"):
        bits = left.bit_length()
        bits = bits + right.bit_length() if operator == "*" else bits * max(right, 0)
        if bits > MAX_BITS:
            raise TemplateLimit(f"it computes a number of more than {MAX_BITS} bits")
    elif operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(value, str | bytes):
                check_size(len(value) * max(times, 0))
            elif isinstance(times, int) and isinstance(value, list | tuple):
                check_size(weigh(value) * max(times, 0))
    elif operator == "+" and isinstance(left, str | bytes | list | tuple):
        check_size(weigh(left) + weigh(right))


def check_percent(layout: Any, values: Any) -> None:
    text = layout if isinstance(layout, str) else str(layout)
    if LONG_NUMBER.search(text) or _STAR_WIDTH.search(text):
        raise TemplateLimit(f"it formats a field wider than {MAX_WIDTH}")
    check_size(len(text) + text.count("%") * (MAX_WIDTH + weigh(values)))


def checked_arguments(owner: Any, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a built-in type's method that cannot outgrow them by far."""
    if name not in _METHODS:
        raise TemplateLimit(f"it calls {type(owner).__name__}.{name}, which no template needs")
    passed(owner)
    if name in ("center", "ljust", "rjust", "zfill"):
        check_size(_whole(args[0]))
    elif name == "replace":
        _check_replace(owner, *args[:2])
    elif name == "join":
        items = list(passed(args[0]))
        check_size(weigh(items) + len(owner) * len(items))
        return (items, *args[1:])
    return args


def _check_replace(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    times = text.count(old)
    check_size(len(text) + times * len(new))


def _check_width(_: Any, width: Any = 0, *__: Any, **options: Any) -> None:
    check_size(_whole(options.get("width", width)))


def _check_indent(text: Any, width: Any = 4, *_: Any, **options: Any) -> None:
    width = options.get("width", width)
    size = len(width) if isinstance(width, str) else _whole(width)
    check_size(len(str(text)) + size * (1 + len(str(text).splitlines())))


def _check_count(_: Any, count: Any = 0, *__: Any, **options: Any) -> None:
    for value in (count, *options.values()):
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise TemplateLimit(f"it asks for {value} digits or items, at most {MAX_WIDTH} fit")


def _check_join(values: Any, separator: Any = "", *_: Any, **options: Any) -> None:
    between = weigh(options.get("d", separator))
    if hasattr(values, "__len__"):
        check_size(weigh(values) + len(values) * between)
    elif between > MAX_WIDTH:
        raise TemplateLimit("it joins what is not counted yet by a long text")


def _check_sum(_: Any, *args: Any, start: Any = 0, **__: Any) -> None:
    for value in (*args[1:], start):
        if not isinstance(value, int | float):
            raise TemplateLimit("it sums what is no number")


FILTER_CHECKS: dict[str, Callable[..., None]] = {
    "batch": _check_count,
    "center": _check_width,
    "format": lambda text, *args, **kwargs: check_percent(text, kwargs or args),
    "indent": _check_indent,
    "join": _check_join,
    "replace": _check_replace,
    "round": _check_count,
    "slice": _check_count,
    "sum": _check_sum,
}


def _whole(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError(f"a width must be an integer, got {type(value).__name__}")
    return value
