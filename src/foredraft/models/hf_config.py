"""A Hugging Face config.json as a ModelConfig.

Knows which keys of config.json can change the numbers; what they mean, each family's function in
`hf_config_families` knows. A key that could change them and that nobody reads is an error that
names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from foredraft.core.errors import ModelError
from foredraft.models.config import ModelConfig
from foredraft.models.fields import Fields
from foredraft.models.hf_config_families import FAMILIES
from foredraft.models.untrusted import read_text, unique_keys

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

# A model of images and text that is served as its text model, and what its `text_config` leaves
# out where it is transformers' default.
WITH_IMAGES = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
_TEXT_DEFAULTS = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208}
_TEXT_KEYS = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "torch_dtype", "dtype")
_IMAGE_KEYS = (
    "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index",
    "image_token_index", "model_type", "architectures", "text_config",
)  # fmt: skip

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
    text = read_text(path, MAX_CONFIG_BYTES)
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
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
    if names[0] in WITH_IMAGES:
        return _text_part(fields, names[0])
    family = FAMILIES.get(names[0])
    if family is None:
        raise ModelError(
            f"{source}: architecture {names[0]!r} is not supported; "
            f"supported are {', '.join(sorted([*FAMILIES, *WITH_IMAGES]))}"
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
    refuse_unread(fields, names[0])
    return config


def _text_part(fields: Fields, architecture: str) -> ModelConfig:
    """The config of a `text_config`. Prompts hold no images, so what describes them is left out."""
    text = fields.value("text_config")
    if not isinstance(text, dict):
        raise fields.fail("text_config", "an object")
    shared = {key: fields.value(key) for key in _TEXT_KEYS if key in fields}
    for key in _IMAGE_KEYS:
        fields.value(key)
    refuse_unread(fields, architecture)
    values = _TEXT_DEFAULTS | shared | text | {"architectures": [WITH_IMAGES[architecture]]}
    config = config_from_json(values, f"{fields.source}: text_config")
    return replace(config, architecture=architecture)


def refuse_unread(fields: Fields, architecture: str) -> None:
    """Raise ModelError for a key that nobody read though it can change what a model computes."""
    strange = [key for key in fields.unread() if _is_meaningful(key)]
    if strange:
        raise ModelError(
            f"{fields.source}: {', '.join(strange)} may change what the model computes and "
            f"{architecture} here does not know it"
        )


def _is_meaningful(key: str) -> bool:
    return _MEANINGFUL.search(key) is not None and _HARMLESS.fullmatch(key) is None
