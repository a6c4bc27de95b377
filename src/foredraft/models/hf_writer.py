"""A config and a tokenizer as the files of a Hugging Face directory.

Knows the keys that `hf_config` and `tokenizer_files` read, and writes what they read back the same;
knows no tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from foredraft.core.errors import ModelError
from foredraft.kernels.block import Activation
from foredraft.models.config import ModelConfig
from foredraft.models.hf_config import config_from_json
from foredraft.models.rope import Divisors, Linear, Llama3, Rope, Yarn
from foredraft.models.tokenizer import Tokenizer


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """`values` as an indented JSON file. Raises OSError."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """The values of a config.json from which `config_from_json` makes `config` again.

    Raises ModelError where there are none: an architecture or an option that has no key.
    """
    family = _FAMILIES.get(config.architecture)
    if family is None:
        raise ModelError(
            f"a config.json of {config.architecture} cannot be written; "
            f"supported are {', '.join(sorted(_FAMILIES))}"
        )
    values = family(config)
    lost = differing_fields(config, config_from_json(values, "config.json"))
    if lost:
        raise ModelError(
            f"a config.json of {config.architecture} cannot say "
            + ", ".join(f"{name} {getattr(config, name)}" for name in lost)
        )
    return values


def differing_fields(config: ModelConfig, other: ModelConfig) -> list[str]:
    """Names of the fields in which two configs differ."""
    names = [field.name for field in fields(ModelConfig)]
    return [name for name in names if getattr(config, name) != getattr(other, name)]


def _model(config: ModelConfig, model_type: str, **options: Any) -> dict[str, Any]:
    """What every family has; the arguments are what its own has beside."""
    return {
        "architectures": [config.architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": _ACTIVATIONS[config.activation],
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": None,  # some families' default is an id that small vocabularies lack
        **positions_to_json(config.rope, config.max_position_embeddings, config.head_dim),
        **options,
    }


def positions_to_json(rope: Rope, count: int, head_dim: int) -> dict[str, Any]:
    """The keys from which `read_positions` makes `rope` and `count` again."""
    values: dict[str, Any] = {"max_position_embeddings": count, "rope_theta": rope.theta}
    if rope.rotary_dim is not None:
        values["partial_rotary_factor"] = rope.rotary_dim / head_dim
    if isinstance(rope.scaling, Divisors):
        values["original_max_position_embeddings"] = count
    scaling = _scaling(rope, count)
    return values if scaling is None else values | {"rope_scaling": scaling}


def _scaling(rope: Rope, count: int) -> dict[str, Any] | None:
    match rope.scaling:
        case None:
            return None
        case Linear(factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3(factor, low, high, original):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
        case Yarn(factor, original, fast, slow, truncate):
            return {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
                "beta_fast": fast,
                "beta_slow": slow,
                "truncate": truncate,
                "attention_factor": rope.attention_factor,
            }
        case Divisors(values):
            return {
                "rope_type": "longrope",
                "factor": 1.0,
                "original_max_position_embeddings": count,
                "short_factor": list(values),
                "long_factor": list(values),
                "attention_factor": rope.attention_factor,
            }


def _window(config: ModelConfig) -> int | None:
    """The window of the layers that have one."""
    return max(config.windows, default=0) or None


def _layer_types(config: ModelConfig) -> list[str]:
    return [
        "sliding_attention" if config.window(layer) else "full_attention"
        for layer in range(config.num_layers)
    ]


def _llama(config: ModelConfig) -> dict[str, Any]:
    return _model(config, "llama", attention_bias=config.qkv_bias, mlp_bias=config.mlp_bias)


def _mistral(config: ModelConfig) -> dict[str, Any]:
    return _model(config, "mistral", sliding_window=_window(config))


def _qwen2(config: ModelConfig) -> dict[str, Any]:
    return _model(config, "qwen2", **_qwen_windows(config))


def _qwen3(config: ModelConfig) -> dict[str, Any]:
    return _model(config, "qwen3", attention_bias=config.qkv_bias, **_qwen_windows(config))


def _qwen_windows(config: ModelConfig) -> dict[str, Any]:
    window = _window(config)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": _layer_types(config),
    }


def _phi3(config: ModelConfig) -> dict[str, Any]:
    return _model(config, "phi3", sliding_window=_window(config))


def _gemma2(config: ModelConfig) -> dict[str, Any]:
    return _model(
        config,
        "gemma2",
        attn_logit_softcapping=config.attention_soft_cap or None,
        **_gemma(config),
    )


def _gemma3(config: ModelConfig) -> dict[str, Any]:
    local = config.window_rope or config.rope
    return _model(config, "gemma3_text", rope_local_base_freq=local.theta, **_gemma(config))


def _gemma(config: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_activation": _ACTIVATIONS[config.activation],
        "sliding_window": _window(config) or config.max_position_embeddings,
        "layer_types": _layer_types(config),
        "query_pre_attn_scalar": _whole(config.attention_divisor or config.head_dim),
        "final_logit_softcapping": config.final_soft_cap or None,
        "attention_bias": config.qkv_bias,
    }


def _whole(number: float) -> float:
    """As an integer where it is one: transformers takes no other."""
    return int(number) if number == int(number) else number


_ACTIVATIONS: dict[Activation, str] = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
_FAMILIES: dict[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Phi3ForCausalLM": _phi3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
}


def write_tokenizer(
    directory: Path, tokenizer: Tokenizer, special_tokens: Mapping[str, str], max_positions: int
) -> None:
    """tokenizer.json and tokenizer_config.json, as `tokenizer_from_directory` reads them.

    `special_tokens` are the named ones (`{"bos_token": "<s>", ...}`). What comes before every
    prompt is said by a post-processor, the one way that all readers know. Raises OSError.
    """
    backend = Backend.from_str(tokenizer._backend.to_str())
    prefix = tokenizer.encode_prompt("")
    if prefix:
        tokens = [str(backend.id_to_token(token)) for token in prefix]
        backend.post_processor = processors.TemplateProcessing(
            single=[*tokens, "$A"],
            pair=[*tokens, "$A", *(f"{token}:1" for token in tokens), "$B:1"],
            special_tokens=list(zip(tokens, prefix, strict=True)),
        )
    (directory / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")
    template = tokenizer.chat_template
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        **special_tokens,
        **({} if template is None else {"chat_template": template}),
    }
    write_json(directory / "tokenizer_config.json", values)
