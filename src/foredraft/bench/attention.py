"""What attention behind a long context costs, against memory and against the matrix rate.

Knows kernels, shapes and a clock; knows no request. Every layer has a cache of its own, so that
none is read from a cache of the processor. A pass attends in all layers within one call; here each
is a call from Python: `call_us`, what a call takes that attends to one position, is taken off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from foredraft.bench.clock import seconds_of
from foredraft.cache.tensors import KVCache
from foredraft.kernels.interface import Segment
from foredraft.kernels.native import NativeKernels
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import new_cache

CONTEXT = 4000
ROWS = (1, 2, 3, 4, 5)
MATRIX_ROWS = 256
PAGE_SIZE = 16


class AttentionBench:
    """One pending token and a chain of drafts behind `CONTEXT` positions, in float32."""

    def __init__(self, kernels: NativeKernels, config: ModelConfig) -> None:
        self._kernels = kernels
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self._dim = config.head_dim
        pages = -(-(CONTEXT + max(ROWS)) // PAGE_SIZE)
        self._cache: KVCache = new_cache(
            config, pages, PAGE_SIZE, torch.float32, torch.device("cpu")
        )
        for tensor in (self._cache.keys, self._cache.values):
            tensor.normal_(generator=torch.Generator().manual_seed(0))
        self._layers = list(zip(self._cache.keys, self._cache.values, strict=True))
        self._work = {
            rows: (
                kernels.prepare(
                    [Segment(CONTEXT, 1, tuple(range(-1, rows - 2)), range(pages))], PAGE_SIZE
                ),
                torch.randn(rows, self._heads, self._dim),
            )
            for rows in ROWS
        }
        self._nothing = (
            kernels.prepare([Segment(1, 1, (), range(1))], PAGE_SIZE),
            torch.randn(1, self._heads, self._dim),
        )
        self._weight = kernels.pack(torch.randn(config.hidden_size * 2, config.hidden_size))
        self._matrix = torch.randn(MATRIX_ROWS, config.hidden_size)

    def entries(
        self, rounds: int, seconds_per_byte: Callable[[], float]
    ) -> Sequence[dict[str, Any]]:
        """Medians over `rounds`, in which memory, matrices and all row counts take turns."""
        times: dict[int, list[float]] = {rows: [] for rows in ROWS}
        reading, matrix, call = [], [], []
        for _ in range(rounds):
            reading.append(seconds_per_byte())
            matrix.append(
                min(
                    seconds_of(lambda: self._kernels.linear(self._matrix, self._weight))
                    for _ in range(3)
                )
            )
            call.append(self._seconds(self._nothing))
            for rows in ROWS:
                times[rows].append(self._seconds(self._work[rows]))
        products = MATRIX_ROWS * self._weight.n * self._weight.k
        per_product = median(matrix) / products
        cached = 2 * self._kv_heads * self._dim * CONTEXT * 4 * median(reading)
        took = {rows: median(times[rows]) - median(call) for rows in ROWS}
        return [
            {
                **self._entry(rows, took[rows], cached, per_product, took[1]),
                "call_us": round(median(call) * 1e6, 2),
            }
            for rows in ROWS
        ]

    def _seconds(self, work: tuple[Any, Tensor]) -> float:
        """Of a layer."""
        self._run(work, self._layers[-1:])  # wakes the threads, as the rest of a pass does
        return seconds_of(partial(self._run, work, self._layers)) / len(self._layers)

    def _run(self, work: tuple[Any, Tensor], layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        plan, queries = work
        for keys, values in layers:
            self._kernels.attention(queries, keys, values, plan, 0.125)

    def _entry(
        self, rows: int, took: float, cached: float, per_product: float, one: float
    ) -> dict[str, Any]:
        computed = 2 * rows * self._heads * self._dim * CONTEXT * per_product
        return {
            "context": CONTEXT,
            "rows": rows,
            "us": round(took * 1e6, 2),
            "bytes_limit_us": round(cached * 1e6, 2),
            "flops_limit_us": round(computed * 1e6, 2),
            "over_limit": round(took / max(cached, computed), 3),
            "over_single_rows": round(took / (rows * one), 3),
        }
