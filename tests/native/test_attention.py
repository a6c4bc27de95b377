"""Paged tree attention: a row's bits depend on the keys at its positions, not on how they lie."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foredraft._native import instruction_sets
from foredraft.kernels.interface import Kernels, Segment
from foredraft.kernels.native import NativeKernels
from foredraft.kernels.reference import ReferenceKernels

HEADS, KV_HEADS = 6, 2
MAX_POSITION = 400


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class PagedSequence:
    """One request: a cache of NaN but for what was written, and a shuffled page table."""

    kernels: Kernels
    page_size: int = 16
    dim: int = 64
    dtype: torch.dtype = torch.float32
    shuffle: int = 0
    length: int = 0
    reads: PagedSequence | None = None  # attend to the keys and values that this one has stored
    window: int = 0
    soft_cap: float = 0.0
    pages: list[int] = field(init=False)

    def __post_init__(self) -> None:
        count = MAX_POSITION // self.page_size + 2
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.shuffle))
        self.pages = order.tolist()
        sizes = (self.dim, self.page_size), (self.page_size, self.dim)
        self.keys, self.values = (
            torch.full((count, KV_HEADS, *each), torch.nan, dtype=self.dtype) for each in sizes
        )
        self.cos = random(MAX_POSITION, self.dim // 2, seed=98).to(self.activation)
        self.sin = random(MAX_POSITION, self.dim // 2, seed=99).to(self.activation)

    @property
    def activation(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def step(self, qkv: Tensor, parents: tuple[int, ...] = ()) -> Tensor:
        """The attention of chain rows, then of a tree's nodes; only the chain stays."""
        chain = qkv.shape[0] - len(parents)
        segment = Segment(self.length, chain, parents, self.pages)
        plan = self.kernels.prepare([segment], self.page_size)
        qkv = qkv.to(self.activation)
        queries = self.kernels.rope_and_store(qkv, self.cos, self.sin, self.keys, self.values, plan)
        if self.reads is not None:
            self.keys, self.values = self.reads.keys.double(), self.reads.values.double()
        self.length += chain
        return self.kernels.attention(
            queries,
            self.keys,
            self.values,
            plan,
            self.dim**-0.5,
            self.window,
            self.soft_cap,
        )

    def chunks(self, qkv: Tensor, sizes: Sequence[int]) -> Tensor:
        return torch.cat([self.step(part) for part in qkv.split(list(sizes))])

    def commit(self, path: Sequence[int]) -> None:
        """Keep tree nodes `path` (node numbers of the last step) as the next positions."""
        physical = [
            self.pages[s // self.page_size] * self.page_size + s % self.page_size
            for s in [self.length + node for node in path]
            + list(range(self.length, self.length + len(path)))
        ]
        self.kernels.move_slots(
            self.keys, self.values, physical[: len(path)], physical[len(path) :]
        )
        self.length += len(path)


def tokens(count: int, dim: int = 64, seed: int = 0) -> Tensor:
    return random(count, (HEADS + 2 * KV_HEADS) * dim, seed=seed)


WINDOWS = st.sampled_from([0, 1, 2, 7, 16, 31, 32, 33, 64, 70])
CAPS = st.sampled_from([0.0, 0.5, 50.0])


def even_chunks(total: int, size: int) -> list[int]:
    return [size] * (total // size) + ([total % size] if total % size else [])


@given(
    dim=st.sampled_from([8, 16, 24, 40, 64, 128, 256]),
    page_size=st.integers(1, 40),
    cache=st.sampled_from([torch.float32, torch.bfloat16]),
    prefix=st.integers(0, 100),
    chain=st.integers(1, 40),
    tree=st.lists(st.integers(0, 20), max_size=10),
    window=WINDOWS,
    soft_cap=CAPS,
    instruction_set=st.sampled_from(instruction_sets()),
)
def test_it_is_close_to_double_precision(
    dim: int,
    page_size: int,
    cache: torch.dtype,
    prefix: int,
    chain: int,
    tree: list[int],
    window: int,
    soft_cap: float,
    instruction_set: str,
) -> None:
    parents = tuple(choice % (node + 1) - 1 for node, choice in enumerate(tree))
    options: dict[str, Any] = {"window": window, "soft_cap": soft_cap}
    kernels = NativeKernels(instruction_set=instruction_set)
    native = PagedSequence(kernels, page_size, dim, cache, **options)
    oracle = ReferenceKernels(torch.float64)
    exact = PagedSequence(oracle, page_size, dim, torch.float64, reads=native, **options)
    qkv = tokens(prefix + chain + len(parents), dim)
    for sequence in (native, exact):
        if prefix:
            sequence.step(qkv[:prefix])
    actual, expected = (s.step(qkv[prefix:], parents).double() for s in (native, exact))
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("offset", [-300.0, -60.0, -39.0, 39.0, 60.0, 300.0])
@pytest.mark.parametrize("climbs", [False, True])
def test_scores_may_lie_far_from_0(offset: float, climbs: bool, instruction_set: str) -> None:
    """All about `offset`, or from 0 to there along the positions, in either order."""
    kernels = NativeKernels(instruction_set=instruction_set)
    native, oracle = PagedSequence(kernels), ReferenceKernels(torch.float64)
    exact = PagedSequence(oracle, dtype=torch.float64, reads=native)
    for sequence in (native, exact):
        sequence.cos, sequence.sin = torch.ones_like(native.cos), torch.zeros_like(native.sin)
    exact.cos, exact.sin = exact.cos.double(), exact.sin.double()
    qkv = tokens(300).unflatten(1, (-1, 64))
    qkv[:, :HEADS, 0] = 8.0  # times a key's first dimension, over the root of 64
    slope = torch.linspace(0.0, 1.0, 300) if climbs else torch.ones(300)
    for share in (slope, slope.flip(0)):
        qkv[:, HEADS : HEADS + KV_HEADS, 0] = offset * share[:, None]
        native.length = exact.length = 0
        actual, expected = (s.step(qkv.flatten(1)).double() for s in (native, exact))
        torch.testing.assert_close(actual, expected, rtol=5e-4, atol=5e-4)


@pytest.mark.parametrize("hidden", [8, 64, 128])
def test_a_key_without_weight_has_none_wherever_it_lies(hidden: int, instruction_set: str) -> None:
    """The first ones score minus infinity: half of a group, a block, a whole span."""
    kernels = NativeKernels(instruction_set=instruction_set)
    queries, keys, values = (
        random(1, 1, 16),
        random(10, 1, 16, 16, seed=1),
        random(10, 1, 16, 16, seed=2),
    )
    queries[..., 0] = 4.0
    hides = (torch.arange(160) < hidden).view(10, 16)
    keys[:, 0, 0] = torch.where(hides, -torch.inf, 1.0)
    results = []
    for each, dtype in ((kernels, torch.float32), (ReferenceKernels(torch.float64), torch.float64)):
        plan = each.prepare([Segment(hidden + 20, 1, (), range(10))], 16)
        tensors = (one.to(dtype) for one in (queries, keys, values))
        results.append(each.attention(*tensors, plan, 0.25).double())
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-5)


GUARDED = """
import ctypes, mmap, sys, torch
from foredraft.kernels.interface import Segment
from foredraft.kernels.native import NativeKernels
libc = ctypes.CDLL(None)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
kept = []

def guarded(shape, dtype):
    # A tensor with forbidden memory behind its last byte.
    size = torch.Size(shape).numel() * dtype.itemsize
    whole = -(-size // 4096) * 4096
    memory = mmap.mmap(-1, whole + 32768)
    kept.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(start + whole, 32768, 0) == 0
    place = (ctypes.c_char * size).from_address(start + whole - size)
    return torch.frombuffer(place, dtype=dtype).view(shape).zero_()

kernels = NativeKernels(1, instruction_set=sys.argv[1])
for dtype in torch.float32, torch.bfloat16:
    for page_size in 1, 7, 8, 16, 24, 32:
        for dim in 16, 64:
            for length in 1, 5, 24, 70:
                pages = -(-length // page_size)
                keys = guarded((pages, 1, dim, page_size), dtype)
                values = guarded((pages, 1, page_size, dim), dtype)
                plan = kernels.prepare([Segment(length - 1, 1, (), range(pages))], page_size)
                kernels.attention(torch.zeros(1, 2, dim), keys, values, plan, 1.0)
print("ok", flush=True)
import os
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect")
def test_nothing_behind_the_cache_is_read(instruction_set: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", GUARDED, instruction_set],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (0, "ok\n"), run.stderr


OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": 20},
    {"window": 64, "soft_cap": 3.0},
]


@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 5, 16, 33, 64])
@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_chunks_pages_and_their_order_do_not_matter(
    instruction_set: str, cache: torch.dtype, page_size: int, options: dict[str, Any]
) -> None:
    qkv = tokens(150)
    expected = PagedSequence(NativeKernels(1), dtype=cache, **options).step(qkv)
    kernels = NativeKernels(2, instruction_set=instruction_set)
    for size in (1, 7, 64, 150):
        sequence = PagedSequence(kernels, page_size, dtype=cache, shuffle=size, **options)
        assert torch.equal(sequence.chunks(qkv, even_chunks(150, size)), expected)


@pytest.mark.parametrize("dim", [8, 24, 64, 128, 256])
@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_instruction_sets_and_threads_agree_to_the_bit(
    instruction_set: str, dim: int, options: dict[str, Any]
) -> None:
    qkv = tokens(90, dim)
    portable = NativeKernels(1, instruction_set="portable")
    expected = PagedSequence(portable, dim=dim, **options).step(qkv)
    for threads in (1, 2, 3):
        kernels = NativeKernels(threads, instruction_set=instruction_set)
        assert torch.equal(PagedSequence(kernels, dim=dim, **options).step(qkv), expected)


@pytest.mark.parametrize("window", [1, 5, 32, 40, 100])
def test_a_window_hides_what_lies_before_it(instruction_set: str, window: int) -> None:
    """Neither a broken key nor a broken value out of the window reaches a row."""
    kernels = NativeKernels(instruction_set=instruction_set)
    qkv = tokens(130)
    expected = PagedSequence(kernels, window=window).step(qkv)
    last = 130 - window
    qkv[:last] = torch.nan
    out = PagedSequence(kernels, window=window).step(qkv)
    assert torch.equal(out[-1], expected[-1])
    assert out[last - 1].isnan().any()
    wide = PagedSequence(kernels, window=130).step(tokens(130))
    assert torch.equal(wide, PagedSequence(kernels).step(tokens(130)))


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@given(
    prefix=st.integers(0, 90),
    chain=st.integers(1, 5),
    tree=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    page_size=st.sampled_from([1, 3, 16, 32]),
    window=WINDOWS,
    soft_cap=CAPS,
    threads=st.integers(1, 2),
    instruction_set=st.sampled_from(instruction_sets()),
)
def test_a_tree_row_is_the_row_of_its_path_as_a_chain(
    prefix: int,
    chain: int,
    tree: list[int],
    page_size: int,
    window: int,
    soft_cap: float,
    threads: int,
    instruction_set: str,
) -> None:
    parents = tuple(choice % (node + 1) - 1 for node, choice in enumerate(tree))
    kernels = NativeKernels(threads, instruction_set=instruction_set)
    options: dict[str, Any] = {"window": window, "soft_cap": soft_cap}
    root = prefix + chain
    qkv = tokens(root + len(parents))
    together = PagedSequence(kernels, page_size, **options)
    if prefix:
        together.step(qkv[:prefix])
    rows = together.step(qkv[prefix:], parents)
    for node in range(len(parents)):
        path = path_to(parents, node)
        alone = PagedSequence(kernels, **options)
        expected = alone.step(torch.cat([qkv[:root], qkv[[root + p for p in path]]]))
        assert torch.equal(rows[chain + node], expected[-1])


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_accepted_nodes_read_as_if_decoded(instruction_set: str, page_size: int) -> None:
    kernels = NativeKernels(instruction_set=instruction_set)
    parents = (-1, -1, 0, 1, 1, 3, 4)
    path = [1, 4, 6]
    prefix, step, after = tokens(61), tokens(8, seed=1), tokens(1, seed=2)
    speculated = PagedSequence(kernels, page_size)
    speculated.step(prefix)
    speculated.step(step, parents)
    speculated.commit(path)
    plain = PagedSequence(kernels)
    plain.step(torch.cat([prefix, step[:1], step[[1 + p for p in path]]]))
    assert torch.equal(speculated.step(after), plain.step(after))


def test_requests_in_one_pass_do_not_see_each_other(instruction_set: str) -> None:
    kernels = NativeKernels(2, instruction_set=instruction_set)
    shared = PagedSequence(kernels)
    half = len(shared.pages) // 2
    first, second = tokens(40), tokens(9, seed=1)
    segments = [
        Segment(0, 40, (), shared.pages[:half]),
        Segment(0, 4, (-1, -1, 1, 1, 0), shared.pages[half:]),
    ]
    plan = kernels.prepare(segments, shared.page_size)
    queries = kernels.rope_and_store(
        torch.cat([first, second]), shared.cos, shared.sin, shared.keys, shared.values, plan
    )
    rows = kernels.attention(queries, shared.keys, shared.values, plan, shared.dim**-0.5)
    assert torch.equal(rows[:40], PagedSequence(kernels).step(first))
    assert torch.equal(rows[40:], PagedSequence(kernels).step(second, (-1, -1, 1, 1, 0)))


def test_only_own_slots_are_written_and_only_visible_keys_are_read(instruction_set: str) -> None:
    sequence = PagedSequence(NativeKernels(instruction_set=instruction_set), page_size=8)
    out = sequence.step(tokens(21), (-1, -1))
    assert out.isfinite().all()
    written = sequence.values.isfinite().all(-1).sum((1, 2)) // KV_HEADS
    assert [int(written[p]) for p in sequence.pages[:3]] == [8, 8, 5]
    assert int(written.sum()) == 21
    assert torch.equal(sequence.keys.mT.isfinite(), sequence.values.isfinite())


def test_a_broken_later_row_leaves_earlier_rows_alone(instruction_set: str) -> None:
    kernels = NativeKernels(instruction_set=instruction_set)
    qkv = tokens(20)
    expected = PagedSequence(kernels).step(qkv)
    qkv[11] = torch.nan
    assert torch.equal(PagedSequence(kernels).step(qkv)[:11], expected[:11])


def test_a_large_group_of_heads_is_tiled(instruction_set: str) -> None:
    """One key head for 80 query heads: more queries in a row than one tile holds."""
    kernels, exact = NativeKernels(2, instruction_set=instruction_set), ReferenceKernels()
    plans = [k.prepare([Segment(0, 3, (-1,), [0])], 4) for k in (kernels, exact)]
    queries, keys, values = random(4, 80, 16), random(1, 1, 16, 4), random(1, 1, 4, 16, seed=1)
    torch.testing.assert_close(
        kernels.attention(queries, keys, values, plans[0], 0.25),
        exact.attention(queries, keys, values, plans[1], 0.25),
    )


def test_scores_far_apart_do_not_overflow(instruction_set: str) -> None:
    kernels = NativeKernels(instruction_set=instruction_set)
    qkv = tokens(70) * 8
    out = PagedSequence(kernels).step(qkv)
    exact = PagedSequence(ReferenceKernels(torch.float64), dtype=torch.float64).step(qkv)
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-2)


@given(
    moves=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_slots_move_one_after_the_other(moves: list[tuple[int, int]], dtype: torch.dtype) -> None:
    keys, values = random(3, 2, 8, 4).to(dtype), random(3, 2, 4, 8, seed=1).to(dtype)
    expected = keys.clone(), values.clone()
    sources, destinations = [m[0] for m in moves], [m[1] for m in moves]
    ReferenceKernels().move_slots(*expected, sources, destinations)
    NativeKernels().move_slots(keys, values, sources, destinations)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


@given(moves=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=8))
def test_slots_of_all_layers_move_alike(moves: list[tuple[int, int]]) -> None:
    sources, destinations = [m[0] for m in moves], [m[1] for m in moves]
    for kernels in (NativeKernels(num_threads=1), ReferenceKernels()):
        keys, values = random(5, 3, 2, 8, 4), random(5, 3, 2, 4, 8, seed=1)
        expected = keys.clone(), values.clone()
        for layer in range(5):
            kernels.move_slots(expected[0][layer], expected[1][layer], sources, destinations)
        kernels.move_slots(keys, values, sources, destinations)
        assert torch.equal(keys, expected[0])
        assert torch.equal(values, expected[1])
