"""Lets a command take frozen groups of options where its reader sees a flat list of them.

Knows dataclasses and signatures; knows no option.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def option_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let parameters whose type is a group of options above appear as the group's single options.

    The command keeps its short signature; typer sees one flat list of options.
    """
    hints = get_type_hints(command, include_extras=True)
    hints.pop("return", None)
    defaults = inspect.signature(command).parameters
    groups: dict[str, tuple[Any, list[str]]] = {}
    flat: list[inspect.Parameter] = []
    for name, hint in hints.items():
        if is_dataclass(hint):
            members = list(_parameters_of(hint))
            groups[name] = (hint, [member.name for member in members])
            flat.extend(members)
        else:
            flat.append(
                defaults[name].replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY)
            )

    @functools.wraps(command)
    def flattened(**given: Any) -> Any:
        for name, (group, members) in groups.items():
            given[name] = group(**{member: given.pop(member) for member in members})
        return command(**given)

    shown: Any = flattened
    shown.__signature__ = inspect.Signature(flat)
    shown.__annotations__ = {each.name: each.annotation for each in flat}
    return flattened


def _parameters_of(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for each in fields(group):
        yield inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default,  # every option has one
            annotation=hints[each.name],
        )


def given_options(group: Any) -> list[str]:
    """The options of a group that differ from their defaults, as a user writes them."""
    return [
        f"--{each.name.replace('_', '-')}"
        for each in fields(group)
        if getattr(group, each.name) not in (each.default, [])
    ]
