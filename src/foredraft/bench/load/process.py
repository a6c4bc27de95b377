"""A server as a process: its start, what it takes of the machine, and its end.

Knows Linux's /proc and the command `foredraft serve`; knows no request.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from foredraft.core.errors import UserError

COMMAND = (
    sys.executable,
    "-c",
    "import sys; from foredraft.cli.main import main; sys.exit(main())",
    "serve",
)
MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Vitals:
    """Of a process at one moment."""

    at: float  # time.perf_counter
    rss_mib: float
    open_files: int
    threads: int
    cpu_seconds: float  # user and system, since its start


class ServerProcess:
    """`foredraft serve` on a free port of this machine."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self._process = process
        parts = urlsplit(url)
        self.url, self.host, self.port = url, str(parts.hostname), int(parts.port or 80)

    @classmethod
    async def start(cls, arguments: Sequence[str], log: IO[bytes]) -> ServerProcess:
        """Raises UserError for one that does not start; `log` takes what it says."""
        if not Path("/proc/self/statm").exists():
            raise UserError("the server's memory is read from /proc, which only Linux has")
        command = [*COMMAND, *arguments, "--port", "0", "--json"]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=log
        )
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            await process.wait()
            log.seek(0)
            said = log.read().decode("utf-8", "replace").strip().splitlines()[-1:]
            raise UserError(f"the server did not start: {' '.join(said)}")
        return cls(process, json.loads(line)["url"])

    def vitals(self) -> Vitals:
        """Raises OSError once the process is gone."""
        root = Path("/proc") / str(self._process.pid)
        pages = int((root / "statm").read_text().split()[1])
        # The name in brackets may hold blanks: fields are counted behind it.
        fields = (root / "stat").read_text().rpartition(")")[2].split()
        return Vitals(
            time.perf_counter(),
            pages * os.sysconf("SC_PAGE_SIZE") / MEBIBYTE,
            sum(1 for _ in (root / "fd").iterdir()),
            int(fields[17]),
            (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
        )

    async def stop(self, patience: float = 60.0) -> int:
        """SIGTERM, and its exit status; it is killed where it doesn't end."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(patience):
                    return await self._process.wait()
            except TimeoutError:
                self._process.kill()
        return await self._process.wait()
