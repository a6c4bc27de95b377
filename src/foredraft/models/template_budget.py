"""How much a chat template may do: sizes of single values, and one sum of work for a rendering.

Knows values and their sizes; knows no template. A template comes with a model, from anywhere: what
it may build is checked before it is built, and what it does is counted. Nothing is timed, so that a
conversation that renders once renders always.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.utils import Namespace

MAX_VALUE = 4 * 2**20  # characters of one value, and of a rendering
MAX_ITEMS = 2**17  # of one value, at any depth
MAX_WORK = 2**26  # characters built or passed around in one rendering
MAX_DEPTH = 100  # of lists and objects inside each other
MAX_BITS = 4096  # of an integer that a product or power gives
STEP = 128  # what a call or a turn of a loop costs: half a million of them take a second or two
READ = 16  # reading a character costs that much less than making one

_Sequence = (list, tuple, set, frozenset)


class TemplateLimit(Exception):  # noqa: N818 - says what was met
    """A template builds or does more than any conversation needs."""


_left: ContextVar[list[int]] = ContextVar("_left")


@contextmanager
def budget() -> Iterator[None]:
    """The work of one rendering, which happens inside."""
    token = _left.set([MAX_WORK])
    try:
        yield
    finally:
        _left.reset(token)


def spend(work: int) -> None:
    """Count `work`. Raises TemplateLimit when the budget is used up."""
    left = _left.get()
    left[0] -= work
    if left[0] < 0:
        raise TemplateLimit("it does more work than a conversation needs")


def check_size(size: int) -> None:
    """Raises TemplateLimit for a value that would be larger than any may be."""
    if size > MAX_VALUE:
        raise TemplateLimit(f"it builds a value of more than {MAX_VALUE} characters")


def weigh(value: Any) -> int:
    """Characters and items of `value` with all that is in it, each as often as it would be printed.

    Raises TemplateLimit beyond `MAX_VALUE`, `MAX_ITEMS` or `MAX_DEPTH`.
    """
    total = num_items = 0
    pending = [(value, 0)]
    while pending:
        item, depth = pending.pop()
        inner: list[Any] = []
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, int):
            total += item.bit_length() // 3
        elif isinstance(item, _Sequence):
            inner = list(item) if len(item) <= MAX_ITEMS else [None] * (MAX_ITEMS + 1)
        elif isinstance(item, dict | Namespace):
            table = item if isinstance(item, dict) else _attributes(item)
            inner = [*table, *table.values()]
        total += 1
        num_items += len(inner)
        check_size(total)
        if num_items > MAX_ITEMS:
            raise TemplateLimit(f"it builds a value of more than {MAX_ITEMS} items")
        if inner and depth == MAX_DEPTH:
            raise TemplateLimit(f"it nests values more than {MAX_DEPTH} deep")
        pending += [(one, depth + 1) for one in inner]
    return total


def made(value: Any) -> Any:
    """`value`, which was just built, counted in full; an iterator is counted as it goes."""
    if isinstance(value, Iterator):
        return _counted(value)
    spend(weigh(value))
    return value


def read(value: Any) -> Any:
    """`value`, about to be read with all that is in it."""
    spend(1 + weigh(value) // READ)
    return value


def passed(value: Any) -> Any:
    """`value`, about to be passed on or copied, but not what is in it."""
    if isinstance(value, Iterator):
        return _counted(value)
    size = len(value) if isinstance(value, (str, bytes, dict, *_Sequence)) else 0
    spend(1 + size // READ)
    return value


def _counted(values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        spend(STEP)
        yield value


def _attributes(namespace: Namespace) -> dict[str, Any]:
    """What jinja2 keeps in a namespace; there is no public way to it from outside a template."""
    found: dict[str, Any] = object.__getattribute__(namespace, "_Namespace__attrs")
    return found
