"""The cache's tensors: shapes, bytes, and copies of whole pages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from foredraft.cache.tensors import CacheShape, KVCache


def cache(num_pages: int = 3, dtype: torch.dtype = torch.float64) -> KVCache:
    return KVCache(CacheShape(2, 2, 8, dtype), num_pages, 4, "cpu")


def test_layers_have_the_shape_of_the_kernels_interface() -> None:
    made = cache()
    assert len(made.keys) == len(made.values) == 2
    assert {tensor.shape for tensor in made.keys} == {(3, 2, 8, 4)}
    assert {tensor.shape for tensor in made.values} == {(3, 2, 4, 8)}
    for tensor in (*made.keys, *made.values):
        assert tensor.dtype == torch.float64
        assert torch.count_nonzero(tensor) == 0
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
    assert made.page_size == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bytes_are_those_of_the_tensors(dtype: torch.dtype) -> None:
    made = cache(num_pages=5, dtype=dtype)
    held = sum(t.numel() * t.element_size() for t in (*made.keys, *made.values))
    assert made.num_bytes == held
    assert made.shape.bytes_per_position * 4 * 5 == held


def test_copied_pages_are_equal_and_the_rest_is_untouched() -> None:
    made = cache(num_pages=4)
    for tensor in (*made.keys, *made.values):
        tensor.copy_(torch.randn(tensor.shape, dtype=tensor.dtype))
    before = [tensor.clone() for tensor in (*made.keys, *made.values)]
    made.copy_pages([0, 3], [2, 1])
    for old, new in zip(before, (*made.keys, *made.values), strict=True):
        assert torch.equal(new[2], old[0])
        assert torch.equal(new[1], old[3])
        assert torch.equal(new[0], old[0])
        assert torch.equal(new[3], old[3])


@pytest.mark.parametrize(
    ("sources", "destinations"), [([0], []), ([0, 1], [2, 2]), ([0, 1], [1, 2])]
)
def test_ambiguous_copies_are_errors(sources: list[int], destinations: list[int]) -> None:
    with pytest.raises(ValueError):
        cache().copy_pages(sources, destinations)


def test_sizes_below_one_are_errors() -> None:
    with pytest.raises(ValueError, match="page_size must be 1 or more, got 0"):
        KVCache(CacheShape(1, 1, 8, torch.float32), 1, 0, "cpu")
    with pytest.raises(ValueError, match="num_pages"):
        KVCache(CacheShape(1, 1, 8, torch.float32), -1, 4, "cpu")


def test_unused_pages_take_no_memory() -> None:
    before = resident_bytes()
    made = KVCache(CacheShape(4, 2, 32, torch.float32), 2**16, 16, "cpu")
    assert made.num_bytes == 2**31
    made.keys[0][7].fill_(1.0)
    assert resident_bytes() - before < 2**28


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
