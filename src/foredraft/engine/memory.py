"""How much memory the cache takes and what fits in it, settled before the first request.

Knows bytes, pages and the model's sizes; knows no request.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from foredraft.cache.tensors import KVCache
from foredraft.core.errors import ConfigError
from foredraft.engine.config import EngineConfig
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import new_cache
from foredraft.models.load import DTYPES, LoadedModel


def choose_cache_dtype(kv_dtype: str, loaded: LoadedModel) -> torch.dtype:
    """The dtype of keys and values. `auto`: float32 on a CPU (float64 for a float64 model), the
    model's dtype elsewhere. Raises ConfigError for an unknown name.
    """
    if kv_dtype == "auto":
        if loaded.dtype == torch.float64 or loaded.device.type != "cpu":
            return loaded.dtype
        return torch.float32
    served = loaded.model.kernels.cache_dtypes
    valid = [name for name, dtype in DTYPES.items() if dtype in served]
    if not isinstance(kv_dtype, str) or kv_dtype not in valid:
        raise ConfigError(
            f"kv_dtype must be one of auto, {', '.join(valid)} on the {loaded.model.kernels.name} "
            f"kernels, got {kv_dtype!r}"
        )
    return DTYPES[kv_dtype]


def plan_engine(
    model: ModelConfig,
    cache_dtype: torch.dtype,
    *,
    kv_cache_gib: float,
    max_model_len: int | None,
    page_size: int,
    **sizes: Any,
) -> EngineConfig:
    """The engine's sizes: as many pages as `kv_cache_gib` pays for, and no more than can be used.

    Raises ConfigError for sizes that make no engine.
    """
    longest = model.max_position_embeddings
    length = longest if max_model_len is None else max_model_len
    config = EngineConfig(max_model_len=length, page_size=page_size, **sizes)
    if length > longest:
        raise ConfigError(f"max_model_len {length} is beyond the model's {longest} positions")
    if type(kv_cache_gib) not in (int, float) or not 0 < kv_cache_gib < math.inf:
        raise ConfigError(f"kv_cache_gib must be a number above 0, got {kv_cache_gib!r}")
    page_bytes = KVCache.bytes_per_page(
        model.num_layers, model.num_kv_heads, page_size, model.head_dim, cache_dtype
    )
    affordable = int(kv_cache_gib * 2**30) // page_bytes
    if affordable < 1:
        raise ConfigError(f"kv_cache_gib {kv_cache_gib} is less than a page of {page_bytes} bytes")
    useful = config.max_num_seqs * config.pages_for(length)
    return EngineConfig(
        max_model_len=length, page_size=page_size, num_pages=min(affordable, useful), **sizes
    )


def allocate_cache(loaded: LoadedModel, config: EngineConfig, dtype: torch.dtype) -> KVCache:
    """The cache of an engine with this configuration."""
    return new_cache(loaded.config, config.num_pages, config.page_size, dtype, loaded.device)
