"""How much memory there is to share: the machine's, or less where a control group allows less; a
GPU's own.

Knows where Linux keeps these numbers; knows no model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

CGROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def memory_of(device: torch.device) -> int | None:
    """Bytes that a process may use of `device`'s memory; None where the system doesn't say."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).get_device_properties(device).total_memory)
    known = [size for size in (_installed(), *control_group_limits()) if size is not None]
    return min(known, default=None)


def _installed() -> int | None:
    try:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
    return size if size > 0 else None


def control_group_limits(mounted: Path = CGROUPS, own: Path = OWN_GROUPS) -> Iterator[int]:
    """Bytes that this process's control groups allow, one for each that has a limit.

    `own` names the groups as the host sees them. A container mounts its part alone, at `mounted`,
    where that name leads nowhere: so each group above counts too, up to the root of the mount.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, controllers, name = [*line.split(":", 2), "", ""][:3]
        if not controllers:  # version 2, alone or beside version 1
            hierarchies, file = (mounted, mounted / "unified"), "memory.max"
        elif "memory" in controllers.split(","):
            hierarchies, file = (mounted / "memory", mounted / controllers), "memory.limit_in_bytes"
        else:
            continue
        for hierarchy in dict.fromkeys(hierarchies):
            group = hierarchy / name.strip("/")
            for place in (group, *group.parents):
                if not place.is_relative_to(hierarchy):
                    break
                limit = _limit(place / file)
                if limit is not None:
                    yield limit


def _limit(file: Path) -> int | None:
    """The number in `file`; None for "max", and where there is none."""
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
