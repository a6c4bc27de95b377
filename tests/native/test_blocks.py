"""Blocks in one call: the bits of single operations in any company; misfits get one clear line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foredraft._native import instruction_sets
from foredraft.kernels.block import Block, HeadNorms, apply_block
from foredraft.kernels.interface import Kernels, Segment
from foredraft.kernels.native import NativeKernels

POSITIONS, PAGES = 200, 30


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def beside_rows(hidden: Tensor) -> Tensor:
    """A second input, of each row by what its first is."""
    return hidden.roll(1, dims=1) * 3.0


@dataclass(frozen=True)
class Shape:
    """Sizes of a block: query heads, key heads, head size, hidden size, inner size."""

    heads: int = 6
    kv_heads: int = 2
    dim: int = 16
    width: int = 72
    inner: int = 120


def block_of(
    kernels: Kernels, shape: Shape, layer: int, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Block:
    """A random block with biases; `options` are the block's own fields."""
    heads = (shape.heads + 2 * shape.kv_heads) * shape.dim

    def packed(n: int, k: int, seed: int) -> Any:
        weight = random(n, k, seed=10 * layer + seed) / k**0.5
        return kernels.pack(weight.to(dtype), random(n, seed=10 * layer + seed))

    inputs = 1 if options.get("beside_norm") is None else 2
    return Block(
        attention_norm=random(shape.width, seed=layer),
        qkv=packed(heads, inputs * shape.width, 1),
        output=packed(shape.width, shape.heads * shape.dim, 2),
        mlp_norm=random(shape.width, seed=layer + 1),
        gate_up=packed(2 * shape.inner, shape.width, 3),
        down=packed(shape.width, shape.inner, 4),
        cos=random(POSITIONS, shape.dim // 2, seed=98),
        sin=random(POSITIONS, shape.dim // 2, seed=99),
        eps=1e-5,
        scale=shape.dim**-0.5,
        **options,
    )


def options_of(shape: Shape, drawn: Mapping[str, Any]) -> dict[str, Any]:
    """A block's options, with tensors where `drawn` says that there is a norm."""
    options = dict(drawn)
    norms = HeadNorms(random(shape.dim, seed=5), random(shape.dim, seed=6), 1e-6)
    options["head_norms"] = norms if drawn["head_norms"] else None
    for seed, name in enumerate(("attention_post_norm", "mlp_post_norm", "beside_norm"), start=7):
        options[name] = random(shape.width, seed=seed) if drawn[name] else None
    return options


EVERY_OPTION = {
    "window": 30,
    "soft_cap": 2.0,
    "activation": "gelu_tanh",
    "head_norms": True,
    "attention_post_norm": True,
    "mlp_post_norm": True,
    "beside_norm": True,
    "norm_residual": True,
}


class Layers:
    """A stack of blocks with its cache, run at once or operation by operation."""

    def __init__(
        self,
        kernels: NativeKernels,
        blocks: Sequence[Block],
        shape: Shape,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.kernels, self.blocks, self.page_size = kernels, blocks, page_size
        self.compiled = [kernels.compile(block) for block in blocks]
        pages = (len(blocks), PAGES * 16 // page_size + 1, shape.kv_heads)
        sizes = (shape.dim, page_size), (page_size, shape.dim)
        self.keys, self.values = (
            torch.full((*pages, *each), torch.nan, dtype=dtype) for each in sizes
        )

    def at_once(self, hidden: Tensor, segments: Sequence[Segment]) -> Tensor:
        plan, beside = self.kernels.prepare(segments, self.page_size), self.beside(hidden)
        return self.kernels.run_blocks(hidden, self.compiled, self.keys, self.values, plan, beside)

    def beside(self, hidden: Tensor) -> Tensor | None:
        return None if self.blocks[0].beside_norm is None else beside_rows(hidden)

    def by_operations(self, hidden: Tensor, segments: Sequence[Segment]) -> Tensor:
        plan, beside = self.kernels.prepare(segments, self.page_size), self.beside(hidden)
        for block, keys, values in zip(self.blocks, self.keys, self.values, strict=True):
            hidden = apply_block(self.kernels, block, hidden, keys, values, plan, beside)
        return hidden

    def pages(self, first: int = 0) -> list[int]:
        """Half of the cache's pages, backwards."""
        half = self.keys.shape[1] // 2
        return list(range(first * half, (first + 1) * half))[::-1]


@given(
    heads=st.sampled_from([(1, 1), (6, 2), (9, 3)]),
    dim=st.sampled_from([8, 24, 64, 256]),
    width=st.integers(1, 150),
    inner=st.integers(1, 150),
    weights=st.sampled_from([torch.float32, torch.bfloat16]),
    cache=st.sampled_from([torch.float32, torch.bfloat16]),
    page_size=st.sampled_from([1, 5, 16, 64]),
    prefix=st.integers(0, 80),
    chain=st.integers(1, 40),
    tree=st.lists(st.integers(0, 20), max_size=8),
    options=st.fixed_dictionaries(
        {
            "window": st.sampled_from([0, 1, 20, 64]),
            "soft_cap": st.sampled_from([0.0, 2.0]),
            "activation": st.sampled_from(["silu", "gelu_tanh"]),
            "head_norms": st.booleans(),
            "attention_post_norm": st.booleans(),
            "mlp_post_norm": st.booleans(),
            "beside_norm": st.booleans(),
            "norm_residual": st.booleans(),
        }
    ),
    threads=st.integers(1, 3),
    instruction_set=st.sampled_from(instruction_sets()),
)
def test_they_are_their_operations_to_the_bit(
    heads: tuple[int, int],
    dim: int,
    width: int,
    inner: int,
    weights: torch.dtype,
    cache: torch.dtype,
    page_size: int,
    prefix: int,
    chain: int,
    tree: list[int],
    options: dict[str, Any],
    threads: int,
    instruction_set: str,
) -> None:
    kernels = NativeKernels(threads, instruction_set=instruction_set)
    shape = Shape(*heads, dim, width, inner)
    # Layers differ, as a family's local and global ones do; all or none read a second input.
    given_options = options_of(shape, options)
    inputs = {"beside_norm": given_options["beside_norm"]}
    blocks = [
        block_of(kernels, shape, layer, weights, **(inputs if layer == 1 else given_options))
        for layer in range(3)
    ]
    once, single = (Layers(kernels, blocks, shape, page_size, cache) for _ in range(2))
    parents = tuple(choice % (node + 1) - 1 for node, choice in enumerate(tree))
    other = Segment(0, 3, (-1,), once.pages(1))
    steps = [[Segment(0, prefix, (), once.pages())]] if prefix else []
    steps.append([Segment(prefix, chain, parents, once.pages()), other])
    for seed, segments in enumerate(steps):
        hidden = random(sum(s.rows for s in segments), width, seed=seed)
        before = hidden.clone()
        assert torch.equal(once.at_once(hidden, segments), single.by_operations(hidden, segments))
        assert torch.equal(hidden, before)
    for ours, expected in ((once.keys, single.keys), (once.values, single.values)):
        assert torch.equal(ours.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("with_options", [False, True])
def test_chunks_threads_and_instruction_sets_agree_to_the_bit(
    instruction_set: str, with_options: bool
) -> None:
    shape = Shape()
    options = options_of(shape, EVERY_OPTION) if with_options else {}
    hidden = random(100, shape.width)

    def run(kernels: NativeKernels, sizes: Sequence[int]) -> Tensor:
        blocks = [block_of(kernels, shape, i, **options) for i in range(3)]
        layers = Layers(kernels, blocks, shape, 7)
        out, length = [], 0
        for part in hidden.split(list(sizes)):
            out.append(layers.at_once(part, [Segment(length, len(part), (), layers.pages())]))
            length += len(part)
        return torch.cat(out)

    expected = run(NativeKernels(1, instruction_set="portable"), [100])
    for threads in (1, 2, 3):
        kernels = NativeKernels(threads, instruction_set=instruction_set)
        for sizes in ([100], [1] * 100, [40, 33, 27]):
            assert torch.equal(run(kernels, sizes), expected)


def test_a_part_of_the_layers_goes_on_from_the_others() -> None:
    kernels, shape = NativeKernels(), Shape()
    layers = Layers(kernels, [block_of(kernels, shape, i) for i in range(4)], shape)
    hidden, segments = random(9, shape.width), [Segment(0, 9, (), layers.pages())]
    expected = layers.at_once(hidden, segments)
    plan = kernels.prepare(segments, layers.page_size)
    for part in (slice(0, 1), slice(1, 1), slice(1, 4)):
        hidden = kernels.run_blocks(
            hidden, layers.compiled[part], layers.keys[part], layers.values[part], plan
        )
    assert torch.equal(hidden, expected)


def test_many_threads_run_blocks_at_the_same_time() -> None:
    """Each with its own cache; their scratch memory and the pool must not meet."""
    kernels, shape = NativeKernels(2), Shape()
    blocks = [block_of(kernels, shape, i) for i in range(3)]

    def run(rows: int) -> Tensor:
        layers = Layers(kernels, blocks, shape)
        return layers.at_once(random(rows, shape.width), [Segment(0, rows, (), layers.pages())])

    counts = [1, 60, 3, 17, 5, 40]
    expected = {rows: run(rows) for rows in counts}
    with ThreadPoolExecutor(4) as executor:
        for rows, out in zip(counts * 10, executor.map(run, counts * 10), strict=True):
            assert torch.equal(out, expected[rows])


KERNELS = NativeKernels()
PLAIN = block_of(KERNELS, Shape(), 0)
ROW = torch.zeros(72)


def packed(n: int, k: int) -> Any:
    return KERNELS.pack(torch.zeros(n, k))


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        (r"attention_norm must be .*\[72\]", lambda: {"attention_norm": torch.zeros(71)}),
        (r"mlp_norm must be .*\[72\]", lambda: {"mlp_norm": torch.zeros(72).double()}),
        (r"cos must be", lambda: {"cos": torch.zeros(5)}),
        (r"sin must be .*\[positions, 8\]", lambda: {"sin": torch.zeros(POSITIONS, 4)}),
        (r"qkv must be \[128, 72\], got \[130, 72\]", lambda: {"qkv": packed(130, 72)}),
        (r"output must be \[72, 96\], got \[71, 96\]", lambda: {"output": packed(71, 96)}),
        (r"gate_up must be \[240, 72\]", lambda: {"gate_up": packed(120, 72)}),
        (r"attention_post_norm must be .*\[72\]", lambda: {"attention_post_norm": ROW[:3]}),
        (r"mlp_post_norm must be .*\[72\]", lambda: {"mlp_post_norm": ROW.double()}),
        (r"queries' norm must be .*\[16\]", lambda: {"head_norms": HeadNorms(ROW, ROW, 1e-6)}),
        (r"window must be 0 .*, got -1", lambda: {"window": -1}),
        (r"soft_cap must be positive or 0, got nan", lambda: {"soft_cap": float("nan")}),
        (r"activation must be silu or gelu_tanh, got 'relu'", lambda: {"activation": "relu"}),
        (r"down must be \[72, 120\]", lambda: {"down": packed(71, 120)}),
        (
            r"5 query heads cannot share 2",
            lambda: {"output": packed(72, 80), "qkv": packed(144, 72)},
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    message: str, changed: Callable[[], dict[str, Any]]
) -> None:
    with pytest.raises(ValueError, match=message):
        KERNELS.compile(replace(PLAIN, **changed()))


@pytest.mark.parametrize(
    ("message", "hidden", "cache"),
    [
        (r"hidden must be", torch.zeros(2, 72).double(), torch.zeros(1, 2, 2, 16, 16)),
        (r"keys must be .*\[1, pages", torch.zeros(2, 72), torch.zeros(2, 2, 2, 16, 16)),
        (r"keys must be", torch.zeros(2, 72), torch.zeros(1, 2, 2, 16, 16).half()),
        (
            r"compiled for a width of 72 .* rows of 71",
            torch.zeros(2, 71),
            torch.zeros(1, 2, 2, 16, 16),
        ),
        (r"2 key heads of size 16 .* 4 of size 8", torch.zeros(2, 72), torch.zeros(1, 2, 4, 16, 8)),
        (r"the plan has 2 rows, the tensor 3", torch.zeros(3, 72), torch.zeros(1, 2, 2, 16, 16)),
        (r"the cache has 8", torch.zeros(2, 72), torch.zeros(1, 2, 2, 8, 16)),
    ],
)
def test_tensors_that_do_not_fit_are_refused(message: str, hidden: Tensor, cache: Tensor) -> None:
    plan = KERNELS.prepare([Segment(0, 2, (), [0])], 16)
    with pytest.raises(ValueError, match=message):
        KERNELS.run_blocks(hidden, [KERNELS.compile(PLAIN)], cache.mT.contiguous(), cache, plan)


def test_a_second_input_is_given_to_blocks_that_read_one_alone() -> None:
    both = block_of(KERNELS, Shape(), 0, beside_norm=ROW)
    plan = KERNELS.prepare([Segment(0, 2, (), [0])], 16)
    cache, rows = torch.zeros(1, 1, 2, 16, 16), torch.zeros(2, 72)
    for block, beside, message in (
        (both, None, "two inputs needs rows beside"),
        (PLAIN, rows, "one input cannot take rows beside"),
        (both, rows[:1], r"beside must be .* \[2, 72\]"),
    ):
        with pytest.raises(ValueError, match=message):
            KERNELS.run_blocks(rows, [KERNELS.compile(block)], cache, cache.clone(), plan, beside)
    with pytest.raises(ValueError, match=r"beside_norm must be .*\[72\]"):
        KERNELS.compile(replace(both, beside_norm=ROW[:3]))
    with pytest.raises(ValueError, match=r"must be .*\[36\]"):  # half of what `qkv` reads
        KERNELS.compile(replace(PLAIN, beside_norm=ROW))


def test_a_position_beyond_the_rope_table_is_refused() -> None:
    short = replace(PLAIN, cos=PLAIN.cos[:3].clone(), sin=PLAIN.sin[:3].clone())
    plan = KERNELS.prepare([Segment(2, 2, (), [0])], 16)
    cache = torch.zeros(2, 1, 2, 16, 16)
    blocks = [KERNELS.compile(PLAIN), KERNELS.compile(short)]
    with pytest.raises(ValueError, match="position 3 is outside the rope table's 3"):
        KERNELS.run_blocks(torch.zeros(2, 72), blocks, cache, cache.clone(), plan)
    assert cache.count_nonzero() == 0
