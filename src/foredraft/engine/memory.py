"""How much memory weights and caches take and what fits in them, settled before the first request.

Knows bytes, pages and sizes; knows no request and no drafter.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foredraft.cache.tensors import CacheShape
from foredraft.core.errors import ConfigError
from foredraft.engine.config import EngineConfig
from foredraft.engine.machine_memory import memory_of
from foredraft.models.load import DTYPES, LoadedModel

GIB = 2**30
DEFAULT_KV_CACHE_GIB = 2.0
_AMOUNT = re.compile(r"(\d{1,9}(?:\.\d{1,9})?|\.\d{1,9}) ?(GiB|%)?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory that an engine may take, in bytes: for keys and values, or for weights too."""

    num_bytes: int
    holds_weights: bool
    asked: str  # as the user said it


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What one model takes: its weights in bytes, what it keeps of each position, if any, and what
    else it remembers, in bytes at most.
    """

    name: str  # in messages
    weight_bytes: int
    cache: CacheShape | None
    working_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        """Whatever the number of pages."""
        return self.weight_bytes + self.working_bytes

    @property
    def words(self) -> str:
        """What is taken before the first page."""
        if self.weight_bytes:
            return f"the {self.name}'s weights take {size_words(self.fixed_bytes)}"
        return f"the {self.name} takes {size_words(self.fixed_bytes)}"


def choose_budget(
    memory: float | str | None, kv_cache_gib: float | None, device: torch.device
) -> Budget:
    """The budget that `memory` or `kv_cache_gib` names; with neither, 2 GiB of keys and values.

    `memory` is a number of GiB (4, "4.5", "4GiB") or a share of what there is ("50%"): of the
    GPU's memory on a GPU, else of the machine's, or of the control group's where that is smaller.

    Raises ConfigError for both together, for what is no amount, and for more memory than there is.
    """
    if memory is None:
        gib = DEFAULT_KV_CACHE_GIB if kv_cache_gib is None else kv_cache_gib
        if type(gib) not in (int, float) or not 0 < gib < math.inf:
            raise ConfigError(f"kv_cache_gib must be a number above 0, got {gib!r}")
        return Budget(int(min(gib * GIB, sys.maxsize)), False, f"kv_cache_gib {gib}")
    if kv_cache_gib is not None:
        raise ConfigError(
            f"memory {memory!r} and kv_cache_gib {kv_cache_gib!r} exclude each other: memory holds "
            "the weights too, kv_cache_gib keys and values alone"
        )
    amount, is_share = memory_amount(memory)
    there = memory_of(device)
    if is_share:
        if there is None:
            raise ConfigError(f"memory {memory!r}: this system doesn't say how much memory it has")
        num_bytes = int(there * amount / 100)
    else:
        num_bytes = int(amount * GIB)
        if there is not None and num_bytes > there:
            raise ConfigError(f"memory {memory!r} GiB is more than there is: {size_words(there)}")
    return Budget(num_bytes, True, f"memory {memory!r} ({size_words(num_bytes)})")


def memory_amount(memory: Any) -> tuple[float, bool]:
    """The number in a `memory` setting, and whether it is a percentage. Raises ConfigError."""
    found = _AMOUNT.fullmatch(memory.strip()) if isinstance(memory, str) else None
    if type(memory) in (int, float):
        amount, is_share = memory, False
    elif found is not None:
        amount, is_share = float(found[1]), found[2] == "%"
    else:
        amount, is_share = 0.0, False
    if not 0 < amount < 1e9 or (is_share and amount > 100):
        raise ConfigError(
            'memory must be a number of GiB above 0, such as 4 or "4.5GiB", or a share of what '
            f'there is up to 100%, such as "50%", got {memory!r}'
        )
    return amount, is_share


def size_words(num_bytes: int) -> str:
    """A size as people say it: "1.85 GiB", "12.3 MiB", "640 bytes"."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.{2 if unit == 'GiB' else 1}f} {unit}"
    return f"{num_bytes} bytes"


def choose_cache_dtype(kv_dtype: str, loaded: LoadedModel) -> torch.dtype:
    """The dtype of the target's keys and values. Raises ConfigError for an unknown name."""
    if kv_dtype == "auto":
        return loaded.cache_dtype
    served = loaded.model.kernels.cache_dtypes
    valid = [name for name, dtype in DTYPES.items() if dtype in served]
    if not isinstance(kv_dtype, str) or kv_dtype not in valid:
        raise ConfigError(
            f"kv_dtype must be one of auto, {', '.join(valid)} on the {loaded.model.kernels.name} "
            f"kernels, got {kv_dtype!r}"
        )
    return DTYPES[kv_dtype]


def plan_engine(
    longest: int,
    models: Sequence[ModelMemory],
    *,
    budget: Budget,
    max_model_len: int | None,
    page_size: int,
    **sizes: Any,
) -> EngineConfig:
    """The engine's sizes: as many pages as `budget` pays for, and no more than can be used.

    A page holds the same positions in each cache of `models`, the target's and the drafter's own:
    one table serves both, and one reservation. `longest` is the target's number of positions.

    Raises ConfigError for sizes that make no engine, with the sizes.
    """
    length = longest if max_model_len is None else max_model_len
    config = EngineConfig(max_model_len=length, page_size=page_size, **sizes)
    if length > longest:
        raise ConfigError(f"max_model_len {length} is beyond the model's {longest} positions")
    caches = [model.cache for model in models if model.cache is not None]
    page_bytes = page_size * sum(cache.bytes_per_position for cache in caches)
    weights = sum(model.fixed_bytes for model in models) if budget.holds_weights else 0
    affordable = (budget.num_bytes - weights) // page_bytes
    if affordable < 1:
        raise ConfigError(_too_little(budget, models, page_bytes, config.pages_for(length), config))
    useful = config.max_num_seqs * config.pages_for(length)
    return EngineConfig(
        max_model_len=length, page_size=page_size, num_pages=min(affordable, useful), **sizes
    )


def _too_little(
    budget: Budget,
    models: Sequence[ModelMemory],
    page_bytes: int,
    most_pages: int,
    config: EngineConfig,
) -> str:
    """What the budget lacks, and the least that would do."""
    if not budget.holds_weights:
        return f"{budget.asked} is less than a page of {page_bytes} bytes"
    weights = sum(model.fixed_bytes for model in models)
    taken = ", ".join(model.words for model in models if model.fixed_bytes)
    left = budget.num_bytes - weights
    rest = f"{size_words(left)} are left" if left > 0 else "nothing is left"
    return (
        f"{budget.asked} is too little: {taken}, {rest}, and a page of {config.page_size} tokens "
        f"takes {size_words(page_bytes)}; the least is {_gib(weights + page_bytes)} GiB, and "
        f"{_gib(weights + most_pages * page_bytes)} GiB hold a request of {config.max_model_len:,} "
        "tokens"
    )


def _gib(num_bytes: int) -> float:
    """GiB to three places, rounded up."""
    return -(-num_bytes * 1000 // GIB) / 1000
