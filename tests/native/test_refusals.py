"""Wrong tensors are refused with what was wanted; nothing is read or written out of bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from foredraft._native import instruction_sets
from foredraft.core.truncation import WHOLE
from foredraft.kernels.block import HeadNorms
from foredraft.kernels.catalog import load_kernels, native_status
from foredraft.kernels.interface import Segment
from foredraft.kernels.native import NativeKernels

KERNELS = NativeKernels()
ROW = torch.zeros(3)
PACKED = KERNELS.pack(torch.zeros(4, 6))
PLAN = KERNELS.prepare([Segment(0, 2, (), (0,))], 4)
TABLE = torch.zeros(2, 4)
CACHE = torch.zeros(2, 2, 4, 8)  # values; keys lie the other way round
LAYERS = torch.zeros(3, 2, 2, 4, 8)
HEAD = torch.zeros(8)


def keys_like(values: torch.Tensor) -> torch.Tensor:
    return values.mT.contiguous()


def rope(**changed: Any) -> Any:
    arguments = {
        "qkv": torch.zeros(2, 48),
        "cos": TABLE,
        "sin": TABLE,
        "keys": keys_like(CACHE),
        "values": CACHE,
        "plan": PLAN,
        **changed,
    }
    return KERNELS.rope_and_store(**arguments)


def attention(queries: tuple[int, ...], cache: torch.Tensor, **options: Any) -> Any:
    return KERNELS.attention(torch.zeros(queries), keys_like(cache), cache, PLAN, 1.0, **options)


def move(values: torch.Tensor, sources: list[int], destinations: list[int]) -> None:
    KERNELS.move_slots(keys_like(values), values, sources, destinations)


def norm(residual: torch.Tensor) -> Any:
    return KERNELS.rms_norm(torch.zeros(2, 6), torch.zeros(6), 1e-5, residual)


def activate(activation: Any) -> Any:
    return KERNELS.gate_multiply(torch.zeros(2, 6), activation)


def prepare(prefix: int, chain: int, parents: tuple[int, ...], pages: tuple[int, ...]) -> Any:
    return KERNELS.prepare([Segment(prefix, chain, parents, pages)], 4)


def linear(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    return KERNELS.linear(x, PACKED, residual)


SHORT_PAGES = CACHE[:, :, :2].contiguous()
REFUSED: list[tuple[str, Callable[[], Any]]] = [
    (r"x must be .*\[rows, 6\]", lambda: linear(torch.zeros(2, 5))),
    (r"got a contiguous torch.float64", lambda: linear(torch.zeros(2, 6).double())),
    (r"got a strided", lambda: linear(torch.zeros(6, 2).T)),
    (r"residual must be", lambda: linear(torch.zeros(2, 6), torch.zeros(1, 4))),
    (r"a weight must be", lambda: KERNELS.pack(torch.zeros(4, 6, dtype=torch.float16))),
    (r"a weight must be", lambda: KERNELS.pack(torch.zeros(0, 6))),
    (r"a bias must be", lambda: KERNELS.pack(torch.zeros(4, 6), torch.zeros(3))),
    (r"ids must be", lambda: KERNELS.embedding(torch.zeros(2, dtype=torch.int32), PACKED)),
    (r"norm's weight must be", lambda: KERNELS.rms_norm(torch.zeros(2, 6), torch.zeros(5), 1e-5)),
    (r"residual must be", lambda: norm(residual=torch.zeros(1, 6))),
    (r"activation must be silu or gelu_tanh, got 'relu'", lambda: activate("relu")),
    (r"soft_cap must be positive, got 0", lambda: KERNELS.soft_cap(torch.zeros(2, 6), 0.0)),
    (r"soft_cap must be positive, got inf", lambda: KERNELS.soft_cap(torch.zeros(2), torch.inf)),
    (r"x must be", lambda: KERNELS.soft_cap(torch.zeros(2, 6).double(), 1.0)),
    (r"soft_cap must be positive or 0, got -1", lambda: attention((2, 2, 8), CACHE, soft_cap=-1.0)),
    (r"window must be 0 .* got -1", lambda: attention((2, 2, 8), CACHE, window=-1)),
    (r"queries' norm must be .*\[8\]", lambda: rope(norms=HeadNorms(HEAD[:4], HEAD, 1e-6))),
    (r"keys' norm must be .*\[8\]", lambda: rope(norms=HeadNorms(HEAD, HEAD.double(), 1e-6))),
    (r"gate_up must be", lambda: KERNELS.gate_multiply(torch.zeros(2, 7), "silu")),
    (r"qkv must be", lambda: rope(qkv=torch.zeros(2, 33))),
    (r"qkv must be", lambda: rope(qkv=torch.zeros(2, 32))),
    (r"the plan has 2 rows, the tensor 3", lambda: rope(qkv=torch.zeros(3, 48))),
    (r"position 1 is outside the rope table's 1", lambda: rope(cos=TABLE[:1], sin=TABLE[:1])),
    (r"sin must be", lambda: rope(sin=TABLE[:1])),
    (r"values must be", lambda: rope(values=torch.zeros(2, 2, 4, 16))),
    (r"values must be .*\(2, 2, 8, 4\)", lambda: rope(keys=CACHE)),
    (r"keys must be", lambda: rope(keys=keys_like(CACHE).half(), values=CACHE.half())),
    (
        r"pages of 4 slots, the cache has 2",
        lambda: rope(keys=keys_like(SHORT_PAGES), values=SHORT_PAGES),
    ),
    (r"page 7 is outside the cache's 2 pages", lambda: rope(plan=prepare(0, 2, (), (7,)))),
    (r"up to 256, got 4", lambda: attention((2, 2, 4), CACHE[..., :4].contiguous())),
    (r"up to 256, got 264", lambda: attention((2, 2, 264), torch.zeros(1, 1, 4, 264))),
    (r"3 query heads cannot share 2 key heads", lambda: attention((2, 3, 8), CACHE)),
    (r"the plan has 2 rows, the tensor 1", lambda: attention((1, 2, 8), CACHE)),
    (r"slot 8 is outside 0 to 7", lambda: move(CACHE, [0], [8])),
    (r"slot 8 is outside 0 to 7", lambda: move(LAYERS, [8], [0])),
    (r"slot -1 is outside 0 to 7", lambda: move(LAYERS, [0], [-1])),
    (r"1 sources for 2 destinations", lambda: move(CACHE, [0], [1, 2])),
    (r"chain >= 1", lambda: prepare(0, 0, (), (0,))),
    (r"prefix >= 0", lambda: prepare(-1, 1, (), (0,))),
    (r"node 1 has parent 1", lambda: prepare(0, 1, (-1, 1), (0,))),
    (r"1 pages of 4 slots cannot hold 5", lambda: prepare(3, 1, (-1,), (0,))),
    (r"cannot hold 4611686018427387905", lambda: prepare(2**62, 1, (), (0,))),
    (r"page ids are 0 or more", lambda: prepare(0, 1, (), (-1,))),
    (r"page_size must be", lambda: KERNELS.prepare([], 0)),
    (r"instruction set 'mmx' does not run here", lambda: NativeKernels(instruction_set="mmx")),
    (r"num_threads must be", lambda: NativeKernels(0)),
    (r"num_threads must be", lambda: NativeKernels(100000)),
    (r"a row must be", lambda: KERNELS.row_math.laws([torch.zeros(0)], [WHOLE])),
    (r"a row must be", lambda: KERNELS.row_math.laws([torch.zeros(3).long()], [WHOLE])),
    (r"a row must be", lambda: KERNELS.row_math.draws([torch.zeros(6)[::2]], [WHOLE], [(1, 2)])),
    (r"a row must be", lambda: KERNELS.row_math.laws([ROW, torch.zeros(4)], [WHOLE] * 2)),
    (r"a row must be", lambda: KERNELS.row_math.log_softmax(torch.zeros(2, 3))),
    (r"weights must be", lambda: KERNELS.row_math.draw(torch.zeros(3), 0.5)),
    (r"rows must be", lambda: KERNELS.row_math.argmax_rows(torch.zeros(3))),
    (r"rows must be", lambda: KERNELS.row_math.argmax_rows(torch.zeros(4, 6)[::2])),
    (r"rows must be", lambda: KERNELS.row_math.argmax_rows(torch.zeros(4, 6)[:, :5])),
    (r"rows must be", lambda: KERNELS.row_math.argmax_rows(torch.zeros(6).expand(2, 6))),
]


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=range(len(REFUSED)))
def test_it_says_what_is_wrong(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("token", [-1, 4, 2**40])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(IndexError, match=rf"token id {token} is outside 0 to 3"):
        KERNELS.embedding(torch.tensor([0, token]), PACKED)


def test_a_weight_packed_for_another_instruction_set_is_refused() -> None:
    sets = instruction_sets()
    if len({NativeKernels(instruction_set=s).pack(torch.zeros(1, 1)).num_bytes for s in sets}) > 1:
        packed = NativeKernels(instruction_set="portable").pack(torch.zeros(64, 8))
        with pytest.raises(ValueError, match="packed for another instruction set"):
            NativeKernels(instruction_set=sets[0]).linear(torch.zeros(1, 8), packed)


def test_empty_inputs_give_empty_results() -> None:
    assert KERNELS.linear(torch.zeros(0, 6), PACKED).shape == (0, 4)
    assert KERNELS.embedding(torch.zeros(0, dtype=torch.int64), PACKED).shape == (0, 6)
    assert KERNELS.rms_norm(torch.zeros(0, 6), torch.zeros(6), 1e-5).shape == (0, 6)
    plan = KERNELS.prepare([], 4)
    assert KERNELS.attention(torch.zeros(0, 2, 8), keys_like(CACHE), CACHE, plan, 1.0).shape == (
        0,
        16,
    )


def test_the_catalog_prefers_native_on_the_cpu() -> None:
    assert load_kernels().name == "native"
    assert load_kernels("auto", dtype=torch.float64).name == "reference"
    assert load_kernels("reference").name == "reference"
    assert instruction_sets()[0] in native_status()
