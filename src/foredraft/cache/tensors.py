"""The keys and values themselves: two tensors, cut into layers and pages.

Knows shapes, dtypes and devices; knows no request and does not know which pages are in use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

CACHE_LINE = 64  # bytes


class KVCache:
    """`keys` and `values`, `[layers, P, Hkv, page_size, D]` each, zero at the start.

    On a CPU the memory of a page is taken from the system when the page is first written, so that a
    large cache costs nothing until it is used.

    Zero rather than uninitialised: the reference kernels multiply a masked slot's value by a weight
    of 0, and 0 times a NaN left in memory would be NaN.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Raises ValueError for a size below 1 (`num_pages` may be 0)."""
        sizes = {
            "num_layers": num_layers,
            "num_kv_heads": num_kv_heads,
            "page_size": page_size,
            "head_dim": head_dim,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be 1 or more, got {size}")
        if num_pages < 0:
            raise ValueError(f"num_pages must be 0 or more, got {num_pages}")
        shape = (num_layers, num_pages, num_kv_heads, page_size, head_dim)
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.num_kv_heads = num_kv_heads
        self.page_size = page_size
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = torch.device(device)
        self.keys = _zeros(shape, dtype, self.device)
        self.values = _zeros(shape, dtype, self.device)

    @staticmethod
    def bytes_per_page(
        num_layers: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes one page takes in all layers, keys and values together."""
        return 2 * num_layers * num_kv_heads * page_size * head_dim * dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages together."""
        return self.num_pages * self.bytes_per_page(
            self.num_layers, self.num_kv_heads, self.page_size, self.head_dim, self.dtype
        )

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


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that start on a cache line. `torch.zeros` would write, and so take, all of them."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(num_bytes + CACHE_LINE, dtype=np.uint8))
    start = -raw.data_ptr() % CACHE_LINE
    return raw[start : start + num_bytes].view(dtype).view(shape)
