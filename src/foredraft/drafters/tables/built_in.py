"""The n-gram tables that come with the package, by the name of their target.

Knows where they lie; SOURCES.md beside them says what they were made of.
"""

from __future__ import annotations

from pathlib import Path

TABLES = {"smollm2-135m": "smollm2-135m.ngrams"}


def built_in_table(target: str) -> Path | None:
    """The file, None for a target that none comes with."""
    name = TABLES.get(target)
    return None if name is None else Path(__file__).with_name(name)
