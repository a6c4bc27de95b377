"""The n-gram tables that come with the package, by the name of their target.

Knows where they lie; SOURCES.md beside them says what they were made of.
"""

from __future__ import annotations

from pathlib import Path

from foredraft.models.registry import built_in_name

TABLES = {"smollm2-135m": "smollm2-135m.ngrams"}


def built_in_table(target: str, path: Path | None = None) -> Path | None:
    """The file, None for a target that none comes with. `path` is where the target lies: by any
    name it is the model whose file it has.
    """
    known = target if target in TABLES or path is None else built_in_name(path)
    name = TABLES.get(known or "")
    return None if name is None else Path(__file__).with_name(name)
