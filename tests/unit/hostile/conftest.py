"""What a file made to harm may do: be refused in one line, soon, without filling the memory."""

from __future__ import annotations

import re
import resource
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from foredraft.core.errors import ModelError
from foredraft.models.load import load_model

# Of Python's and numpy's memory at once: more than the files here hold, less than they claim.
MAX_EXTRA_BYTES = 16 * 2**20
# Of the process: catches what is allocated in C++ and Rust too. Threads and caches need some.
MAX_EXTRA_DATA = 512 * 2**20
LONGEST_LINE = 2000

Refusal = Callable[..., str]


@contextmanager
def little_memory() -> Iterator[None]:
    """Fails on memory that a file can only have asked for."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        limit = pages * resource.getpagesize() + MAX_EXTRA_DATA
        resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
        assert peak < MAX_EXTRA_BYTES, f"{peak} bytes at once"
    finally:
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.fixture
def refusal() -> Refusal:
    """Loads what must be refused, and gives the refusal: one line that names the file."""

    def refuse(
        path: Path, complaint: str, load: Callable[[Path], object] = load_on_reference_kernels
    ) -> str:
        with little_memory(), pytest.raises(ModelError) as caught:
            load(path)
        message = str(caught.value)
        assert re.search(complaint, message), message
        assert str(path) in message
        assert message.isprintable()
        assert len(message) < LONGEST_LINE
        return message

    return refuse


def load_on_reference_kernels(path: Path) -> object:
    return load_model(path, kernels="reference")


@pytest.fixture(scope="session", autouse=True)
def _loaded_once() -> None:
    """What is imported and allocated at first use is not a file's doing."""
    import torch

    torch.ones(8, 8) @ torch.ones(8, 8)
