"""Hugging Face's families: what the keys of each one's config.json mean to the one decoder.

Knows one function per family and the defaults of transformers' configs; knows no tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foredraft.kernels.block import Activation
from foredraft.models.config import ModelConfig, check_num_layers
from foredraft.models.fields import Fields
from foredraft.models.hf_config_rope import (
    Positions,
    read_positions,
    read_positions_by_layer_type,
)

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def _llama(fields: Fields, architecture: str) -> ModelConfig:
    """Llama 1 to 3 and what shares their code (SmolLM, TinyLlama, ...)."""
    _model_type(fields, architecture, "llama")
    fields.integer("pretraining_tp", 1)  # another way to sum the same products
    if fields.flag("rope_interleaved", False):
        raise fields.fail("rope_interleaved", "false")
    bias = fields.flag("attention_bias", False)
    return _model(
        fields, architecture, max_positions=2048,
        windows=_same_windows(fields, None),
        qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias", False),
    )  # fmt: skip


def _mistral(fields: Fields, architecture: str) -> ModelConfig:
    """Mistral 7B and its kind: a window in every layer, or in none."""
    _model_type(fields, architecture, "mistral")
    windows = _same_windows(fields, _window(fields, 4096))
    return _model(fields, architecture, max_positions=4096 * 32, windows=windows)


def _qwen2(fields: Fields, architecture: str) -> ModelConfig:
    """Qwen 2 and 2.5: biases in queries, keys and values; a window in the upper layers, if any."""
    _model_type(fields, architecture, "qwen2")
    return _model(
        fields, architecture, max_positions=32768, windows=_qwen_windows(fields), qkv_bias=True
    )


def _qwen3(fields: Fields, architecture: str) -> ModelConfig:
    """Qwen 3: norms of queries and keys in place of the biases."""
    _model_type(fields, architecture, "qwen3")
    bias = fields.flag("attention_bias", False)
    return _model(
        fields, architecture, max_positions=32768, head_dim=128,
        windows=_qwen_windows(fields), qkv_bias=bias, output_bias=bias, head_norms=True,
    )  # fmt: skip


def _phi3(fields: Fields, architecture: str) -> ModelConfig:
    """Phi 3 and 4: fused projections; a head may be rotated in part."""
    _model_type(fields, architecture, "phi3")
    fields.value("original_max_position_embeddings")  # of longrope, which reads it
    for key in ("full_attn_mod", "interpolate_factor"):  # of Phi 4's own code, where 1 is nothing
        if fields.integer(key, 1) != 1:
            raise fields.fail(key, "1")
    return _model(
        fields, architecture, max_positions=4096, eps=1e-5, partial=True,
        windows=_same_windows(fields, _window(fields, None)), fused_projections=True,
    )  # fmt: skip


def _gemma2(fields: Fields, architecture: str) -> ModelConfig:
    """Gemma 2: every second layer has a window; soft caps of scores and logits."""
    _model_type(fields, architecture, "gemma2")
    return _model(
        fields, architecture, max_positions=8192,
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping", 50.0),
        final_soft_cap=_soft_cap(fields, "final_logit_softcapping", 30.0),
        **_gemma(fields, pattern=2),
    )  # fmt: skip


def _gemma3(fields: Fields, architecture: str) -> ModelConfig:
    """Gemma 3's text model: of six layers, five have a window and a rotation of their own."""
    _model_type(fields, architecture, "gemma3_text")
    pattern = fields.integer("_sliding_window_pattern", 6)
    pattern = fields.integer("sliding_window_pattern", pattern)
    if fields.value("attn_logit_softcapping") is not None:
        raise fields.fail("attn_logit_softcapping", "null: implementations do not agree on it")
    count = fields.integer("max_position_embeddings", 131072)
    positions, window_rope = read_positions_by_layer_type(fields, count)
    return _model(
        fields, architecture, max_positions=count, positions=positions,
        window_rope=window_rope, head_norms=True,
        final_soft_cap=_soft_cap(fields, "final_logit_softcapping", None),
        **_gemma(fields, pattern=pattern),
    )  # fmt: skip


