"""Logits of tiny random models of every family equal transformers', whose checkpoints they are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    LlamaForCausalLM,
    MistralForCausalLM,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from foredraft.cache.tensors import KVCache
from foredraft.core.trees import topology
from foredraft.kernels.catalog import load_kernels, native_available
from foredraft.kernels.interface import Segment
from foredraft.models.decoder import Decoder, activation_dtype, new_cache
from foredraft.models.hf_config import WITH_IMAGES, config_from_json, read_json
from foredraft.models.interface import FlatBatch
from foredraft.models.rope import Rope, Yarn
from foredraft.models.safetensors_weights import SINGLE, SafetensorsWeights, WithoutCopiedHead
from foredraft.models.weights import TextPart

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "pad_token_id": None,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
# The original length holds the whole prompt: beyond it nothing is served.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.3, 2.0, 4.5],
    "long_factor": [2.0, 3.0, 5.0, 9.0],
    "original_max_position_embeddings": 64,
}
GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9}
LOCAL, FULL = "sliding_attention", "full_attention"
Family = type[PreTrainedModel]
VARIANTS: dict[str, tuple[Family, dict[str, Any]]] = {
    "grouped": (LlamaForCausalLM, {}),
    "one key head": (LlamaForCausalLM, {"num_key_value_heads": 1}),
    "as many key heads": (LlamaForCausalLM, {"num_key_value_heads": 6}),
    "tied": (LlamaForCausalLM, {"tie_word_embeddings": True}),
    "head_dim apart": (LlamaForCausalLM, {"head_dim": 24}),
    "llama3 rope": (LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "linear rope": (
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "yarn rope": (LlamaForCausalLM, {"rope_parameters": YARN}),
    "yarn rope, all told": (
        LlamaForCausalLM,
        {
            "rope_parameters": YARN
            | {"beta_fast": 6.0, "beta_slow": 0.3, "truncate": False}
            | {"mscale": 1.5, "mscale_all_dim": 0.7}
        },
    ),
    "biases": (LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "large eps": (LlamaForCausalLM, {"rms_norm_eps": 0.1}),
    "mistral": (MistralForCausalLM, {"sliding_window": 11}),
    "mistral without a window": (MistralForCausalLM, {"sliding_window": None, "head_dim": 16}),
    "qwen2": (Qwen2ForCausalLM, {"sliding_window": 5}),  # not used, as its switch is off
    "qwen2 with windows": (
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1},
    ),
    "qwen2 with yarn": (
        Qwen2ForCausalLM,
        {"rope_parameters": YARN | {"attention_factor": 1.25}, "tie_word_embeddings": True},
    ),
    "qwen3": (Qwen3ForCausalLM, {"head_dim": 16, "attention_bias": True}),
    "qwen3 with windows": (
        Qwen3ForCausalLM,
        {
            "head_dim": 8, "use_sliding_window": True, "sliding_window": 6,
            "layer_types": [LOCAL, FULL, LOCAL],
        },
    ),
    "phi3": (Phi3ForCausalLM, {"sliding_window": 17}),
    "phi3 with longrope": (
        Phi3ForCausalLM,
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
    ),
    "phi3 rotated in part": (
        Phi3ForCausalLM,
        {
            "num_attention_heads": 3, "num_key_value_heads": 1,
            "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.5, "attention_factor": 1.1},
            "original_max_position_embeddings": 64,
        },
    ),
    "gemma2": (
        Gemma2ForCausalLM,
        GEMMA | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    ),
    "gemma2 without caps": (
        Gemma2ForCausalLM,
        GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
        | {"layer_types": [FULL, LOCAL, LOCAL]},
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        GEMMA
        | {"num_hidden_layers": 4, "layer_types": [LOCAL, FULL, LOCAL, FULL]}
        | {
            "rope_parameters": {
                LOCAL: {"rope_type": "default", "rope_theta": 100.0},
                FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            }
        },
    ),
    "gemma3 by default": (
        Gemma3ForCausalLM,
        GEMMA | {"num_hidden_layers": 7, "rope_parameters": None, "final_logit_softcapping": 4.0},
    ),
}  # fmt: skip
KERNELS = [("reference", torch.float32), ("reference", torch.float64)]
if native_available():
    KERNELS.append(("native", torch.float32))
TOLERANCE = 1e-4
PROMPT = [(7 * i * i + 3 * i + 5) % 67 for i in range(45)]
PAGES = [4, 1, 7, 0, 11, 3, 9, 2, 8, 10, 5, 6]
PAGE_SIZE = 8


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On a busy machine torch's threads wait for each other at the end of every operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_checkpoint(
    directory: Path, family: Family, shard_bytes: int = 10**9, **changes: Any
) -> PreTrainedModel:
    """A random model of SIZES with `changes`."""
    # A copy: transformers writes its defaults into the dictionaries that it is given.
    return write_model(
        directory, family, family.config_class(**copy.deepcopy(SIZES | changes)), shard_bytes
    )


def write_model(
    directory: Path, family: Family, config: PreTrainedConfig, shard_bytes: int = 10**9
) -> PreTrainedModel:
    """With random numbers added, for norms and biases are ones and zeros in a fresh model."""
    torch.manual_seed(3)
    model = family(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(directory, max_shard_size=shard_bytes)
    return model.eval()


def load(directory: Path, kernels: str, dtype: torch.dtype, **changes: Any) -> Decoder:
    config = config_from_json(read_json(directory / "config.json"), "config.json")
    config = replace(config, **changes)
    weights: Any = SafetensorsWeights(directory)
    if config.architecture in WITH_IMAGES:
        weights = TextPart(weights)
    if config.tie_word_embeddings:
        weights = WithoutCopiedHead(weights)
    chosen = load_kernels(kernels, dtype=activation_dtype(dtype), num_threads=1)
    return Decoder(config, weights, chosen, dtype)


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
def theirs(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    return model(torch.tensor([list(ids)])).logits[0]


def assert_close(ours: Tensor, expected: Tensor) -> None:
    assert ours.shape == expected.shape
    assert (ours.double() - expected.double()).abs().max().item() < TOLERANCE


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    made: dict[str, tuple[Path, Any]] = {}

    def get(variant: str) -> tuple[Path, Any]:
        if variant not in made:
            directory = tmp_path_factory.mktemp("model")
            family, changes = VARIANTS[variant]
            made[variant] = directory, write_checkpoint(directory, family, **changes)
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
@pytest.mark.parametrize(
    ("variant", "prefix", "chain"),
    [
        *((variant, 30, 1) for variant in VARIANTS),
        *((variant, *rows) for variant in ("grouped", "gemma3") for rows in ((22, 9), (0, 16))),
    ],
)
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


# What each option must change; found equal, a comparison above would have compared nothing.
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"windows": ()}),
    ("qwen2 with windows", {"windows": (10, 10, 10)}),
    ("qwen2 with yarn", {"rope": Rope(10000.0)}),
    ("yarn rope", {"rope": Rope(10000.0, Yarn(4.0, 16))}),
    ("yarn rope, all told", {"rope": Rope(10000.0, Yarn(4.0, 16, 6.0, 0.3))}),
    ("phi3 with longrope", {"rope": Rope(10000.0)}),
    ("phi3 rotated in part", {"rope": Rope(10000.0)}),
    ("gemma2", {"attention_soft_cap": 0.0}),
    ("gemma2", {"final_soft_cap": 0.0}),
    ("gemma2", {"attention_divisor": None}),
    ("gemma2", {"embedding_scale": 1.0}),
    ("gemma2", {"norm_offset": 0.0}),
    ("gemma2", {"activation": "silu"}),
    ("gemma3", {"window_rope": None}),
    ("gemma3", {"windows": (9, 9, 9, 9)}),
]


@pytest.mark.parametrize(("variant", "changes"), OPTIONS, ids=str)
def test_an_option_left_out_is_seen_in_the_logits(
    checkpoints: Checkpoints, variant: str, changes: dict[str, Any]
) -> None:
    directory, model = checkpoints(variant)
    decoder = load(directory, "reference", torch.float32, **changes)
    ours = in_chunks(decoder, cache_for(decoder), PROMPT, len(PROMPT))
    assert (ours - theirs(model, PROMPT)).abs().max().item() > 100 * TOLERANCE


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
    model = write_checkpoint(tmp_path, LlamaForCausalLM, shard_bytes=60_000)
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


@pytest.mark.parametrize("old_names", [False, True])
def test_a_model_with_images_is_served_as_its_text_model(tmp_path: Path, old_names: bool) -> None:
    text = copy.deepcopy(SIZES | VARIANTS["gemma3"][1])
    vision = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 4, "patch_size": 2,
    }  # fmt: skip
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=66
    )
    model = write_model(tmp_path, Gemma3ForConditionalGeneration, config)
    path = tmp_path / SINGLE
    tensors = load_file(path)
    assert any("vision_tower" in name for name in tensors)
    if old_names:
        old = {"model.language_model.": "language_model.model.", "model.": ""}
        for new in old:
            tensors = {
                old[new] + n.removeprefix(new) if n.startswith(new) else n: t
                for n, t in tensors.items()
            }
        save_file(tensors, path)
    decoder = load(tmp_path, "reference", torch.float32)
    assert_close(in_chunks(decoder, cache_for(decoder), PROMPT, 7), theirs(model, PROMPT))


def test_only_asked_rows_come_back(checkpoints: Checkpoints) -> None:
    directory, model = checkpoints("grouped")
    decoder = load(directory, "reference", torch.float64)
    batch = FlatBatch(PROMPT, [Segment(0, len(PROMPT), (), PAGES)], [44, 3])
    with torch.inference_mode():
        output = decoder.run(batch, cache_for(decoder))
    assert_close(output.logits, theirs(model, PROMPT)[[44, 3]])
    assert output.hidden.shape == (2, 48)
