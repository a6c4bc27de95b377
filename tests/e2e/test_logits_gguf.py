"""Logits of tiny random models in GGUF files equal those of the transformers models they hold.

The files are written as llama.cpp's converter writes them: ggml's own library gives the names of
keys and tensors, and transformers reads back those files whose every key it honours.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from foredraft.kernels.catalog import load_kernels
from foredraft.kernels.interface import Segment
from foredraft.models.decoder import Decoder, new_cache
from foredraft.models.gguf import GGUFFile
from foredraft.models.gguf_model import config_from_gguf, weights_from_gguf
from foredraft.models.interface import FlatBatch

TOLERANCE = 1e-4
PROMPT = [(7 * i * i + 3 * i + 5) % 67 for i in range(45)]
SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "short_factor": [1.0, 1.3, 2.0, 4.5],
    "long_factor": [2.0, 3.0, 5.0, 9.0],
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Variant:
    family: type[PreTrainedModel]
    architecture: str  # llama.cpp's name
    changes: dict[str, Any] = field(default_factory=dict)
    write: Callable[[gguf.GGUFWriter], None] = lambda writer: None  # its own metadata
    transformers_reads_it: bool = True  # that is, honours all of its keys


def yarn_keys(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(16)


def longrope_keys(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_orig_ctx_len(64)
    writer.add_rope_scaling_attn_factors((1 + np.log(160 / 64) / np.log(64)) ** 0.5)
    for name in ("short", "long"):
        factors = np.array(LONGROPE[f"{name}_factor"], dtype=np.float32)
        writer.add_tensor(f"rope_factors_{name}.weight", factors)


def gemma_keys(writer: gguf.GGUFWriter) -> None:
    writer.add_key_length(256)
    writer.add_value_length(256)
    writer.add_sliding_window(9)


def gemma2_keys(writer: gguf.GGUFWriter) -> None:
    gemma_keys(writer)
    writer.add_attn_logit_softcapping(1.5)
    writer.add_final_logit_softcapping(2.0)


def linear_keys(writer: gguf.GGUFWriter) -> None:
    gemma_keys(writer)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)


VARIANTS = {
    "llama": Variant(LlamaForCausalLM, "llama"),
    "mistral": Variant(MistralForCausalLM, "llama", {"sliding_window": None}),
    "llama with yarn": Variant(
        LlamaForCausalLM, "llama", {"rope_parameters": YARN}, yarn_keys, transformers_reads_it=False
    ),
    "qwen2": Variant(Qwen2ForCausalLM, "qwen2", {"tie_word_embeddings": True}),
    "qwen2 with yarn": Variant(
        Qwen2ForCausalLM, "qwen2", {"rope_parameters": YARN}, yarn_keys, transformers_reads_it=False
    ),
    "qwen3": Variant(
        Qwen3ForCausalLM, "qwen3", {"head_dim": 128}, lambda writer: writer.add_key_length(128)
    ),
    "phi3": Variant(Phi3ForCausalLM, "phi3"),
    "phi3 with a window": Variant(
        Phi3ForCausalLM, "phi3", {"sliding_window": 17},
        lambda writer: writer.add_sliding_window(17), transformers_reads_it=False,
    ),
    "phi3 with longrope": Variant(
        Phi3ForCausalLM, "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
        longrope_keys, transformers_reads_it=False,
    ),
    "phi3 rotated in part": Variant(
        Phi3ForCausalLM, "phi3",
        {"rope_parameters": SIZES["rope_parameters"] | {"partial_rotary_factor": 0.5}},
        lambda writer: writer.add_rope_dimension_count(4), transformers_reads_it=False,
    ),
    "gemma2": Variant(
        Gemma2ForCausalLM, "gemma2",
        {"sliding_window": 9, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
        gemma2_keys, transformers_reads_it=False,
    ),
    "gemma2 with its own caps": Variant(
        Gemma2ForCausalLM, "gemma2", {"sliding_window": 9}, gemma_keys
    ),
    "gemma3": Variant(
        Gemma3ForCausalLM, "gemma3", {"sliding_window": 9, "num_hidden_layers": 7,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5000.0}}},
        gemma_keys,
    ),
    "gemma3 with linear scaling": Variant(
        Gemma3ForCausalLM, "gemma3", {"sliding_window": 9, "num_hidden_layers": 7,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0}
        }},
        linear_keys, transformers_reads_it=False,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On a busy machine torch's threads wait for each other at the end of every operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_model(variant: Variant) -> PreTrainedModel:
    torch.manual_seed(3)
    config = variant.family.config_class(**copy.deepcopy(SIZES | variant.changes))
    model = variant.family(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.eval()


def write_gguf(path: Path, variant: Variant, model: PreTrainedModel) -> None:
    """As llama.cpp's converter does: rows of a Llama's queries and keys as neighbours, a Gemma's
    norms with the one that is added to them.
    """
    config, name = model.config, variant.architecture
    writer = gguf.GGUFWriter(path, name)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(2)
    architecture = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[name]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for stored, tensor in model.state_dict().items():
        if stored == "lm_head.weight" and config.tie_word_embeddings:
            continue
        part, _, kind = stored.rpartition(".")
        values = tensor.numpy()
        if name == "llama" and part.endswith(("q_proj", "k_proj")):
            q = part.endswith("q_proj")
            heads = config.num_attention_heads if q else config.num_key_value_heads
            halves = values.reshape(heads, 2, -1, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if name.startswith("gemma") and part.endswith("norm"):
            values = values + 1
        writer.add_tensor(f"{names.get_name(part)}.{kind}", np.ascontiguousarray(values))
    variant.write(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.inference_mode()
def ours(path: Path) -> Tensor:
    file = GGUFFile(path)
    config = config_from_gguf(file)
    decoder = Decoder(config, weights_from_gguf(file, config), load_kernels("reference"))
    cache = new_cache(config, 6, 8, torch.float32, "cpu")
    batch = FlatBatch(PROMPT, [Segment(0, len(PROMPT), (), range(6))])
    return decoder.run(batch, cache).logits


@torch.inference_mode()
def theirs(model: PreTrainedModel) -> Tensor:
    return model(torch.tensor([PROMPT])).logits[0]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_from_a_gguf_file(tmp_path: Path, name: str) -> None:
    variant = VARIANTS[name]
    model = random_model(variant)
    write_gguf(tmp_path / "model.gguf", variant, model)
    logits = ours(tmp_path / "model.gguf")
    assert (logits - theirs(model)).abs().max().item() < TOLERANCE
    if variant.transformers_reads_it:
        read = AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file="model.gguf", dtype=torch.float32
        )
        assert (logits - theirs(read.eval())).abs().max().item() < TOLERANCE
