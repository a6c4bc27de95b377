"""Runs a fuzz target: with atheris' coverage where it is installed, else by mutation alone.

Knows how inputs come about; knows no format. Whatever a target raises is a finding.
"""

from __future__ import annotations

import argparse
import atexit
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mutate import Mutator

from foredraft.core.errors import ModelError

Target = Callable[[bytes], None]
MAX_BYTES = 2**16  # of an input
MAX_EXTRA_DATA = 2**30  # bytes of memory beyond the start's: a header's claim must not get them
_TIMEOUT = 20  # seconds for one input


def scratch() -> Path:
    """A new folder, in memory where the machine has one there: inputs are written to it."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def refusal_of(read: Callable[[], object], path: Path) -> str | None:
    """What a reader says in refusing; it has to be one line that names the file."""
    try:
        read()
    except ModelError as error:
        message = str(error)
        if not message.isprintable() or str(path) not in message:
            raise AssertionError(f"refused with {message!r}") from error
        return message
    return None


def limit_memory() -> None:
    """More memory than any input can need is a MemoryError, and so a finding (on Linux)."""
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = pages * resource.getpagesize() + MAX_EXTRA_DATA
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def fuzz(target: Target, mutate: Mutator, arguments: Sequence[str]) -> None:
    """Give `target` inputs for ever, or as long as libFuzzer's `-max_total_time` says.

    `arguments` are the program's: libFuzzer's options and folders of a corpus.
    """
    limit_memory()
    try:
        import atheris
    except ImportError:
        _by_mutation_alone(target, mutate, arguments[1:])
        return

    def custom_mutator(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        mutated = mutate(data, rng) if rng.random() < 0.7 else atheris.Mutate(data, max_size)
        return bytes(mutated[:max_size])

    options = [f"-max_len={MAX_BYTES}", f"-timeout={_TIMEOUT}", "-rss_limit_mb=0"]
    command = [arguments[0], *options, *arguments[1:]]
    atheris.Setup(command, target, custom_mutator=custom_mutator)
    atheris.Fuzz()


def _by_mutation_alone(target: Target, mutate: Mutator, arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="atheris is not installed: mutation alone")
    parser.add_argument("-max_total_time", type=float, default=60.0)
    parser.add_argument("corpus", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    seeds = [path.read_bytes() for folder in options.corpus for path in sorted(folder.iterdir())]
    end = time.monotonic() + options.max_total_time
    count = 0
    while time.monotonic() < end:
        data = random_input(seeds, mutate, count)
        try:
            target(data)
        except BaseException:
            finding = Path(f"crash-{count}")
            finding.write_bytes(data)
            sys.stderr.write(f"finding: {finding}\n")
            raise
        count += 1
    sys.stderr.write(f"{count} inputs, nothing found\n")


def random_input(seeds: Sequence[bytes], mutate: Mutator, number: int) -> bytes:
    """Input `number`: a seed, mutated one to five times."""
    rng = random.Random(number)
    data = rng.choice(seeds)
    for _ in range(rng.randint(1, 5)):
        data = mutate(data, rng)
    return data[:MAX_BYTES]
