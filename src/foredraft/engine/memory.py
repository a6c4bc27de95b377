"""How much memory the caches take and what fits in them, settled before the first request.

Knows bytes, pages and sizes; knows no request and no drafter.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from foredraft.cache.tensors import CacheShape
from foredraft.core.errors import ConfigError
from foredraft.engine.config import EngineConfig
from foredraft.models.load import DTYPES, LoadedModel


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
    caches: Sequence[CacheShape],
    *,
    kv_cache_gib: float,
    max_model_len: int | None,
    page_size: int,
    **sizes: Any,
) -> EngineConfig:
    """The engine's sizes: as many pages as `kv_cache_gib` pays for, and no more than can be used.

    A page holds the same positions in each of `caches`, the target's and the drafter's own: one
    table serves both, and one reservation. `longest` is the target's number of positions.

    Raises ConfigError for sizes that make no engine.
    """
    length = longest if max_model_len is None else max_model_len
    config = EngineConfig(max_model_len=length, page_size=page_size, **sizes)
    if length > longest:
        raise ConfigError(f"max_model_len {length} is beyond the model's {longest} positions")
    if type(kv_cache_gib) not in (int, float) or not 0 < kv_cache_gib < math.inf:
        raise ConfigError(f"kv_cache_gib must be a number above 0, got {kv_cache_gib!r}")
    page_bytes = page_size * sum(cache.bytes_per_position for cache in caches)
    affordable = int(min(kv_cache_gib * 2**30, sys.maxsize)) // page_bytes
    if affordable < 1:
        raise ConfigError(f"kv_cache_gib {kv_cache_gib} is less than a page of {page_bytes} bytes")
    useful = config.max_num_seqs * config.pages_for(length)
    return EngineConfig(
        max_model_len=length, page_size=page_size, num_pages=min(affordable, useful), **sizes
    )
