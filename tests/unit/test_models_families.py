"""Published configs of every family: what they mean, in old keys and new, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.core.errors import ModelError
from foredraft.models.config import ModelConfig
from foredraft.models.hf_config import config_from_json
from foredraft.models.rope import Divisors, Linear, Rope, Yarn

COMMON = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
    "bos_token_id": 2, "eos_token_id": [1, 6], "initializer_range": 0.02, "use_cache": True,
    "attention_dropout": 0.0, "transformers_version": "4.50.0",
}  # fmt: skip
# Sizes are small; all other values are those of a model's own file.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Mistral 7B": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu",
        "max_position_embeddings": 32768, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": False,
    },
    "Qwen 2.5": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
        "max_position_embeddings": 32768, "max_window_layers": 21, "rope_theta": 1000000.0,
        "sliding_window": 32768, "use_sliding_window": False, "tie_word_embeddings": True,
    },
    "Qwen 3": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
        "attention_bias": False, "head_dim": 128, "max_position_embeddings": 40960,
        "max_window_layers": 28, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": True,
    },
    "Phi 3 mini 128k": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_act": "silu",
        "attention_bias": False, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "embd_pdrop": 0.0, "resid_pdrop": 0.0, "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096, "rope_theta": 10000.0, "sliding_window": 262144,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0, 1.1] * 4, "long_factor": [1.0, 9.0] * 4,
        },
        "tie_word_embeddings": False,
    },
    "Phi 4 mini": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_act": "silu",
        "attention_bias": False, "embd_pdrop": 0.0, "full_attn_mod": 1, "interpolate_factor": 1,
        "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0, "rope_theta": 10000.0, "sliding_window": 262144,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0, 2.0] * 3,
        },
        "tie_word_embeddings": True,
    },
    "Gemma 2 2B": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False,
        "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256, "rope_theta": 10000.0, "sliding_window": 4096,
    },
    "Gemma 3 1B": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "attention_bias": False, "attn_logit_softcapping": None, "cache_implementation": "hybrid",
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768, "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6,
    },
}  # fmt: skip


def parse(name: str, **changes: Any) -> ModelConfig:
    return config_from_json(COMMON | PUBLISHED[name] | changes, "config.json")


def test_mistral() -> None:
    config = parse("Mistral 7B")
    assert config.windows == (4096,) * 6
    assert parse("Mistral 7B", sliding_window=None).windows == ()
    assert not config.qkv_bias


def test_qwen() -> None:
    config = parse("Qwen 2.5")
    assert (config.windows, config.qkv_bias, config.output_bias) == ((), True, False)
    windows = parse("Qwen 2.5", use_sliding_window=True, max_window_layers=4).windows
    assert windows == (0, 0, 0, 0, 32768, 32768)
    config = parse("Qwen 3")
    assert (config.head_norms, config.qkv_bias, config.head_dim) == (True, False, 128)


def test_yarn_as_qwen_tells_its_users_to_ask_for_it() -> None:
    asked = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = parse("Qwen 2.5", rope_scaling=asked)
    assert config.rope == Rope(1e6, Yarn(4.0, 32768), pytest.approx(1.1386294))
    assert config.max_position_embeddings == 131072  # what it is asked for
    told = parse("Qwen 2.5", rope_scaling=asked, max_position_embeddings=65536)
    assert told.max_position_embeddings == 65536
    flat = {"rope_type": "yarn", "factor": 4.0, "mscale": 2.0}  # alone it says nothing
    assert parse("Qwen 2.5", rope_scaling=flat).rope == config.rope


def test_phi3_is_served_up_to_its_original_length() -> None:
    config = parse("Phi 3 mini 128k")
    assert config.max_position_embeddings == 4096
    assert config.rope == Rope(1e4, Divisors((1.0, 1.1) * 4), pytest.approx(1.1902380))
    assert (config.fused_projections, config.windows) == (True, (262144,) * 6)
    config = parse("Phi 4 mini")
    assert (config.head_dim, config.rope.rotary_dim) == (16, 12)


def test_gemma2() -> None:
    config = parse("Gemma 2 2B")
    assert config.windows == (4096, 0) * 3
    assert (config.attention_soft_cap, config.final_soft_cap) == (50.0, 30.0)
    assert (config.norm_offset, config.embedding_scale, config.post_norms) == (1.0, 8.0, True)
    assert (config.attention_scale, config.activation) == (1 / 16, "gelu_tanh")
    assert config.tie_word_embeddings  # not in the file: transformers' default
    silent = COMMON | PUBLISHED["Gemma 2 2B"]
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window"):
        del silent[key]
    assert config_from_json(silent, "config.json") == config
    uncapped = parse("Gemma 2 2B", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (uncapped.attention_soft_cap, uncapped.final_soft_cap) == (0.0, 0.0)


def test_gemma3_in_old_keys_and_in_new_ones() -> None:
    config = parse("Gemma 3 1B")
    assert config.windows == (512,) * 5 + (0,)
    assert (config.rope, config.window_rope) == (Rope(1e6), Rope(1e4))
    new = {
        key: value
        for key, value in (COMMON | PUBLISHED["Gemma 3 1B"]).items()
        if key not in ("rope_local_base_freq", "rope_scaling", "rope_theta", "hidden_act")
    } | {
        "_sliding_window_pattern": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }  # fmt: skip
    del new["sliding_window_pattern"]
    assert config_from_json(new, "config.json") == config
    scaled = parse("Gemma 3 1B", rope_scaling={"factor": 8.0, "rope_type": "linear"})
    assert (scaled.rope, scaled.window_rope) == (Rope(1e6, Linear(8.0)), Rope(1e4))


def test_gemma3_with_images_is_read_as_its_text_model() -> None:
    nested: dict[str, Any] = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144,
        "eos_token_id": [1, 106], "mm_tokens_per_image": 256, "torch_dtype": "bfloat16",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }  # fmt: skip
    config = config_from_json(nested, "config.json")
    assert config.architecture == "Gemma3ForConditionalGeneration"
    assert (config.num_heads, config.num_kv_heads, config.vocab_size) == (8, 4, 262208)
    assert config.eos_token_ids == (1, 106)
    with pytest.raises(ModelError, match="text_config is None; expected an object"):
        config_from_json(nested | {"text_config": None}, "config.json")
    with pytest.raises(ModelError, match="image_newline_size may change"):
        config_from_json(nested | {"image_newline_size": 3}, "config.json")
    both_ways = {"text_config": nested["text_config"] | {"use_bidirectional_attention": True}}
    with pytest.raises(ModelError, match="text_config: use_bidirectional_attention may change"):
        config_from_json(nested | both_ways, "config.json")


LAYERS_OF_TWO_KINDS = ["full_attention"] * 5 + ["sliding_attention"]
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "windows in some layers": (
        "Mistral 7B", {"layer_types": LAYERS_OF_TWO_KINDS},
        "expected the same type for all layers",
    ),
    "a window without its size": (
        "Qwen 2.5", {"layer_types": LAYERS_OF_TWO_KINDS}, "expected only 'full_attention'",
    ),
    "too few layer types": ("Gemma 2 2B", {"layer_types": ["full_attention"]}, "a list of 6 types"),
    "another layer type": (
        "Gemma 2 2B", {"layer_types": ["chunked_attention"] * 6},
        "expected only 'full_attention' and 'sliding_attention'",
    ),
    "no window": ("Gemma 3 1B", {"sliding_window": None}, "sliding_window is None"),
    "a window of nothing": ("Mistral 7B", {"sliding_window": 0}, "sliding_window is 0"),
    "two windows": ("Gemma 2 2B", {"sliding_window_size": 5}, "sliding_window_size is 5"),
    "a billion layers": ("Mistral 7B", {"num_hidden_layers": 10**9}, "num_layers is 1000000000"),
    "scores capped": ("Gemma 3 1B", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is"),
    "both directions": (
        "Gemma 3 1B", {"use_bidirectional_attention": True}, "use_bidirectional_attention may",
    ),
    "exact gelu": ("Gemma 2 2B", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
    "biases of Qwen": ("Qwen 2.5", {"attention_bias": True}, "attention_bias may change"),
    "mixed rope": ("Qwen 2.5", {"use_mrope": True}, "use_mrope may change"),
    "longrope without factors": (
        "Phi 3 mini 128k", {"rope_scaling": {"type": "longrope"}}, "short_factor is missing",
    ),
    "longrope without a length": (
        "Phi 3 mini 128k", {"original_max_position_embeddings": None},
        "original_max_position_embeddings is missing",
    ),
    "factors of other heads": (
        "Phi 3 mini 128k", {"head_dim": 32}, "8 rope divisors, expected 16",
    ),
    "Phi 3's old yarn": (
        "Phi 3 mini 128k",
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "short_factor": [1.0] * 8}},
        "unknown keys short_factor",
    ),
    "an odd part of a head": ("Phi 4 mini", {"partial_rotary_factor": 0.7}, "11 dimensions of a"),
    "more than a head": ("Phi 4 mini", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is"),
    "a part of a head elsewhere": (
        "Qwen 2.5", {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor is 0.5; expected 1",
    ),
    "yarn without a factor": ("Qwen 2.5", {"rope_scaling": {"type": "yarn"}}, "factor is missing"),
    "yarn upside down": (
        "Qwen 2.5", {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": 40.0}},
        "beta_fast is None; expected more than beta_slow",
    ),
    "yarn over no base": (
        "Qwen 2.5", {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2.0}},
        "yarn needs a rope base above 1",
    ),
    "yarn to infinity": (
        "Qwen 2.5", {"rope_scaling": {"type": "yarn", "factor": 1e308}}, "max_position_embeddings",
    ),
    "rope by layer type elsewhere": (
        "Qwen 3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "unknown keys full_attention",
    ),
    "rope for a third layer type": (
        "Gemma 3 1B", {"rope_parameters": {"chunked_attention": {"rope_type": "default"}}},
        "unknown keys chunked_attention",
    ),
    "rope twice": (
        "Qwen 3",
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "default"}},
        "rope_parameters and rope_scaling are both given",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_family_does_not_have_is_refused_by_name(kind: str) -> None:
    name, changes, complaint = REFUSED[kind]
    with pytest.raises(ModelError) as caught:
        parse(name, **changes)
    assert complaint in str(caught.value)
    assert str(caught.value).startswith("config.json")
    assert "\n" not in str(caught.value)
