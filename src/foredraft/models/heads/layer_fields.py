"""The one decoder layer of a head, as a Llama's config.json describes it.

Knows the keys of that file; knows no head and no tensor.
"""

from __future__ import annotations

from typing import Any

from foredraft.models.fields import Fields
from foredraft.models.hf_config_rope import read_positions


def read_layer(fields: Fields) -> dict[str, Any]:
    """The layer's sizes and options, by the names that configs of heads give them.

    Raises ModelError for what can't be honoured.
    """
    _check_fixed(fields)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", max(1, hidden // heads))
    count = fields.integer("max_position_embeddings", 2048)
    positions = read_positions(fields, head_dim, count)
    return {
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "vocab_size": fields.integer("vocab_size"),
        "max_position_embeddings": positions.count,
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope": positions.rope,
    }


def _check_fixed(fields: Fields) -> None:
    """What a head's layer has no choice of here."""
    if fields.integer("num_hidden_layers", 1) != 1:
        raise fields.fail("num_hidden_layers", "1")
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.fail("hidden_act", "silu")
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        if fields.flag(key, False):
            raise fields.fail(key, "false")
    if not fields.flag("use_sliding_window", False):
        fields.value("max_window_layers")
    fields.integer("pretraining_tp", 1)  # another way to sum the same products
