"""The keys and values themselves: two tensors, cut into layers and pages.

Knows shapes, dtypes and devices; knows no request and does not know which pages are in use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CACHE_LINE = 64  # bytes


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model keeps of each position: sizes and dtype, whatever the number of pages.

    Raises ValueError for a size below 1.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            _at_least_one(name, getattr(self, name))

    @property
    def bytes_per_position(self) -> int:
        """Keys and values of one position in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """`keys` `[layers, P, Hkv, D, page_size]` and `values` `[layers, P, Hkv, page_size, D]`, zero
    at the start.

    Each lies as attention reads it: scores are sums over dimensions, for many positions side by
    side; the output is a sum over positions, for many dimensions side by side.

    On a CPU the memory of a page is taken from the system when the page is first written, so that a
    large cache costs nothing until it is used.

    Zero rather than uninitialised: the reference kernels multiply a masked slot's value by a weight
    of 0, and 0 times a NaN left in memory would be NaN.
    """

    def __init__(
        self,
        shape: CacheShape,
        num_pages: int,
        page_size: int,
        device: torch.device | str,
    ) -> None:
        """Raises ValueError for a `page_size` below 1 (`num_pages` may be 0)."""
        _at_least_one("page_size", page_size)
        if num_pages < 0:
            raise ValueError(f"num_pages must be 0 or more, got {num_pages}")
        self.shape = shape
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = torch.device(device)
        pages = (shape.num_layers, num_pages, shape.num_kv_heads)
        dim = shape.head_dim
        self.keys = _zeros((*pages, dim, page_size), shape.dtype, self.device)
        self.values = _zeros((*pages, page_size, dim), shape.dtype, self.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.shape.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages together."""
        return self.num_pages * self.page_size * self.shape.bytes_per_position

    def copy_pages(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy page `sources[i]` to `destinations[i]` in every layer.

        Raises ValueError for lists of different lengths, a page that is both source and
        destination, or a repeated destination.
        """
        if len(sources) != len(destinations):
            raise ValueError(f"{len(sources)} sources for {len(destinations)} destinations")
        if len(set(destinations)) != len(destinations) or set(sources) & set(destinations):
            raise ValueError(f"cannot copy pages {list(sources)} to {list(destinations)}")
        if not sources:
            return
        source = torch.tensor(list(sources), dtype=torch.int64, device=self.device)
        destination = torch.tensor(list(destinations), dtype=torch.int64, device=self.device)
        for tensor in (self.keys, self.values):
            tensor.index_copy_(1, destination, tensor.index_select(1, source))


def _at_least_one(name: str, size: int) -> None:
    if size < 1:
        raise ValueError(f"{name} must be 1 or more, got {size}")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that start on a cache line. `torch.zeros` would write, and so take, all of them."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(num_bytes + CACHE_LINE, dtype=np.uint8))
    start = -raw.data_ptr() % CACHE_LINE
    return raw[start : start + num_bytes].view(dtype).view(shape)
