"""Prompts to measure with: JSON lines with `id`, `task` and `turns`.

Knows the file's form and names the line and field of a mistake; knows nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foredraft.core.errors import UserError


@dataclass(frozen=True, slots=True)
class Item:
    """One conversation; benchmarks use its first user turn."""

    id: str
    task: str
    turns: tuple[str, ...]
    line: int = field(default=0, compare=False)  # of the file it was read from


def read_workload(path: Path) -> list[Item]:
    """All items of a file, in order, each with an id of its own.

    Raises UserError with line number and field.
    """
    try:
        lines = path.read_text(encoding="utf-8").split(
            "\n"
        )  # not splitlines: JSON strings may hold U+2028
    except UnicodeDecodeError:
        raise UserError(f"workload {str(path)!r} is not UTF-8 text") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"cannot read workload {str(path)!r}: {reason}") from None
    items: list[Item] = []
    uses: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        item = replace(_parse(line, f"workload {str(path)!r}, line {number}"), line=number)
        uses[item.id] = uses.get(item.id, 0) + 1
        if uses[item.id] > 1:  # two prompts made from one source
            item = replace(item, id=f"{item.id}#{uses[item.id]}")
        items.append(item)
    if not items:
        raise UserError(f"workload {str(path)!r} holds no prompts")
    return items


def _parse(line: str, where: str) -> Item:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, thousands of brackets
        raise UserError(f"{where}: nested too deep, or holds too long a number") from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: must be a JSON object, not {type(value).__name__}")
    return Item(_text(value, "id", where), _text(value, "task", where), _turns(value, where))


def _text(value: dict[str, Any], name: str, where: str) -> str:
    found = value.get(name)
    if not _is_text(found):
        raise UserError(f"{where}: field {name!r} must be text that is not empty, got {found!r}")
    return str(found)


def _is_text(value: Any) -> bool:
    """Whether this is a string with something in it and without lone surrogates (`\\ud800`)."""
    if not isinstance(value, str) or not value:
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _turns(value: dict[str, Any], where: str) -> tuple[str, ...]:
    found = value.get("turns")
    if not isinstance(found, list) or not found:
        raise UserError(f"{where}: field 'turns' must be a non-empty list, got {found!r}")
    for index, turn in enumerate(found):
        if not _is_text(turn):
            raise UserError(f"{where}: field 'turns'[{index}] must be text that is not empty")
    return tuple(found)


def select(
    items: Sequence[Item], tasks: Collection[str] = (), limit_per_task: int | None = None
) -> list[Item]:
    """The items of some tasks (all if none is named), at most so many of each. Raises UserError."""
    known = dict.fromkeys(item.task for item in items)
    for task in tasks:
        if task not in known:
            raise UserError(f"task {task!r} is not in the workload; it has {', '.join(known)}")
    chosen: list[Item] = []
    taken: dict[str, int] = {}
    for item in items:
        count = taken.get(item.task, 0)
        if (tasks and item.task not in tasks) or (
            limit_per_task is not None and count >= limit_per_task
        ):
            continue
        taken[item.task] = count + 1
        chosen.append(item)
    return chosen
