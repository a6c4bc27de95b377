"""llama.cpp's families: what the metadata of each one's GGUF files means to the one decoder.

Knows one function per family and the constants that llama.cpp has in place of metadata; knows no
tensor's bytes beyond the divisors of rotary frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from foredraft.core.errors import ModelError
from foredraft.models.fields import Fields
from foredraft.models.gguf import GGUFFile
from foredraft.models.rope import Divisors, Linear, Rope, Yarn, yarn_attention_factor

ROPE_DIVISORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = (ROPE_DIVISORS, SHORT_FACTORS, LONG_FACTORS)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What every family's metadata says of a model's size."""

    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    context_length: int


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture's name in Hugging Face's words, and what its metadata means.

    `read(file, fields, sizes)` gives the options of a ModelConfig beside its sizes.
    """

    architecture: str
    read: Callable[[GGUFFile, Fields, Sizes], dict[str, Any]]
    paired_rows: bool = False  # a head's rotated rows are stored as neighbours


def _plain(file: GGUFFile, fields: Fields, sizes: Sizes) -> dict[str, Any]:
    """Llama, Mistral (which llama.cpp calls llama) and Qwen 2: whatever the tensors show."""
    return {"rope": _rope(file, fields)}


def _qwen3(file: GGUFFile, fields: Fields, sizes: Sizes) -> dict[str, Any]:
    return {"rope": _rope(file, fields), "head_norms": True}


def _phi3(file: GGUFFile, fields: Fields, sizes: Sizes) -> dict[str, Any]:
    """Longrope's factors are tensors; up to the original length the short ones hold."""
    rotary_dim = fields.integer("rope.dimension_count", sizes.head_dim)
    window = fields.integer("attention.sliding_window", 0, minimum=0)
    count, attention_factor = sizes.context_length, 1.0
    if SHORT_FACTORS in file.tensors:
        count = min(count, fields.integer("rope.scaling.original_context_length"))
        attention_factor = fields.number("rope.scaling.attn_factor", 1.0, whole=False)
        kind = fields.text("rope.scaling.type", "longrope")
        if kind != "longrope":
            raise fields.fail("rope.scaling.type", f"'longrope' beside a tensor {SHORT_FACTORS}")
        theta = fields.number("rope.freq_base", 10000.0, whole=False)
        rope = Rope(theta, _divisors(file, SHORT_FACTORS), attention_factor)
    else:
        rope = _rope(file, fields)
    return {
        "rope": rope if rotary_dim == sizes.head_dim else replace(rope, rotary_dim=rotary_dim),
        "max_position_embeddings": count,
        "windows": (window,) * sizes.num_layers if window else (),
        "fused_projections": True,
    }


def _gemma2(file: GGUFFile, fields: Fields, sizes: Sizes) -> dict[str, Any]:
    window = fields.integer("attention.sliding_window", 4096)
    return {
        "rope": _rope(file, fields),
        "attention_soft_cap": fields.number("attn_logit_softcapping", 50.0, whole=False),
        "final_soft_cap": fields.number("final_logit_softcapping", 30.0, whole=False),
        **_gemma(sizes, window, pattern=2, layers_of_27b=46),
    }


def _gemma3(file: GGUFFile, fields: Fields, sizes: Sizes) -> dict[str, Any]:
    window = fields.integer("attention.sliding_window")
    pattern = fields.integer("attention.sliding_window_pattern", 6)
    options: dict[str, Any] = {
        "rope": _rope(file, fields),
        "window_rope": Rope(fields.number("rope.freq_base_swa", 10000.0, whole=False)),
        "head_norms": True,
        **_gemma(sizes, window, pattern, layers_of_27b=62),
    }
    if "final_logit_softcapping" in fields:
        options["final_soft_cap"] = fields.number("final_logit_softcapping", whole=False)
    return options


FAMILIES = {
    "llama": Family("LlamaForCausalLM", _plain, paired_rows=True),
    "qwen2": Family("Qwen2ForCausalLM", _plain),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3),
    "phi3": Family("Phi3ForCausalLM", _phi3),
    "gemma2": Family("Gemma2ForCausalLM", _gemma2),
    "gemma3": Family("Gemma3ForCausalLM", _gemma3),
}


def _gemma(sizes: Sizes, window: int, pattern: int, layers_of_27b: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share. Their files do not say `query_pre_attn_scalar`: it is the size of
    a head, but in the largest model of each, known by its number of layers.
    """
    divisor = sizes.head_dim
    if sizes.num_layers == layers_of_27b:
        divisor = sizes.hidden_size // sizes.num_heads
    return {
        "activation": "gelu_tanh",
        "windows": tuple(window if (i + 1) % pattern else 0 for i in range(sizes.num_layers)),
        "attention_divisor": float(divisor),
        "embedding_scale": float(sizes.hidden_size**0.5),
        "norm_offset": 1.0,
        "post_norms": True,
    }


def _rope(file: GGUFFile, fields: Fields) -> Rope:
    theta = fields.number("rope.freq_base", 10000.0, whole=False)
    kind = fields.text("rope.scaling.type", "none")
    factor = fields.number("rope.scaling.factor", 1.0, whole=False)
    original = fields.integer("rope.scaling.original_context_length", 1)
    fields.flag("rope.scaling.finetuned", False)  # a fact about training that changes no number
    if kind not in ("none", "linear", "yarn"):
        raise fields.fail("rope.scaling.type", "'none', 'linear' or 'yarn'")
    if ROPE_DIVISORS in file.tensors:
        if kind != "none":
            raise fields.fail("rope.scaling.type", f"'none' beside a tensor {ROPE_DIVISORS}")
        return Rope(theta, _divisors(file, ROPE_DIVISORS))
    if kind == "yarn":
        fields.integer("rope.scaling.original_context_length")
        return Rope(theta, _yarn(fields, factor, original), yarn_attention_factor(factor))
    return Rope(theta, Linear(factor) if kind == "linear" else None)


def _yarn(fields: Fields, factor: float, original: int) -> Yarn:
    scaling = Yarn(
        factor,
        original,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0, whole=False),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0, whole=False),
    )
    if scaling.beta_fast <= scaling.beta_slow:
        raise fields.fail("rope.scaling.yarn_beta_fast", "more than yarn_beta_slow")
    for key in ("yarn_ext_factor", "yarn_attn_factor", "attn_factor"):
        # Versions of llama.cpp differ in what they make of these.
        if fields.number(f"rope.scaling.{key}", 1.0, whole=False) != 1.0:
            raise fields.fail(f"rope.scaling.{key}", "1.0")
    return scaling


def _divisors(file: GGUFFile, name: str) -> Divisors:
    values = tuple(file.tensor(name).flatten().tolist())
    for value in values:
        if not 0 < value < math.inf:
            raise ModelError(f"{file.path}: tensor {name} holds {value}, expected numbers above 0")
    return Divisors(values)
