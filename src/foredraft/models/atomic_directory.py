"""A directory that appears when it is complete, or not at all.

Knows files and renaming; knows no model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def appearing(directory: Path, check_free: Callable[[], None]) -> Iterator[Path]:
    """An empty directory to fill, which takes the place of `directory` when the block ends well.

    `check_free` raises unless what is at `directory` by then may be replaced. Raises OSError; after
    any error everything is as it was before.
    """
    with (
        _parents(directory) as parent,
        tempfile.TemporaryDirectory(dir=parent, prefix=f".{directory.name}-") as scratch,
    ):
        made, old = Path(scratch) / "made", Path(scratch) / "old"
        made.mkdir()
        yield made
        check_free()
        try:
            if directory.exists():
                directory.rename(old)
            made.rename(directory)
        finally:
            if old.exists() and not directory.exists():
                old.rename(directory)


@contextmanager
def _parents(directory: Path) -> Iterator[Path]:
    """The directory above, made where it is missing; what was made goes if the block fails."""
    missing = [above for above in directory.parents if not above.exists()]
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        yield directory.parent
    except BaseException:
        for above in missing:
            with suppress(OSError):  # never made, or no longer empty
                above.rmdir()
        raise
