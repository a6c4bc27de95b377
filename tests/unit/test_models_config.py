"""config.json to ModelConfig: what is understood, and what is refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foredraft.core.errors import ModelError
from foredraft.models.gguf import GGUFTensor
from foredraft.models.gguf_model import config_from_gguf, weights_from_gguf
from foredraft.models.hf_config import config_from_json, read_json
from foredraft.models.rope import Divisors, Linear, Llama3, Rope

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse(**changes: Any) -> Any:
    return config_from_json(SMOLLM2 | changes, "config.json")


def test_a_published_config_is_understood() -> None:
    config = parse()
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.rope == Rope(100000.0)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.attention_scale == 0.125


def test_options_and_defaults() -> None:
    assert parse(head_dim=32).head_dim == 32
    assert parse(num_key_value_heads=None).num_kv_heads == 9
    assert parse(eos_token_id=[2, 0]).eos_token_ids == (2, 0)
    assert parse(eos_token_id=None).eos_token_ids == ()
    biased = parse(attention_bias=True, mlp_bias=True)
    assert biased.qkv_bias
    assert biased.output_bias
    assert biased.mlp_bias


def test_rope_in_the_old_and_the_new_place() -> None:
    expected = Rope(5e5, Llama3(32.0, 1.0, 4.0, 8192))
    assert parse(rope_theta=5e5, rope_scaling=LLAMA3).rope == expected
    assert parse(rope_parameters=LLAMA3 | {"rope_theta": 5e5}).rope == expected
    old_name = {"type": "linear", "factor": 2.0}
    assert parse(rope_scaling=old_name).rope == Rope(1e5, Linear(2.0))


def test_dynamic_scaling_is_none_up_to_the_original_length() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    config = parse(rope_scaling=dynamic)
    assert config.rope == Rope(100000.0)
    assert config.max_position_embeddings == 8192  # the engine serves nothing beyond


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"architectures": ["MambaForCausalLM"]},
        "'MambaForCausalLM' is not supported",
    ),
    "no architecture": ({"architectures": None}, "architectures is None"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "rope kind": ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "rope_type is 'ntk'"),
    "rope key": (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}},
        "unknown keys beta_fast",
    ),
    "rope order": (
        {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
        "high_freq_factor is 1.0; expected more than low_freq_factor",
    ),
    "quantisation": ({"quantization_config": {"quant_method": "awq"}}, "'awq' is not supported"),
    "window": ({"sliding_window": 4096}, "sliding_window may change what the model computes"),
    "soft cap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping may change"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor may change"),
    "interleaved": ({"rope_interleaved": True}, "rope_interleaved is True"),
    "layer types": ({"layer_types": ["sliding_attention"]}, "layer_types is"),
    "missing size": ({"hidden_size": None}, "hidden_size is missing"),
    "text for a number": ({"hidden_size": "576"}, "hidden_size is '576'; expected an integer"),
    "true for a number": ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    "zero": ({"vocab_size": 0}, "vocab_size is 0"),
    "negative": ({"intermediate_size": -1}, "intermediate_size is -1"),
    "not finite": ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
    "text for a flag": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    "uneven heads": ({"num_key_value_heads": 2}, "9 attention heads cannot share 2"),
    "odd head": ({"head_dim": 63}, "head_dim is 63"),
    "absurd layers": ({"num_hidden_layers": 10**9}, "num_layers is 1000000000"),
    "absurd length": ({"max_position_embeddings": 10**11}, "max_position_embeddings is"),
    "eos outside": ({"eos_token_id": 49152}, "token id 49152 is outside the vocabulary of 49152"),
    "eos of text": ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_honoured_is_one_line_that_names_it(kind: str) -> None:
    changes, complaint = REFUSED[kind]
    with pytest.raises(ModelError) as caught:
        parse(**changes)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1]", "{", "nul", '{"a": ' * 5000])
def test_a_config_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_json(path)


ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": LLAMA3,
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 2048},
    "yarn, exact": {
        "factor": 40.0, "original_max_position_embeddings": 512, "truncate": False,
        "beta_fast": 20.0, "beta_slow": 0.4, "attention_factor": 0.8,
    },
    "yarn, weighed": {
        "factor": 1.5, "original_max_position_embeddings": 64, "mscale": 2.0,
        "mscale_all_dim": 0.5,
    },
    "yarn of one length": {"factor": 2.0, "original_max_position_embeddings": 2},
    "longrope": {
        "short_factor": [1.0 + i / 8 for i in range(32)], "long_factor": [9.0] * 32,
        "original_max_position_embeddings": 1024,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_equal_transformers(kind: str) -> None:
    name = kind.split()[0].rstrip(",")
    parameters = {"rope_type": name, "rope_theta": 5e5} | ROPES[kind]
    peer = LlamaConfig(
        hidden_size=128, num_attention_heads=2, head_dim=64, max_position_embeddings=8192,
        rope_parameters=dict(parameters),
    )  # fmt: skip
    factor = 1.0
    if name == "default":
        expected = 5e5 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[name](peer, "cpu")
        expected = frequencies.double()
    rope = parse(rope_parameters=parameters).rope
    assert rope.attention_factor == pytest.approx(factor, rel=1e-9)
    cos, sin = rope.tables(64, 3, torch.float64, "cpu")
    for position in range(3):
        assert torch.allclose(cos[position], factor * (position * expected).cos(), atol=1e-6)
        assert torch.allclose(sin[position], factor * (position * expected).sin(), atol=1e-6)


def gguf_file(changes: dict[str, Any], extra: dict[str, tuple[int, ...]] | None = None) -> Any:
    values = {
        "block_count": 1, "context_length": 128, "embedding_length": 16, "feed_forward_length": 24,
        "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 4,
    } | changes  # fmt: skip
    shapes = {"token_embd.weight": (50, 16), "output_norm.weight": (16,)} | (extra or {})
    return SimpleNamespace(
        path=Path("tiny.gguf"),
        metadata={"general.architecture": "llama", "tokenizer.ggml.eos_token_id": 2}
        | {f"llama.{key}": value for key, value in values.items() if value is not None},
        tensors={name: GGUFTensor(name, shape, 0, 0, 0) for name, shape in shapes.items()},
        tensor=lambda name: torch.arange(1.0, 3.0),
    )


def test_gguf_metadata_is_understood() -> None:
    config = config_from_gguf(gguf_file({"rope.freq_base": 5e5}))
    assert config.tie_word_embeddings
    assert (config.vocab_size, config.head_dim, config.rope) == (50, 4, Rope(5e5))
    scaled = gguf_file({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0})
    assert config_from_gguf(scaled).rope.scaling == Linear(2.0)
    divided = config_from_gguf(gguf_file({}, {"rope_freqs.weight": (2,)}))
    assert divided.rope.scaling == Divisors((1.0, 2.0))
    assert not config_from_gguf(gguf_file({}, {"output.weight": (50, 16)})).tie_word_embeddings


GGUF_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"expert_count": 8}, "expert_count is 8"),
    "unknown": ({"attention.sliding_window": 4096}, "'attention.sliding_window'"),
    "head per layer": ({"attention.head_count": [4, 4]}, "attention.head_count is [4, 4]"),
    "vocabulary": ({"vocab_size": 51}, "vocab_size is 51; expected 50"),
    "part rotated": ({"rope.dimension_count": 2}, "rope.dimension_count is 2"),
    "scaling": ({"rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
    "yarn of no length": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
        "rope.scaling.original_context_length is missing",
    ),
    "yarn with a factor of its own": (
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_attn_factor": 1.2,
        },
        "rope.scaling.yarn_attn_factor is 1.2; expected 1.0",
    ),
    "missing": ({"block_count": None}, "block_count is missing"),
    "epsilon of the wrong type": (
        {"attention.layer_norm_rms_epsilon": 1},
        "layer_norm_rms_epsilon is 1; expected a floating-point number",
    ),
    "base of the wrong type": ({"rope.freq_base": 10000}, "rope.freq_base is 10000"),
    "flag of the wrong type": ({"rope.scaling.finetuned": 1}, "finetuned is 1"),
    "text of the wrong type": ({"tensor_data_layout": 1}, "tensor_data_layout is 1"),
    "odd heads": (
        {"attention.key_length": 3, "attention.value_length": 3, "rope.dimension_count": 3},
        "head_dim is 3",
    ),
}


@pytest.mark.parametrize("kind", GGUF_REFUSED)
def test_gguf_metadata_that_cannot_be_honoured(kind: str) -> None:
    changes, complaint = GGUF_REFUSED[kind]
    with pytest.raises(ModelError, match=r"tiny\.gguf") as caught:
        config_from_gguf(gguf_file(changes))
    assert complaint in str(caught.value)


def test_gguf_of_another_architecture_and_with_an_unknown_tensor() -> None:
    file = gguf_file({})
    with pytest.raises(ModelError, match=r"unknown tensor 'blk\.0\.ssm_a'"):
        weights_from_gguf(gguf_file({}, {"blk.0.ssm_a": (3,)}), config_from_gguf(file))
    file.metadata["general.architecture"] = "mamba"
    with pytest.raises(ModelError, match="'mamba' is not supported"):
        config_from_gguf(file)
