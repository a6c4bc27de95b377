"""Logits of tiny random Llamas equal transformers', whose checkpoints they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft.cache.tensors import KVCache
from foredraft.core.trees import topology
from foredraft.kernels.catalog import load_kernels, native_available
from foredraft.kernels.interface import Segment
from foredraft.models.decoder import Decoder, activation_dtype, new_cache
from foredraft.models.hf_config import config_from_json, read_json
from foredraft.models.interface import FlatBatch
from foredraft.models.safetensors_weights import SafetensorsWeights, WithoutCopiedHead

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one key head": {"num_key_value_heads": 1},
    "as many key heads": {"num_key_value_heads": 6},
    "tied": {"tie_word_embeddings": True},
    "head_dim apart": {"head_dim": 24},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "linear rope": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    },
    "biases": {"attention_bias": True, "mlp_bias": True},
    "large eps": {"rms_norm_eps": 0.1},
}
KERNELS = [("reference", torch.float32), ("reference", torch.float64)]
if native_available():
    KERNELS.append(("native", torch.float32))
TOLERANCE = 1e-4
PROMPT = [(7 * i * i + 3 * i + 5) % 67 for i in range(45)]
PAGES = [4, 1, 7, 0, 11, 3, 9, 2, 8, 10, 5, 6]
PAGE_SIZE = 8


def write_checkpoint(directory: Path, shard_bytes: int = 10**9, **changes: Any) -> LlamaForCausalLM:
    """A random model whose norms and biases are not the ones and zeros of a fresh one."""
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(directory, max_shard_size=shard_bytes)
    return model.eval()


def load(directory: Path, kernels: str, dtype: torch.dtype) -> Decoder:
    config = config_from_json(read_json(directory / "config.json"), "config.json")
    weights: Any = SafetensorsWeights(directory)
    if config.tie_word_embeddings:
        weights = WithoutCopiedHead(weights)
    return Decoder(config, weights, load_kernels(kernels, dtype=activation_dtype(dtype)), dtype)


def cache_for(decoder: Decoder) -> KVCache:
    activation = activation_dtype(decoder.dtype)
    return new_cache(decoder.config, len(PAGES), PAGE_SIZE, activation, "cpu")


@torch.inference_mode()
def in_chunks(decoder: Decoder, cache: KVCache, ids: Sequence[int], chunk: int) -> Tensor:
    """All rows' logits, `chunk` rows a pass."""
    logits = []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        batch = FlatBatch(part, [Segment(start, len(part), (), PAGES)])
        logits.append(decoder.run(batch, cache).logits)
    return torch.cat(logits)


@torch.inference_mode()
def theirs(model: LlamaForCausalLM, ids: Sequence[int]) -> Tensor:
    return model(torch.tensor([list(ids)])).logits[0]


def assert_close(ours: Tensor, expected: Tensor) -> None:
    assert ours.shape == expected.shape
    assert (ours.double() - expected.double()).abs().max().item() < TOLERANCE


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    made: dict[str, tuple[Path, Any]] = {}

    def get(variant: str) -> tuple[Path, Any]:
        if variant not in made:
            directory = tmp_path_factory.mktemp("llama")
            made[variant] = directory, write_checkpoint(directory, **VARIANTS[variant])
        return made[variant]

    return get


Checkpoints = Callable[[str], tuple[Path, Any]]


@pytest.mark.parametrize(("kernels", "dtype"), KERNELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_in_any_chunks_and_decoding(
    checkpoints: Checkpoints, variant: str, kernels: str, dtype: torch.dtype
) -> None:
    directory, model = checkpoints(variant)
    decoder = load(directory, kernels, dtype)
    expected = theirs(model, PROMPT)
    for chunk in (len(PROMPT), 7, 1):
        assert_close(in_chunks(decoder, cache_for(decoder), PROMPT, chunk), expected)


@pytest.mark.parametrize(("kernels", "dtype"), KERNELS)
@pytest.mark.parametrize("variant", ["grouped", "llama3 rope"])
@pytest.mark.parametrize(("prefix", "chain"), [(30, 1), (22, 9), (0, 16)])
def test_a_draft_node_has_the_logits_of_its_own_path(
    checkpoints: Checkpoints,
    variant: str,
    kernels: str,
    dtype: torch.dtype,
    prefix: int,
    chain: int,
) -> None:
    directory, model = checkpoints(variant)
    decoder = load(directory, kernels, dtype)
    cache = cache_for(decoder)
    parents = (-1, -1, 0, 0, 2, 1, 5, -1)
    drafts = [11, 12, 13, 14, 15, 16, 11, 11]
    committed = PROMPT[: prefix + chain]
    if prefix:
        in_chunks(decoder, cache, committed[:prefix], prefix)
    batch = FlatBatch(
        [*committed[prefix:], *drafts], [Segment(prefix, chain, parents, PAGES)],
        range(chain - 1, chain + len(drafts)),
    )  # fmt: skip
    with torch.inference_mode():
        ours = decoder.run(batch, cache).logits
    assert_close(ours[0], theirs(model, committed)[-1])
    for node in range(len(drafts)):
        path = [drafts[i] for i in topology(parents).path(node)]
        assert_close(ours[1 + node], theirs(model, committed + path)[-1])


def test_requests_in_one_pass_do_not_see_each_other(checkpoints: Checkpoints) -> None:
    directory, model = checkpoints("grouped")
    decoder = load(directory, "reference", torch.float64)
    cache = cache_for(decoder)
    first, second = PROMPT[:20], PROMPT[25:42]
    segments = [Segment(0, 20, (), PAGES[:3]), Segment(0, 17, (), PAGES[3:6])]
    with torch.inference_mode():
        ours = decoder.run(FlatBatch(first + second, segments), cache).logits
    assert_close(ours[:20], theirs(model, first))
    assert_close(ours[20:], theirs(model, second))


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, shard_bytes=60_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    decoder = load(tmp_path, "reference", torch.float32)
    ours = in_chunks(decoder, cache_for(decoder), PROMPT, 45)
    assert_close(ours, theirs(model, PROMPT))


def test_a_pass_may_stop_at_any_layer_and_go_on(checkpoints: Checkpoints) -> None:
    directory, _ = checkpoints("grouped")
    decoder = load(directory, "reference", torch.float64)
    whole, split = cache_for(decoder), cache_for(decoder)
    with torch.inference_mode():
        expected = in_chunks(decoder, whole, PROMPT, len(PROMPT))
        plan = decoder.kernels.prepare([Segment(0, len(PROMPT), (), PAGES)], PAGE_SIZE)
        hidden = decoder.embed(PROMPT)
        for layer in range(3):
            hidden = decoder.layers(layer, layer + 1, hidden, plan, split)
        output = decoder.head(hidden)
    assert torch.equal(output.logits, expected)
    assert all(torch.equal(a, b) for a, b in zip(whole.keys, split.keys, strict=True))


def test_only_asked_rows_come_back(checkpoints: Checkpoints) -> None:
    directory, model = checkpoints("grouped")
    decoder = load(directory, "reference", torch.float64)
    batch = FlatBatch(PROMPT, [Segment(0, len(PROMPT), (), PAGES)], [44, 3])
    with torch.inference_mode():
        output = decoder.run(batch, cache_for(decoder))
    assert_close(output.logits, theirs(model, PROMPT)[[44, 3]])
    assert output.hidden.shape == (2, 48)
