"""How long a call takes, and nothing of Python's own in between."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator


def seconds_of(run: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@contextlib.contextmanager
def what_is_there_stays() -> Iterator[None]:
    """Within, garbage collections don't look at what is loaded by now: a tenth of a second each."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
