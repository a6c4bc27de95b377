"""How long a call takes."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds_of(run: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
