"""What a step of this model costs on this machine: measured once, kept in the user's cache.

Knows passes, a clock and one file; knows no request, no drafter and no policy. Passes of one row
to 64 take turns for about two seconds, so that a drift of the machine falls on all alike.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median_low
from typing import Any

import torch

from foredraft.cache.tensors import CacheShape, KVCache
from foredraft.kernels.interface import Segment
from foredraft.models.interface import FlatBatch, Model
from foredraft.models.load import LoadedModel
from foredraft.models.registry import cache_directory
from foredraft.planning.cost import CostCurve, Measured, fit

BUDGET_SECONDS = 2.0
PAGE_SIZE = 16
SHORT, LONG = 16, 1024  # positions before the rows
ALONE = (1, 2, 3, 4, 5, 6, 8, 9)  # rows of one request; behind 9 kernels may tile otherwise
TOGETHER = ((8, 8), (12, 12), (16, 16), (16, 8), (32, 32), (32, 16), (64, 32))  # rows, requests
DEEP = (1, 5)  # rows of one request behind a long context


@dataclass(frozen=True, slots=True)
class _Pass:
    rows: int
    requests: int
    positions: int  # of each request

    @property
    def slots(self) -> int:
        """Of each request."""
        return self.positions + self.rows // self.requests

    def batch(self, vocab_size: int) -> FlatBatch:
        """Requests side by side, each with a chain of draft nodes behind its pending token."""
        pages, each = -(-self.slots // PAGE_SIZE), self.rows // self.requests
        segments = [
            Segment(
                self.positions,
                1,
                tuple(range(-1, each - 2)),
                range(i * pages, (i + 1) * pages),
            )
            for i in range(self.requests)
        ]
        return FlatBatch([i % vocab_size for i in range(self.rows)], segments)


def cost_curve(loaded: LoadedModel, shape: CacheShape, *, recalibrate: bool = False) -> CostCurve:
    """The costs of `loaded` with a cache of `shape`: from the user's cache, else measured (about
    two seconds; longer only where three passes take longer) and kept there.
    """
    path = _path(_identity(loaded, shape))
    if not recalibrate:
        # A file that is missing or was not written by us is measured anew.
        with suppress(OSError, ValueError, TypeError, KeyError):
            return CostCurve.from_json(json.loads(path.read_text(encoding="utf-8")))
    curve = fit(measure(loaded.model, shape, loaded.device))
    with suppress(OSError):  # a home that can't be written to costs a measurement a start
        _keep(path, curve.as_json())
    return curve


@torch.inference_mode()
def measure(
    model: Model, shape: CacheShape, device: torch.device, budget: float = BUDGET_SECONDS
) -> list[Measured]:
    """The median seconds of each kind of pass that the budget has room for."""
    end = time.perf_counter() + budget
    passes = _passes(model.config.max_position_embeddings)
    pages = max(p.requests * -(-p.slots // PAGE_SIZE) for p in passes)
    cache = KVCache(shape, pages, PAGE_SIZE, device)
    for tensor in (cache.keys, cache.values):
        tensor.fill_(0.01)  # untouched memory would be read from a cache
    batches = {each: each.batch(model.config.vocab_size) for each in passes}
    seconds: dict[_Pass, list[float]] = {}
    for each in passes:
        if len(seconds) >= len(DEEP) + 1 and time.perf_counter() > end - budget / 2:
            break
        _seconds(model, batches[each], cache)
        seconds[each] = [_seconds(model, batches[each], cache)]
    forward = False
    while time.perf_counter() < end:
        for each in seconds if forward else reversed(seconds):
            seconds[each].append(_seconds(model, batches[each], cache))
        forward = not forward
    return [
        Measured(each.rows, each.requests, each.requests * each.positions, median_low(times))
        for each, times in seconds.items()
    ]


def _passes(max_positions: int) -> list[_Pass]:
    """The cheapest first: a large model may leave no time for the others."""
    room = max_positions - max(ALONE)
    short, deep = min(SHORT, room), min(LONG, room)
    passes = [_Pass(rows, 1, short) for rows in ALONE]
    if deep > short:
        passes += [_Pass(rows, 1, deep) for rows in DEEP]
    passes += [_Pass(rows, requests, short) for rows, requests in TOGETHER]
    return sorted(passes, key=lambda each: (each.rows, each.positions))


def _seconds(model: Model, batch: FlatBatch, cache: KVCache) -> float:
    start = time.perf_counter()
    logits = model.run(batch, cache).logits
    logits[-1, 0].item()  # waits for the device
    return time.perf_counter() - start


def _identity(loaded: LoadedModel, shape: CacheShape) -> dict[str, Any]:
    """All that costs depend on."""
    return {
        "version": version("foredraft"),
        "torch": torch.__version__,
        "machine": [platform.node(), platform.machine(), os.cpu_count()],
        "device": _device_name(loaded.device),
        "kernels": loaded.model.kernels.name,
        "threads": loaded.num_threads,
        "model": [str(loaded.path), loaded.weight_bytes, str(loaded.dtype)],
        "rows": [*ALONE, *TOGETHER],
        "layers": [shape.num_layers, shape.num_kv_heads, shape.head_dim, str(shape.dtype)],
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    return str(torch.get_device_module(device).get_device_name(device))


def _path(identity: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return cache_directory() / "costs" / f"{digest[:24]}.json"


def _keep(path: Path, values: Mapping[str, Any]) -> None:
    """Write the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(values, file, indent=1)
        Path(scratch).replace(path)
    except OSError:
        Path(scratch).unlink(missing_ok=True)
        raise
