"""How the C library treats what a step of training gives back.

Knows glibc's `mallopt`; knows no tensor. glibc returns large blocks to the system at once, so that
every step maps and clears its logits anew: half of a step's time on a virtual machine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of malloc.h
_KEPT = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 2**28}
_USUAL = {_MMAP_MAX: 2**16, _TRIM_THRESHOLD: 2**17, _TOP_PAD: 2**17}


@contextmanager
def freed_memory_kept() -> Iterator[bool]:
    """The process keeps freed blocks for the next allocation; False: another C library."""
    kept = _set(_KEPT)
    try:
        yield kept
    finally:
        _set(_USUAL)


def _set(options: Mapping[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*option) == 1 for option in options.items())
