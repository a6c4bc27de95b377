"""Medusa checkpoints as others write and read them.

Knows the keys and tensors of vLLM's (`MedusaModel`) and of the authors' (FasterDecoding, TGI).
vLLM's kind is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.core.errors import ModelError
from foredraft.models.config import ModelConfig
from foredraft.models.fields import Fields
from foredraft.models.heads.belonging import check_target
from foredraft.models.heads.config import MedusaConfig
from foredraft.models.heads.files import (
    OWN,
    HeadFiles,
    fill,
    integers,
    write_head,
)
from foredraft.models.heads.medusa import Medusa
from foredraft.models.heads.reduced import check_draft_ids
from foredraft.models.hf_config import refuse_unread

_MAP = "token_map"
_PREFIX = "medusa_heads."
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)", re.ASCII)  # the authors' names
_HEAD = re.compile(r"(\d+)\.(\d+)\.weight", re.ASCII)
_ALIASES = {"num_heads": "medusa_num_heads", "num_hidden_layers": "medusa_num_layers"}


def load_medusa(
    path: str | Path,
    target: ModelConfig | None = None,
    *,
    target_sha256: str | None = None,
    head: Tensor | None = None,
) -> Medusa:
    """The heads in a directory, in float32. With a `target` (and its `models.fingerprint`) those of
    another are refused, and what the config leaves out is the target's; `head [V, H]` is its
    vocabulary head, for heads without one of their own.

    Raises ModelError for a config that can't be honoured, for tensors that are missing, unknown or
    of another shape, and for heads of another target.
    """
    files = HeadFiles.open(path)
    with files.named():
        config, tensors = _read(files.values, files.config_source, files.tensors, target)
        if target is not None:
            facts = config.hidden_size, config.vocab_size, config.target_sha256
            check_target(*facts, target, target_sha256)
        ids = None
        if config.draft_vocab_size is not None:
            if _MAP not in tensors:
                raise ModelError(f"missing tensor {_MAP}, for the vocabulary is reduced")
            count = config.draft_vocab_size
            ids = integers(tensors.pop(_MAP), _MAP, (count,), files.source)
            order = ids.argsort()
            ids = ids[order]
            check_draft_ids(ids, count, config.vocab_size)
            tensors = _own_rows(tensors, order, ids, config.vocab_size)
        heads = Medusa(config, ids, head)
    fill(heads, tensors, files.source)
    return heads


def save_medusa(heads: Medusa, directory: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write heads as vLLM's kind of checkpoint. Where they read the target's vocabulary head, that
    is not written, and for vLLM has to be. Raises ModelError, OSError; see `write_head`.
    """
    config, tensors = heads.config, heads.state_dict()
    if config.shared_head and config.own_head:
        tensors["lm_head.weight"] = tensors.pop("lm_heads.0.weight")
    if config.draft_vocab_size is not None:
        tensors[_MAP] = heads.draft_ids
    write_head(Path(directory), medusa_config_to_json(config), tensors, dtype)


def _read(
    values: Mapping[str, Any],
    source: str,
    tensors: Mapping[str, Tensor],
    target: ModelConfig | None,
) -> tuple[MedusaConfig, dict[str, Tensor]]:
    """The config, and the tensors by this package's names."""
    fields = Fields(values, source)
    named = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    authors = any(_BLOCK.fullmatch(name) for name in named)
    own_head = authors or any(name.startswith("lm_head") for name in named)
    config = _config(fields, target, bias=authors, own_head=own_head)
    if authors:
        named = {_renamed(name, config): tensor for name, tensor in named.items()}
    if config.shared_head and "lm_head.weight" in named:
        named["lm_heads.0.weight"] = named.pop("lm_head.weight")
    refuse_unread(fields, "Medusa")
    return config, named


def _config(
    fields: Fields, target: ModelConfig | None, *, bias: bool, own_head: bool
) -> MedusaConfig:
    own = fields.value(OWN)
    if own is not None and not isinstance(own, dict):
        raise fields.fail(OWN, "an object")
    ours = Fields(own or {}, f"{fields.source}: {OWN}")
    counts = {}
    for key, alias in _ALIASES.items():
        other = fields.integer(alias) if alias in fields else None
        counts[key] = fields.integer(key, other)
    vocab_size = fields.integer("vocab_size", None if target is None else target.vocab_size)
    reduced = fields.integer("truncated_vocab_size", vocab_size)
    if fields.number("logit_scale", 1.0) != 1.0:
        raise fields.fail("logit_scale", "1")
    return MedusaConfig(
        hidden_size=fields.integer("hidden_size", None if target is None else target.hidden_size),
        vocab_size=vocab_size,
        num_heads=counts["num_heads"],
        num_layers=counts["num_hidden_layers"],
        bias=fields.flag("medusa_fc_bias", bias),
        draft_vocab_size=reduced if reduced != vocab_size else None,
        shared_head=fields.flag("original_lm_head", False),
        own_head=own_head,
        accuracies=_accuracies(ours),
        target_sha256=ours.text("target_sha256", "") or None,
    )


def _accuracies(fields: Fields) -> tuple[tuple[float, ...], ...]:
    values = fields.value("accuracies")
    if values is None:
        return ()
    valid = isinstance(values, list) and all(
        isinstance(ranks, list) and all(type(each) in (int, float) for each in ranks)
        for ranks in values
    )
    if not valid:
        raise fields.fail("accuracies", "a list of numbers for each head")
    return tuple(tuple(map(float, ranks)) for ranks in values)


def _renamed(name: str, config: MedusaConfig) -> str:
    """An authors' name as vLLM has it; one that is neither stays, to be refused."""
    block, head = _BLOCK.fullmatch(name), _HEAD.fullmatch(name)
    if block:
        return f"blocks.{block[1]}.layers.{block[2]}.{block[3]}"
    if head and int(head[2]) == config.num_layers:
        return f"lm_heads.{head[1]}.weight"
    return name


def _own_rows(
    tensors: Mapping[str, Tensor], order: Tensor, ids: Tensor, vocab_size: int
) -> dict[str, Tensor]:
    """Vocabulary heads with the rows that can be drafted, in the order of their ids: vLLM takes
    those, in any order, and whole heads too.
    """
    found = {}
    for name, tensor in tensors.items():
        if name.startswith("lm_head") and tensor.dim() == 2:
            if len(tensor) == vocab_size:
                tensor = tensor[ids]
            elif len(tensor) == len(order):
                tensor = tensor[order]
        found[name] = tensor
    return found


def medusa_config_to_json(config: MedusaConfig) -> dict[str, Any]:
    """The config.json of vLLM's kind, from which the same config is read again."""
    own: dict[str, Any] = {}
    if config.accuracies:
        own["accuracies"] = [list(ranks) for ranks in config.accuracies]
    if config.target_sha256 is not None:
        own["target_sha256"] = config.target_sha256
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": config.bias,
        "truncated_vocab_size": config.num_outputs,
        "original_lm_head": config.shared_head,
        **({OWN: own} if own else {}),
    }
