"""EAGLE-3 checkpoints as others write and read them.

Knows the keys and tensors of two kinds of directory: plain ones (`LlamaForCausalLMEagle3`, of the
EAGLE authors and SpecForge, read by vLLM and SGLang) and those of vLLM's speculators library
(`Eagle3Speculator`). Plain ones are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.core.errors import ModelError
from foredraft.models.config import ModelConfig
from foredraft.models.fields import Fields
from foredraft.models.heads.belonging import check_target
from foredraft.models.heads.config import Eagle3Config
from foredraft.models.heads.eagle3 import Eagle3
from foredraft.models.heads.files import (
    OWN,
    HeadFiles,
    fill,
    integers,
    write_head,
)
from foredraft.models.heads.layer_fields import read_layer
from foredraft.models.heads.reduced import check_draft_ids
from foredraft.models.hf_config import refuse_unread
from foredraft.models.hf_writer import positions_to_json

PLAIN, SPECULATORS = "LlamaForCausalLMEagle3", "Eagle3Speculator"
_EMBEDDING = "embed_tokens.weight"
_LAYER, _SPECULATORS_LAYER = "midlayer.", "layers.0."
_MAP, _SET = "d2t", "t2d"
_LAYERS = "eagle_aux_hidden_state_layer_ids"


def load_eagle3(
    path: str | Path,
    target: ModelConfig | None = None,
    *,
    target_sha256: str | None = None,
    embedding: Tensor | None = None,
) -> Eagle3:
    """The head in a directory, in float32. With a `target` (and its `models.fingerprint`) one of
    another is refused; `embedding [V, H]` is the target's, for heads without one of their own.

    Raises ModelError for a config that can't be honoured, for tensors that are missing, unknown or
    of another shape, and for a head of another target.
    """
    files = HeadFiles.open(path)
    tensors = {
        name.replace(_SPECULATORS_LAYER, _LAYER): each for name, each in files.tensors.items()
    }
    with files.named():
        config = read_eagle3_config(files.values, files.config_source, _EMBEDDING in tensors)
        if target is not None:
            check_target(
                config.target_hidden_size,
                config.vocab_size,
                config.target_sha256,
                target,
                target_sha256,
            )
            config.layers_of(target)
        head = Eagle3(config, _draft_ids(tensors, config, files.source), embedding)
    stored = {name: each for name, each in tensors.items() if name not in (_MAP, _SET)}
    fill(head, stored, files.source)
    return head


def save_eagle3(head: Eagle3, directory: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a head as a plain checkpoint. Raises ModelError, OSError; see `write_head`."""
    write_head(Path(directory), eagle3_config_to_json(head.config), eagle3_tensors(head), dtype)


def eagle3_tensors(head: Eagle3) -> dict[str, Tensor]:
    """What a plain checkpoint holds. Where every token can be drafted the two tensors that say
    which are left out: vLLM refuses them there.
    """
    config, tensors = head.config, head.state_dict()
    if config.draft_vocab_size == config.vocab_size:
        del tensors[_MAP], tensors[_SET]
    return tensors


def read_eagle3_config(values: Mapping[str, Any], source: str, own_embedding: bool) -> Eagle3Config:
    """The config of a parsed config.json; whether there is an embedding its tensors say.

    Raises ModelError for what can't be honoured.
    """
    fields = Fields(values, source)
    names = fields.value("architectures")
    if names == [PLAIN]:
        return _config(fields, fields, own_embedding, norm_before_residual=False)
    if names == [SPECULATORS]:
        layer = fields.value("transformer_layer_config")
        if not isinstance(layer, dict):
            raise fields.fail("transformer_layer_config", "an object")
        nested = Fields(layer, f"{source}: transformer_layer_config")
        # What vLLM takes where the key is missing.
        config = _config(fields, nested, own_embedding, norm_before_residual=True)
        refuse_unread(nested, SPECULATORS)
        return config
    raise fields.fail("architectures", f'["{PLAIN}"] or ["{SPECULATORS}"]')


def _config(
    fields: Fields, layer: Fields, own_embedding: bool, *, norm_before_residual: bool
) -> Eagle3Config:
    """`layer` holds the keys of a Llama's config, `fields` those of the head."""
    of_layer = read_layer(layer)
    target, own = _nested(fields, "eagle_config"), _nested(fields, OWN)
    if not target.flag("use_aux_hidden_state", True):
        raise target.fail("use_aux_hidden_state", "true")
    config = Eagle3Config(
        **of_layer,
        draft_vocab_size=fields.integer("draft_vocab_size", of_layer["vocab_size"]),
        target_hidden_size=fields.integer("target_hidden_size", of_layer["hidden_size"]),
        feature_layers=_feature_layers(fields, target),
        norm_before_residual=fields.flag("norm_before_residual", norm_before_residual),
        norm_output=fields.flag("norm_output", False),
        own_embedding=own_embedding,
        target_sha256=own.text("target_sha256", "") or None,
    )
    fields.value("embed_requires_grad")
    refuse_unread(fields, "an EAGLE-3 head")
    refuse_unread(target, "an EAGLE-3 head")
    return config


def _nested(fields: Fields, key: str) -> Fields:
    value = fields.value(key)
    if value is not None and not isinstance(value, dict):
        raise fields.fail(key, "an object")
    return Fields(value or {}, f"{fields.source}: {key}")


def _feature_layers(*places: Fields) -> tuple[int, ...] | None:
    """As said in one of the places, or alike in several."""
    found = None
    for fields in places:
        values = fields.value(_LAYERS)
        if values is None:
            continue
        if not isinstance(values, list) or not all(type(each) is int for each in values):
            raise fields.fail(_LAYERS, "a list of layers")
        if found not in (None, tuple(values)):
            raise fields.fail(_LAYERS, f"{list(found or ())} as elsewhere in the file")
        found = tuple(values)
    return found


def _draft_ids(tensors: Mapping[str, Tensor], config: Eagle3Config, source: str) -> Tensor:
    """The target's ids that can be drafted. The two tensors that say so have to agree."""
    count, vocab_size = config.draft_vocab_size, config.vocab_size
    ids = torch.arange(count)
    if _MAP in tensors:
        ids = ids + integers(tensors[_MAP], _MAP, (count,), source)
        check_draft_ids(ids, count, vocab_size)
    elif count != vocab_size:
        raise ModelError(f"missing tensor {_MAP}, for {count} of {vocab_size} tokens are drafted")
    if _SET in tensors:
        present = tensors[_SET].to(torch.bool)
        if tuple(present.shape) != (vocab_size,):
            raise ModelError(f"tensor {_SET} is {list(present.shape)}, expected [{vocab_size}]")
        if not torch.equal(present.nonzero().flatten(), ids):
            raise ModelError(f"tensors {_MAP} and {_SET} name other tokens")
    return ids


def eagle3_config_to_json(config: Eagle3Config) -> dict[str, Any]:
    """The config.json of a plain checkpoint, from which the same config is read again."""
    layers = config.feature_layers
    return {
        "architectures": [PLAIN],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        **positions_to_json(config.rope, config.max_position_embeddings, config.head_dim),
        **({} if layers is None else {_LAYERS: list(layers)}),
        "eagle_config": {
            "use_aux_hidden_state": True,
            **({} if layers is None else {_LAYERS: list(layers)}),
        },
        **({} if config.target_sha256 is None else {OWN: {"target_sha256": config.target_sha256}}),
    }
