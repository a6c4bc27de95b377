"""A directory that appears when it is complete, or not at all.

Knows files and renaming; knows no model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def appearing(directory: Path, check_free: Callable[[], None]) -> Iterator[Path]:
    """An empty directory to fill, which takes the place of `directory` when the block ends well.

    `check_free` raises unless what is at `directory` by then may be replaced. Raises OSError; after
    any error everything is as it was before.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        made, old = Path(scratch) / "made", Path(scratch) / "old"
        made.mkdir()
        yield made
        check_free()
        if directory.exists():
            directory.rename(old)
        try:
            made.rename(directory)
        except OSError:
            if old.exists():
                old.rename(directory)
            raise
