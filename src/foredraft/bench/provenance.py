"""Where a result comes from: machine, versions, revision, arguments, date.

Knows the machine it runs on; knows nothing of what is measured. A figure without this is not a
result.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("foredraft", "torch", "transformers", "numpy", "tokenizers")


def provenance() -> dict[str, Any]:
    """The block that every result file carries beside its figures."""
    return {
        "machine": machine(),
        "versions": versions(),
        "revision": revision(),
        "arguments": arguments(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def machine() -> dict[str, Any]:
    """CPU model, cores usable by this process, memory in GiB, operating system."""
    return {
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def usable_cores() -> int:
    """Logical cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    """The name, and family and model too: some virtual machines hide the name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = line.partition(":")
        if separator:
            fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name", platform.machine())
    if "cpu family" in fields:
        name += f" (family {fields['cpu family']}, model {fields.get('model', '?')})"
    return name


def _memory_gib() -> float | None:
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    return round(pages * size / 2**30, 1)


def versions() -> dict[str, str]:
    """Python and the packages that matter, those that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def revision() -> str | None:
    """The git commit of the source tree, with `+changes` if it differs; None outside a checkout."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "src", "native")
    return f"{commit}+changes" if changed else commit


def _git(root: Path, *command: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *command], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def arguments() -> list[str]:
    """The command line, the program's directory left out."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
