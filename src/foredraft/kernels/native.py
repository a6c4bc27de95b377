"""The compiled kernels: checks tensors, allocates results, hands addresses to `foredraft._native`.

Knows tensors' shapes and dtypes; computes nothing. Every result is a new tensor that belongs to the
caller: allocating costs about 0.6 us, and a reused buffer could be overwritten under a residual
stream. A call is refused, never served wrong, where a tensor is not a contiguous CPU tensor of the
dtype and shape that the operation reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

import foredraft._native as _native
from foredraft.core.row_math import RowMath
from foredraft.kernels.block import Activation, Block, HeadNorms
from foredraft.kernels.interface import Segment
from foredraft.kernels.native_row_math import NativeRowMath
from foredraft.kernels.quantized import GROUP, EightBitWeight

_FLOAT = torch.float32
_CACHE_DTYPES = {torch.float32: False, torch.bfloat16: True}
_ACTIVATIONS: dict[str, int] = {"silu": 0, "gelu_tanh": 1}
_OPTIONAL_NORMS = ("attention_post_norm", "mlp_post_norm", "beside_norm")


@dataclass(frozen=True, slots=True)
class NativePacked:
    """A weight `[n, k]` in panels, owned by the extension."""

    weight: _native.PackedWeight
    n: int
    k: int

    @property
    def num_bytes(self) -> int:
        return int(self.weight.bytes)


@dataclass(frozen=True, slots=True)
class NativeBlock:
    """A block whose addresses the extension holds, and the block itself, which keeps them alive."""

    native: _native.Block
    block: Block


def _refuse(what: str, tensor: Tensor, wanted: str) -> NoReturn:
    layout = "contiguous" if tensor.is_contiguous() else "strided"
    raise ValueError(
        f"{what} must be a contiguous CPU tensor {wanted}, got a {layout} {tensor.dtype} tensor "
        f"{tuple(tensor.shape)} on {tensor.device}"
    )


def _usable(tensor: Tensor) -> bool:
    return tensor.dtype is _FLOAT and tensor.is_contiguous() and tensor.is_cpu


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _check_weight(name: str, weight: Tensor, size: int) -> None:
    if not _usable(weight) or weight.shape != (size,):
        _refuse(name, weight, f"[{size}] of float32")


def _check_tables(cos: Tensor, sin: Tensor, half_dim: int) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        if not _usable(table) or table.dim() != 2 or table.shape != (cos.shape[0], half_dim):
            _refuse(name, table, f"[positions, {half_dim}] of float32")


def _head_norm_arguments(norms: HeadNorms | None, dim: int) -> tuple[int, int, float]:
    if norms is None:
        return 0, 0, 0.0
    _check_weight("the queries' norm", norms.queries, dim)
    _check_weight("the keys' norm", norms.keys, dim)
    return norms.queries.data_ptr(), norms.keys.data_ptr(), norms.eps


def _check_activation(activation: str) -> int:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be {' or '.join(_ACTIVATIONS)}, got {activation!r}")
    return _ACTIVATIONS[activation]


def _check_cap(cap: float, *, none: bool) -> None:
    """A cap of 0 is none where there may be none."""
    if not (math.isfinite(cap) and (cap > 0 or (none and cap == 0))):
        raise ValueError(f"soft_cap must be positive{' or 0' if none else ''}, got {cap}")


def _check_window(window: int) -> None:
    if not 0 <= window < 2**31:
        raise ValueError(f"window must be 0 (none) to 2^31 - 1, got {window}")


def _cache_arguments(
    keys: Tensor, values: Tensor, dims: int = 4
) -> tuple[int, int, int, int, int, int, bool]:
    """keys `[.., P, Hkv, D, page_size]`, values `[.., P, Hkv, page_size, D]`: addresses, the
    values' last four sizes, if bfloat16.
    """
    bf16 = _CACHE_DTYPES.get(keys.dtype)
    for name, cache, sizes in (
        ("keys", keys, "dim, page_size"),
        ("values", values, "page_size, dim"),
    ):
        if bf16 is None or cache.dim() != dims or not (cache.is_contiguous() and cache.is_cpu):
            layers = "layers, " * (dims - 4)
            _refuse(name, cache, f"[{layers}pages, heads, {sizes}] of float32 or bfloat16")
    wanted = (*keys.shape[:-2], keys.shape[-1], keys.shape[-2])
    if wanted != values.shape or keys.dtype is not values.dtype:
        _refuse("values", values, f"{wanted} of {keys.dtype} to go with the keys")
    pages, heads, page_size, dim = values.shape[-4:]
    return keys.data_ptr(), values.data_ptr(), pages, heads, page_size, dim, bool(bf16)


def _check_block(block: Block) -> None:
    """Raises ValueError where the parts of a block do not fit each other."""
    inputs = 1 if block.beside_norm is None else 2
    width, inner, dim = block.qkv.k // inputs, block.down.k, 2 * int(block.cos.shape[-1])
    for name in ("attention_norm", "mlp_norm", *_OPTIONAL_NORMS):
        norm = getattr(block, name)
        if norm is not None or name not in _OPTIONAL_NORMS:
            _check_weight(name, norm, width)
    if block.cos.dim() != 2 or block.cos.shape[1] == 0:
        _refuse("cos", block.cos, "[positions, head size / 2] of float32")
    _check_tables(block.cos, block.sin, dim // 2)
    heads, key_heads = block.output.k // dim, (block.qkv.n - block.output.k) // (2 * dim)
    shapes = {
        "qkv": (block.qkv, (heads + 2 * key_heads) * dim, inputs * width),
        "output": (block.output, width, heads * dim),
        "gate_up": (block.gate_up, 2 * inner, width),
        "down": (block.down, width, inner),
    }
    for name, (packed, n, k) in shapes.items():
        if (packed.n, packed.k) != (n, k):
            raise ValueError(f"{name} must be [{n}, {k}], got [{packed.n}, {packed.k}]")
    if heads < 1 or key_heads < 1 or heads % key_heads != 0:
        raise ValueError(f"{heads} query heads cannot share {key_heads} key heads")
    _check_activation(block.activation)
    _check_window(block.window)
    _check_cap(block.soft_cap, none=True)


class NativeKernels:
    """`Kernels` in C++ for float32 activations on the CPU; `num_threads` None = every core.

    `instruction_set` forces an entry of the dispatch table ("portable", "avx2", "avx512"); results
    are the same to the bit. Raises ValueError where it cannot run here.
    """

    name = "native"
    cache_dtypes: tuple[torch.dtype, ...] = tuple(_CACHE_DTYPES)

    def __init__(
        self, num_threads: int | None = None, *, instruction_set: str | None = None
    ) -> None:
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"num_threads must be 1 or more, got {num_threads}")
        self._runtime = _native.Runtime(num_threads or 0, instruction_set or "")
        self.row_math: RowMath = NativeRowMath(self._runtime)
        self.dtype = _FLOAT
        self.device = torch.device("cpu")

    @property
    def instruction_set(self) -> str:
        return str(self._runtime.instruction_set)

    @property
    def num_threads(self) -> int:
        return int(self._runtime.num_threads)

    def read_memory(self, packed: NativePacked) -> float:
        """Reads a weight's memory with all threads and computes nothing: a measure of bandwidth."""
        return float(self._runtime.read_memory(packed.weight))

    def pack(self, weight: Tensor | EightBitWeight, bias: Tensor | None = None) -> NativePacked:
        """A copy of `weight [N, K]` (float32, bfloat16, 8-bit) in panels, and of `bias [N]`."""
        scales = None
        if isinstance(weight, EightBitWeight):
            scales = weight.scales
            weight = weight.values
        bf16 = _CACHE_DTYPES.get(weight.dtype)
        known = bf16 is not None if scales is None else weight.dtype is torch.int8
        if not known or weight.dim() != 2 or 0 in weight.shape or not weight.is_cpu:
            _refuse("a weight", weight, "[N, K] of float32 or bfloat16, N and K at least 1")
        n, k = weight.shape
        weight = weight.detach().contiguous()
        if bias is not None:
            if bias.shape != (n,):
                _refuse("a bias", bias, f"[{n}]")
            bias = bias.detach().to("cpu", _FLOAT).contiguous()
        if scales is None:
            packed = self._runtime.pack(weight.data_ptr(), _address(bias), n, k, bool(bf16))
            return NativePacked(packed, n, k)
        groups = -(-k // GROUP)
        if not _usable(scales) or scales.shape != (n, groups):
            _refuse("scales", scales, f"[{n}, {groups}] of float32")
        packed = self._runtime.pack_eight_bit(
            weight.data_ptr(), scales.data_ptr(), _address(bias), n, k
        )
        return NativePacked(packed, n, k)

    def embedding(self, ids: Tensor, packed: NativePacked) -> Tensor:
        """Rows `ids [T]` (int64) as float32 `[T, K]`; an id outside raises IndexError."""
        if (
            ids.dtype is not torch.int64
            or ids.dim() != 1
            or not (ids.is_contiguous() and ids.is_cpu)
        ):
            _refuse("ids", ids, "[rows] of int64")
        rows = ids.shape[0]
        out = torch.empty(rows, packed.k, dtype=_FLOAT)
        self._runtime.embedding(packed.weight, ids.data_ptr(), rows, out.data_ptr())
        return out

    def linear(self, x: Tensor, packed: NativePacked, residual: Tensor | None = None) -> Tensor:
        """`x [T, K] @ weight.T (+ bias) (+ residual [T, N])` -> `[T, N]`."""
        if not _usable(x) or x.dim() != 2 or x.shape[1] != packed.k:
            _refuse("x", x, f"[rows, {packed.k}] of float32")
        rows, k = x.shape
        added = 0
        if residual is not None:
            if not _usable(residual) or residual.shape != (rows, packed.n):
                _refuse("residual", residual, f"[{rows}, {packed.n}] of float32")
            added = residual.data_ptr()
        out = torch.empty(rows, packed.n, dtype=_FLOAT)
        self._runtime.linear(packed.weight, x.data_ptr(), rows, k, added, out.data_ptr())
        return out

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        """`x * weight / sqrt(mean(x^2) + eps)` over the last dimension of `[T, H]`."""
        if not _usable(x) or x.dim() != 2 or x.shape[1] == 0:
            _refuse("x", x, "[rows, width] of float32")
        rows, width = x.shape
        _check_weight("the norm's weight", weight, width)
        if residual is not None and (not _usable(residual) or residual.shape != x.shape):
            _refuse("residual", residual, f"[{rows}, {width}] of float32")
        out = torch.empty(rows, width, dtype=_FLOAT)
        self._runtime.rms_norm(
            x.data_ptr(), weight.data_ptr(), eps, _address(residual), out.data_ptr(), rows, width
        )
        return out

    def gate_multiply(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """`activation(gate) * up` for `gate_up [T, 2F]` -> `[T, F]`."""
        code = _check_activation(activation)
        if not _usable(gate_up) or gate_up.dim() != 2 or gate_up.shape[1] % 2 != 0:
            _refuse("gate_up", gate_up, "[rows, 2 F] of float32")
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        if width == 0:
            _refuse("gate_up", gate_up, "[rows, 2 F] of float32, F at least 1")
        out = torch.empty(rows, width, dtype=_FLOAT)
        self._runtime.gate_multiply(gate_up.data_ptr(), code, out.data_ptr(), rows, width)
        return out

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """`cap * tanh(x / cap)` of every element; a cap not above 0 raises ValueError."""
        if not _usable(x):
            _refuse("x", x, "of float32")
        _check_cap(cap, none=False)
        out = torch.empty_like(x)
        self._runtime.soft_cap(x.data_ptr(), cap, out.data_ptr(), x.numel())
        return out

    def compile(self, block: Block) -> NativeBlock:
        """The block's addresses and options; raises ValueError where its shapes do not fit."""
        _check_block(block)
        native = _native.Block(
            block.attention_norm.data_ptr(),
            block.qkv.weight,
            block.output.weight,
            block.mlp_norm.data_ptr(),
            block.gate_up.weight,
            block.down.weight,
            block.cos.data_ptr(),
            block.sin.data_ptr(),
            block.cos.shape[0],
            block.cos.shape[1],
            block.eps,
            block.scale,
            block.window,
            block.soft_cap,
            _ACTIVATIONS[block.activation],
            *_head_norm_arguments(block.head_norms, 2 * block.cos.shape[1]),
            _address(block.attention_post_norm),
            _address(block.mlp_post_norm),
            _address(block.beside_norm),
            block.norm_residual,
        )
        return NativeBlock(native, block)

    def run_blocks(
        self,
        hidden: Tensor,
        blocks: Sequence[NativeBlock],
        keys: Tensor,
        values: Tensor,
        plan: Any,
        beside: Tensor | None = None,
    ) -> Tensor:
        """`hidden [T, H]` through `blocks` in one call, to the bit as by single operations."""
        if not _usable(hidden) or hidden.dim() != 2:
            _refuse("hidden", hidden, "[rows, width] of float32")
        if beside is not None and (not _usable(beside) or beside.shape != hidden.shape):
            _refuse("beside", beside, f"{list(hidden.shape)} of float32")
        if keys.dim() != 5 or keys.shape[0] != len(blocks):
            _refuse("keys", keys, f"[{len(blocks)}, pages, heads, dim, page_size]")
        cache = _cache_arguments(keys, values, 5)
        out = torch.empty_like(hidden)
        self._runtime.run_blocks(
            [block.native for block in blocks],
            plan,
            *cache,
            hidden.data_ptr(),
            _address(beside),
            hidden.shape[0],
            hidden.shape[1],
            out.data_ptr(),
        )
        return out

    def prepare(self, segments: Sequence[Segment], page_size: int) -> Any:
        """The pass's plan, a `_native.Plan`; raises ValueError for a malformed segment."""
        return _native.plan(segments, page_size)

    def rope_and_store(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: Any,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Rotated queries `[T, Hq, D]`; keys and values go to their slots in the cache's dtype."""
        cache = _cache_arguments(keys, values)
        kv_heads, dim = values.shape[1], values.shape[3]
        if not _usable(qkv) or qkv.dim() != 2 or dim == 0 or qkv.shape[1] % dim != 0:
            _refuse("qkv", qkv, f"[rows, (query heads + 2 x {kv_heads}) x {dim}] of float32")
        _check_tables(cos, sin, dim // 2)
        rows = qkv.shape[0]
        heads = qkv.shape[1] // dim - 2 * kv_heads
        if heads < 1:
            _refuse("qkv", qkv, f"[rows, (query heads + 2 x {kv_heads}) x {dim}] of float32")
        queries = torch.empty(rows, heads, dim, dtype=_FLOAT)
        self._runtime.rope_and_store(
            plan,
            qkv.data_ptr(),
            rows,
            heads,
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[0],
            *cache,
            *_head_norm_arguments(norms, dim),
            queries.data_ptr(),
        )
        return queries

    def attention(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: Any,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> Tensor:
        """Softmax attention of each row over its visible keys -> `[T, Hq D]`."""
        _check_window(window)
        _check_cap(soft_cap, none=True)
        cache = _cache_arguments(keys, values)
        dim = values.shape[3]
        if not _usable(queries) or queries.dim() != 3 or queries.shape[2] != dim:
            _refuse("queries", queries, f"[rows, heads, {dim}] of float32")
        rows, heads = queries.shape[0], queries.shape[1]
        out = torch.empty(rows, heads * dim, dtype=_FLOAT)
        self._runtime.attention(
            plan, queries.data_ptr(), rows, heads, *cache, scale, window, soft_cap, out.data_ptr()
        )
        return out

    def move_slots(
        self, keys: Tensor, values: Tensor, sources: Sequence[int], destinations: Sequence[int]
    ) -> None:
        """Copy physical slots one after the other, in order; of all layers in one call."""
        if keys.dim() == 5:
            layers, pages, _, _, page_size = keys.shape
            slots = pages * page_size
            outside = [slot for slot in (*sources, *destinations) if not 0 <= slot < slots]
            if outside:
                raise ValueError(f"slot {outside[0]} is outside 0 to {slots - 1}")
            starts = range(0, layers * slots, slots)
            sources = [start + slot for start in starts for slot in sources]
            destinations = [start + slot for start in starts for slot in destinations]
            _cache_arguments(keys, values, 5)
            keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        cache = _cache_arguments(keys, values)
        self._runtime.move_slots(*cache, list(sources), list(destinations))