def _gemma(fields: Fields, pattern: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share: of `pattern` layers, the last has no window."""
    window = _window(fields, 4096)
    if window is None:
        raise fields.fail("sliding_window", "the size of a window")
    old = fields.integer("sliding_window_size", window)
    if old != window:
        raise fields.fail("sliding_window_size", f"{window}, the sliding_window")
    fields.value("hidden_act")  # left over from Gemma 1: transformers reads the other one
    bias = fields.flag("attention_bias", False)
    return {
        "head_dim": 256,
        "tied": True,
        "activation": _activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        "windows": _windows(fields, window, lambda layer: (layer + 1) % pattern > 0),
        "attention_divisor": fields.number("query_pre_attn_scalar", 256.0),
        "embedding_scale": float(fields.integer("hidden_size") ** 0.5),
        "norm_offset": 1.0,
        "post_norms": True,
        "qkv_bias": bias,
        "output_bias": bias,
    }


FAMILIES: dict[str, Callable[[Fields, str], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Phi3ForCausalLM": _phi3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
}


def _model(
    fields: Fields,
    architecture: str,
    *,
    max_positions: int,
    head_dim: int | None = None,
    eps: float = 1e-6,
    tied: bool = False,
    partial: bool = False,
    positions: Positions | None = None,
    **options: Any,
) -> ModelConfig:
    """What every family has; the arguments are defaults where the file is silent, and options."""
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", head_dim or max(1, hidden_size // num_heads))
    count = fields.integer("max_position_embeddings", max_positions)
    positions = positions or read_positions(fields, head_dim, count, partial)
    if "activation" not in options:
        options["activation"] = _activation(fields, "hidden_act", "silu")
    bos = fields.ids("bos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position_embeddings=positions.count,
        rms_norm_eps=fields.number("rms_norm_eps", eps),
        rope=positions.rope,
        tie_word_embeddings=fields.flag("tie_word_embeddings", tied),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=fields.ids("eos_token_id"),
        **options,
    )


def _model_type(fields: Fields, architecture: str, expected: str) -> None:
    if fields.text("model_type", expected) != expected:
        raise fields.fail("model_type", f"{expected!r}, the type of {architecture}")


def _activation(fields: Fields, key: str, default: str) -> Activation:
    name = fields.text(key, default)
    if name not in _ACTIVATIONS:
        raise fields.fail(key, f"one of {', '.join(map(repr, _ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def _soft_cap(fields: Fields, key: str, default: float | None) -> float:
    """A missing cap is `default`, null is none."""
    value = fields.value(key)
    if value is None and (default is None or fields.is_null(key)):
        return 0.0
    return fields.number(key, default)


def _window(fields: Fields, default: int | None) -> int | None:
    """A missing window is `default`, null is none."""
    value = fields.value("sliding_window")
    if value is None and (default is None or fields.is_null("sliding_window")):
        return None
    return fields.integer("sliding_window", default)


def _qwen_windows(fields: Fields) -> tuple[int, ...]:
    first = fields.integer("max_window_layers", 28, minimum=0)
    window = _window(fields, 4096)
    if not fields.flag("use_sliding_window", False):
        window = None
    return _windows(fields, window, lambda layer: layer >= first)


def _same_windows(fields: Fields, window: int | None) -> tuple[int, ...]:
    windows = _windows(fields, window, lambda layer: True)
    if len(set(windows)) > 1:
        raise fields.fail("layer_types", "the same type for all layers")
    return windows


def _windows(
    fields: Fields, window: int | None, has_window: Callable[[int], bool]
) -> tuple[int, ...]:
    """Each layer's window by `layer_types` or, where the file has none, by `has_window(layer)`."""
    types = fields.value("layer_types")
    if window is None and types is None:
        return ()
    num_layers = fields.integer("num_hidden_layers")
    check_num_layers(num_layers, fields.source)
    if types is None:
        local = [has_window(layer) for layer in range(num_layers)]
    else:
        if not isinstance(types, list) or len(types) != num_layers:
            raise fields.fail("layer_types", f"a list of {num_layers} types")
        known = ("full_attention", "sliding_attention") if window else ("full_attention",)
        if any(kind not in known for kind in types):
            raise fields.fail("layer_types", f"only {' and '.join(map(repr, known))}")
        local = [kind == "sliding_attention" for kind in types]
    return tuple(window or 0 if is_local else 0 for is_local in local) if any(local) else ()
