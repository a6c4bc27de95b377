"""The rotary positions a config.json describes, in the keys of every version of transformers.

Knows keys and their defaults; the arithmetic is `models.rope`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from foredraft.core.errors import ModelError
from foredraft.models.fields import MAX_INTEGER, Fields
from foredraft.models.rope import (
    Divisors,
    Linear,
    Llama3,
    Rope,
    Yarn,
    yarn_attention_factor,
)

_KINDS = "'default', 'linear', 'llama3', 'yarn', 'longrope' or 'dynamic'"


@dataclass(frozen=True, slots=True)
class Positions:
    """How positions are rotated, and how many of them the model serves."""

    rope: Rope
    count: int


def read_positions(fields: Fields, head_dim: int, count: int, partial: bool = False) -> Positions:
    """Of a model whose layers all rotate alike; `count` is its `max_position_embeddings`.

    `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before it). `partial`
    allows `partial_rotary_factor`, the share of a head that is rotated. Raises ModelError for a
    scaling or a key that is unknown.
    """
    theta = fields.number("rope_theta", 10000.0)
    share = fields.number("partial_rotary_factor", 1.0) if partial else 1.0
    key = "rope_scaling"
    if fields.value("rope_parameters") is not None:
        if fields.value(key) is not None:
            raise ModelError(f"{fields.source}: rope_parameters and rope_scaling are both given")
        key = "rope_parameters"
    raw = _object(fields, key)
    share = raw.number("partial_rotary_factor", share)
    if share > 1.0 or (share < 1.0 and not partial):
        raise raw.fail("partial_rotary_factor", "a number up to 1" if partial else "1")
    positions = _positions(fields, raw, theta, count)
    if share == 1.0:
        return positions
    return replace(positions, rope=replace(positions.rope, rotary_dim=int(head_dim * share)))


def read_positions_by_layer_type(fields: Fields, count: int) -> tuple[Positions, Rope]:
    """Of a Gemma 3: those of full attention, and the rotation of its layers with a window.

    `rope_parameters` by layer type (transformers 5), or `rope_theta` with `rope_scaling` for full
    attention and `rope_local_base_freq` for the others (before it).
    """
    theta = fields.number("rope_theta", 1000000.0)
    local_theta = fields.number("rope_local_base_freq", 10000.0)
    if fields.value("rope_parameters") is None:
        raw = _object(fields, "rope_scaling")
        return _positions(fields, raw, theta, count), Rope(local_theta)
    by_type = _object(fields, "rope_parameters")
    full = _positions(fields, _object(by_type, "full_attention"), theta, count)
    local = _positions(fields, _object(by_type, "sliding_attention"), local_theta, count)
    _refuse_unread(by_type)
    return Positions(full.rope, min(full.count, local.count)), local.rope


def _object(fields: Fields, key: str) -> Fields:
    """The object under `key`, empty where there is none."""
    value = fields.value(key)
    if value is not None and not isinstance(value, dict):
        raise fields.fail(key, "an object")
    return Fields(value or {}, f"{fields.source}: {key}")


def _positions(fields: Fields, raw: Fields, theta: float, count: int) -> Positions:
    """What the object `raw` in the config `fields` describes."""
    theta = raw.number("rope_theta", theta)
    kind = raw.text("rope_type", raw.text("type", "default"))
    scaling: Linear | Llama3 | Yarn | Divisors | None = None
    attention_factor = 1.0
    if kind == "linear":
        scaling = Linear(raw.number("factor"))
    elif kind == "dynamic":
        # Equals no scaling up to the original length, which is `max_position_embeddings`. No
        # position beyond is served: there its keys would depend on the length seen so far.
        raw.number("factor", 1.0)
        raw.value("original_max_position_embeddings")
    elif kind == "llama3":
        scaling = _llama3(raw)
    elif kind == "yarn":
        scaling, attention_factor = _yarn(raw, count)
        if scaling.original_max_positions == count:  # the file leaves the new length to yarn
            count = int(min(count * max(scaling.factor, 1.0), MAX_INTEGER))
    elif kind in ("longrope", "su"):
        # Beyond the original length the long factors hold for all positions at once, so that keys
        # would depend on the length seen so far: served up to it, with the short factors.
        original = _longrope_original(fields, raw)
        scaling, attention_factor = _longrope(raw, original, count)
        count = min(count, original)
    elif kind != "default":
        raise raw.fail("rope_type", _KINDS)
    _refuse_unread(raw)
    return Positions(Rope(theta, scaling, attention_factor), count)


def _llama3(raw: Fields) -> Llama3:
    scaling = Llama3(
        factor=raw.number("factor"),
        low_freq_factor=raw.number("low_freq_factor"),
        high_freq_factor=raw.number("high_freq_factor"),
        original_max_positions=raw.integer("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise raw.fail("high_freq_factor", "more than low_freq_factor")
    return scaling


def _yarn(raw: Fields, count: int) -> tuple[Yarn, float]:
    """The scaling, and what multiplies cosines and sines."""
    original = raw.integer("original_max_position_embeddings", count)
    scaling = Yarn(
        factor=raw.number("factor"),
        original_max_positions=original,
        beta_fast=raw.number("beta_fast", 32.0),
        beta_slow=raw.number("beta_slow", 1.0),
        truncate=raw.flag("truncate", True),
    )
    if scaling.beta_fast <= scaling.beta_slow:
        raise raw.fail("beta_fast", "more than beta_slow")
    attention_factor = yarn_attention_factor(scaling.factor)
    weights = [raw.number(key, 1.0) for key in ("mscale", "mscale_all_dim") if key in raw]
    if len(weights) == 2:  # one alone says nothing
        above, below = (yarn_attention_factor(scaling.factor, weight) for weight in weights)
        attention_factor = above / below
    return scaling, raw.number("attention_factor", attention_factor)


def _longrope_original(fields: Fields, raw: Fields) -> int:
    """The original length, from beside the object or, in newer files, from both places."""
    key = "original_max_position_embeddings"
    original = fields.integer(key, raw.integer(key, 0, minimum=0), minimum=0)
    if not original:
        raise ModelError(f"{raw.source}: {key} is missing")
    if raw.integer(key, original) != original:
        raise raw.fail(key, f"{original}, as beside it")
    return original


def _longrope(raw: Fields, original: int, count: int) -> tuple[Divisors, float]:
    """The short factors, and what multiplies cosines and sines (Ding et al. 2024)."""
    raw.value("long_factor")
    factor = raw.number("factor", count / original)
    attention_factor = 1.0
    if factor > 1.0:
        if original < 2:
            raise raw.fail("original_max_position_embeddings", "2 or more")
        attention_factor = math.sqrt(1.0 + math.log(factor) / math.log(original))
    return (
        Divisors(raw.numbers("short_factor")),
        raw.number("attention_factor", attention_factor),
    )


def _refuse_unread(fields: Fields) -> None:
    if fields.unread():
        raise ModelError(f"{fields.source}: unknown keys {', '.join(fields.unread())}")
