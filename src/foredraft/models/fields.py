"""Typed reading from a mapping nobody has checked: a config.json, a GGUF file's metadata.

Knows keys, types and ranges; knows no model. Every complaint names the source, the key and the
value. Keys that nobody asked for can be listed, so that none is silently ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from foredraft.core.errors import ModelError

MAX_FLOAT = sys.float_info.max  # an integer may be larger
MAX_INTEGER = 2**40  # far above every size in a model, far below what would overflow a product


class Fields:
    """A read-only view of `values` that remembers what was read; `source` begins every error."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._read: set[str] = set()
        self.source = source

    def __contains__(self, key: str) -> bool:
        """Whether `key` is there with a value other than None; does not count as read."""
        return self._values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether `key` is there with the value None, which can mean other than a missing one."""
        return key in self._values and self._values[key] is None

    def fail(self, key: str, expected: str) -> ModelError:
        """The error for a value that is not `expected`."""
        return ModelError(
            f"{self.source}: {key} is {_short(self._values.get(key))}; expected {expected}"
        )

    def value(self, key: str) -> Any:
        """The raw value, None where it is missing."""
        self._read.add(key)
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number of at least `minimum`. Raises ModelError for anything else."""
        value = self._value_or(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, "an integer")
        if not minimum <= value <= MAX_INTEGER:
            raise self.fail(key, f"an integer from {minimum} to {MAX_INTEGER}")
        return value

    def number(self, key: str, default: float | None = None, *, whole: bool = True) -> float:
        """A finite number above 0, an integer only if `whole`. Raises ModelError for others."""
        value = self._value_or(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, "a number")
        if isinstance(value, int) and not whole:
            raise self.fail(key, "a floating-point number")
        if not 0 < value <= MAX_FLOAT:
            raise self.fail(key, "a finite number above 0")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers above 0."""
        values = self._value_or(key, None)
        if not isinstance(values, list) or not all(
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and 0 < value <= MAX_FLOAT
            for value in values
        ):
            raise self.fail(key, "a list of finite numbers above 0")
        return tuple(map(float, values))

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self._value_or(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._value_or(key, default)
        if not isinstance(value, str):
            raise self.fail(key, "a string")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids given as none, one or a list."""
        value = self.value(key)
        found = [] if value is None else value if isinstance(value, list) else [value]
        for token in found:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise self.fail(key, "a token id or a list of token ids")
        return tuple(found)

    def unread(self) -> list[str]:
        """Keys with a value that says something (not None, False, or empty) that nobody read."""
        return sorted(
            key
            for key, value in self._values.items()
            if key not in self._read and value is not None and value is not False and value != []
        )

    def _value_or(self, key: str, default: Any) -> Any:
        value = self.value(key)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self.source}: {key} is missing")
        return default


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
