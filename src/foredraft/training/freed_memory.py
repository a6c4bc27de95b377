"""How the C library treats what a step of training gives back.

Knows glibc's `mallopt`; knows no tensor. glibc returns large blocks to the system at once, so that
every step maps and clears its logits anew: half of a step's time on a virtual machine.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of malloc.h
_LARGEST = 2**31 - 1
_AT_ONCE = 2**28  # bytes by which the heap grows


def keep_freed_memory() -> bool:
    """Let the process keep freed blocks for the next allocation. False: another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _LARGEST), (_TOP_PAD, _AT_ONCE))
    return all(mallopt(option, value) == 1 for option, value in wanted)
