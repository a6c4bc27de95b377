"""The drafters that come with the package, by the name of their target.

Knows where they lie; SOURCES.md beside them says what they were made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from foredraft.models.registry import built_in_name

TABLES = {"smollm2-135m": "smollm2-135m.ngrams"}
HEADS = {"smollm2-135m": "smollm2-135m-eagle3"}


def built_in_table(target: str, path: Path | None = None) -> Path | None:
    """The file of an n-gram table, None for a target that none comes with. `path` is where the
    target lies: by any name it is the model whose file it has.
    """
    return _shipped(TABLES, target, path)


def built_in_head(target: str, path: Path | None = None) -> Path | None:
    """The directory of an EAGLE-3 head, None for a target that none comes with; see
    `built_in_table`.
    """
    return _shipped(HEADS, target, path)


def _shipped(names: Mapping[str, str], target: str, path: Path | None) -> Path | None:
    known = target if target in names or path is None else built_in_name(path)
    name = names.get(known or "")
    return None if name is None else Path(__file__).with_name(name)
