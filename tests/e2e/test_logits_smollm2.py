"""Logits of SmolLM2 equal those of transformers, which widens the same GGUF file by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from foredraft.cache.tensors import KVCache
from foredraft.core.trees import topology
from foredraft.kernels.catalog import native_available
from foredraft.kernels.interface import Segment
from foredraft.models.decoder import new_cache
from foredraft.models.interface import FlatBatch, Model
from foredraft.models.load import LoadedModel, load_model

TOLERANCE = 1e-4
PAGE_SIZE = 16
PAGES = list(range(11, -1, -1))
MESSAGE = "Write one sentence about a lighthouse, then count from 7 to 12 in words."
KERNELS = ["reference", "native"] if native_available() else ["reference"]


@pytest.fixture(scope="module")
def peer(smollm2_path: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="module", params=KERNELS)
def loaded(request: pytest.FixtureRequest, smollm2_path: Path) -> LoadedModel:
    return load_model(smollm2_path, dtype="float32", kernels=request.param)


@torch.inference_mode()
def theirs(peer: PreTrainedModel, ids: list[int]) -> Tensor:
    return peer(torch.tensor([ids])).logits[0]


@torch.inference_mode()
def ours(model: Model, cache: KVCache, ids: list[int], segment: Segment) -> Tensor:
    return model.run(FlatBatch(ids, [segment]), cache).logits


def assert_close(mine: Tensor, expected: Tensor) -> None:
    assert mine.shape == expected.shape
    assert (mine - expected).abs().max().item() < TOLERANCE


@pytest.mark.slow
def test_prefill_decoding_and_a_draft_tree(loaded: LoadedModel, peer: PreTrainedModel) -> None:
    prompt = loaded.tokenizer.apply_chat_template([{"role": "user", "content": MESSAGE}])
    cache = new_cache(loaded.config, len(PAGES), PAGE_SIZE, torch.float32, "cpu")
    model = loaded.model
    logits = torch.cat(
        [
            ours(model, cache, prompt[:30], Segment(0, 30, (), PAGES)),
            ours(model, cache, prompt[30:], Segment(30, len(prompt) - 30, (), PAGES)),
        ]
    )
    assert_close(logits, theirs(peer, prompt))

    committed = list(prompt)
    for _ in range(6):
        committed.append(int(logits[-1].argmax()))
        start = len(committed) - 1
        logits = ours(model, cache, committed[-1:], Segment(start, 1, (), PAGES))
    assert_close(logits[0], theirs(peer, committed)[-1])

    committed.append(int(logits[-1].argmax()))
    first, second = logits[-1].topk(3).indices[1:].tolist()
    parents, drafts = (-1, -1, 0, 2, 1), [first, second, 28, 260, 30]
    segment = Segment(len(committed) - 1, 1, parents, PAGES)
    rows = ours(model, cache, [committed[-1], *drafts], segment)
    assert_close(rows[0], theirs(peer, committed)[-1])
    for node in (1, 3, 4):
        path = [drafts[i] for i in topology(parents).path(node)]
        assert_close(rows[1 + node], theirs(peer, committed + path)[-1])


def test_auto_dtype_follows_the_kernels(smollm2_path: Path) -> None:
    automatic = load_model(smollm2_path)
    native = automatic.model.kernels.name == "native"
    assert automatic.dtype == (torch.bfloat16 if native else torch.float32)
    assert automatic.weight_bytes == 134_515_008 * automatic.dtype.itemsize + (
        2 * 576 * 61 if native else 0  # norms stay float32
    )
