"""A Hugging Face config.json as a ModelConfig: one function per family of architectures.

Knows the keys of config.json and which of them change the numbers; knows no tensor. A key that
could change the numbers and that nobody here reads is an error that names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foredraft.core.errors import ModelError
from foredraft.models.config import ModelConfig
from foredraft.models.fields import Fields
from foredraft.models.rope import Linear, Llama3, Rope

MAX_CONFIG_BYTES = 16 * 2**20
_JSON_NAMES = {
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}
# Of the stored weights; each tensor says its own, so that the key only has to make sense.
_WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")

# Keys with these words in their name can change what a model computes ...
_MEANINGFUL = re.compile(
    r"act|attn|attention|bias|cap|dim|embed|expert|head|hidden|interleav|layer|logit|moe|mult|norm"
    r"|pos|quant|rope|rotary|scal|size|sliding|theta|window"
)
# ... and these do not, or not at inference, though their names have such a word.
_HARMLESS = re.compile(
    r"_name_or_path|architectures|attention_dropout|attn_pdrop|chunk_size_feed_forward"
    r"|cross_attention_hidden_size|embd_pdrop|embedding_dropout|encoder_no_repeat_ngram_size"
    r"|exponential_decay_length_penalty|forced_.*|gradient_checkpointing|hidden_dropout(_prob)?"
    r"|initializer_range|is_llama_config|layerdrop|no_repeat_ngram_size|output_attentions"
    r"|output_hidden_states|pad_token_id|tie_encoder_decoder|_attn_implementation.*"
    r"|transformers\.js_config|use_cache|diversity_penalty|encoder_.*|decoder_start_token_id"
)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`. Raises ModelError where it is missing, too large or not one."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        kind = _JSON_NAMES.get(type(value), "another value")
        raise ModelError(f"{path}: holds {kind}, expected a JSON object")
    return value


def config_from_json(values: Mapping[str, Any], source: str) -> ModelConfig:
    """The config of a parsed config.json; `source` begins every error.

    Raises ModelError for an architecture, option or value that the decoder cannot honour.
    """
    fields = Fields(values, source)
    names = fields.value("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.fail("architectures", "a list with one name")
    family = FAMILIES.get(names[0])
    if family is None:
        raise ModelError(
            f"{source}: architecture {names[0]!r} is not supported; "
            f"supported are {', '.join(sorted(FAMILIES))}"
        )
    if "quantization_config" in fields:
        method = values["quantization_config"]
        name = method.get("quant_method") if isinstance(method, dict) else method
        raise ModelError(
            f"{source}: quantization_config {name!r} is not supported; "
            "use float32, bfloat16 or float16 weights"
        )
    try:
        config = family(fields, names[0])
    except ModelError as error:
        if str(error).startswith(source):
            raise
        raise ModelError(f"{source}: {error}") from error
    for key in ("torch_dtype", "dtype"):
        if fields.value(key) is not None and values[key] not in _WEIGHT_DTYPES:
            raise fields.fail(key, f"one of {', '.join(_WEIGHT_DTYPES)}")
    strange = [key for key in fields.unread() if _is_meaningful(key)]
    if strange:
        raise ModelError(
            f"{source}: {', '.join(strange)} may change what the model computes and "
            f"{names[0]} here does not know it"
        )
    return config


def _is_meaningful(key: str) -> bool:
    return _MEANINGFUL.search(key) is not None and _HARMLESS.fullmatch(key) is None


def _llama(fields: Fields, architecture: str) -> ModelConfig:
    """Llama 1 to 3 and what shares their code (SmolLM, TinyLlama, ...)."""
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.fail("hidden_act", "'silu'")
    fields.integer("pretraining_tp", 1)  # another way to sum the same products
    if fields.flag("rope_interleaved", False):
        raise fields.fail("rope_interleaved", "false")
    layer_types = fields.value("layer_types")
    if layer_types is not None and set(map(str, layer_types)) != {"full_attention"}:
        raise fields.fail("layer_types", "only 'full_attention'")
    if fields.text("model_type", "llama") != "llama":
        raise fields.fail("model_type", f"'llama', the type of {architecture}")
    attention_bias = fields.flag("attention_bias", False)
    bos = fields.ids("bos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", max(1, hidden_size // num_heads)),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=fields.ids("eos_token_id"),
    )


def _rope(fields: Fields) -> Rope:
    """`rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before it)."""
    theta = fields.number("rope_theta", 10000.0)
    for key in ("rope_parameters", "rope_scaling"):
        raw = fields.value(key)
        if raw is None:
            continue
        if not isinstance(raw, dict):
            raise fields.fail(key, "an object")
        inner = Fields(raw, f"{fields.source}: {key}")
        theta = inner.number("rope_theta", theta)
        return Rope(theta, _scaling(inner))
    return Rope(theta)


def _scaling(fields: Fields) -> Linear | Llama3 | None:
    """The scaling a `rope_scaling` object describes.

    "dynamic" equals no scaling up to the original length, which is `max_position_embeddings`, and
    no position beyond that is served: there its keys would depend on the length seen so far.
    """
    kind = fields.text("rope_type", fields.text("type", "default"))
    scaling: Linear | Llama3 | None = None
    if kind == "linear":
        scaling = Linear(fields.number("factor"))
    elif kind == "dynamic":
        fields.number("factor", 1.0)
        fields.value("original_max_position_embeddings")
    elif kind == "llama3":
        scaling = Llama3(
            factor=fields.number("factor"),
            low_freq_factor=fields.number("low_freq_factor"),
            high_freq_factor=fields.number("high_freq_factor"),
            original_max_positions=fields.integer("original_max_position_embeddings"),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise fields.fail("high_freq_factor", "more than low_freq_factor")
    elif kind != "default":
        raise fields.fail("rope_type", "'default', 'linear', 'llama3' or 'dynamic'")
    if fields.unread():
        raise ModelError(f"{fields.source}: unknown keys {', '.join(fields.unread())}")
    return scaling


FAMILIES: dict[str, Callable[[Fields, str], ModelConfig]] = {"LlamaForCausalLM": _llama}
