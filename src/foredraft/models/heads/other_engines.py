"""Heads as other engines load them: vLLM, SGLang, or complete in themselves for anything else.

Knows what each engine reads of a checkpoint, and takes silently for something else; knows no
drafter. Read from vLLM (medusa.py, llama_eagle3.py) and SGLang (llama_eagle3.py, llama.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.core.errors import ModelError
from foredraft.models.config import ModelConfig
from foredraft.models.fingerprint import fingerprint
from foredraft.models.heads.config import MedusaConfig
from foredraft.models.heads.eagle3_checkpoint import (
    eagle3_config_to_json,
    eagle3_tensors,
    load_eagle3,
)
from foredraft.models.heads.files import head_directory, write_head
from foredraft.models.heads.medusa_checkpoint import load_medusa, save_medusa
from foredraft.models.hf_config import read_json
from foredraft.models.load import LoadedModel

VLLM, SGLANG, HF = "vllm", "sglang", "hf"
ENGINES = (VLLM, SGLANG, HF)
DEFAULT_DRAFT_LENGTH = 4
_EMBEDDING = "embed_tokens.weight"
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_MEDUSA_KEYS = ("num_heads", "medusa_num_heads")
# vLLM (0.32) doesn't count `token_map` among what it has read, and takes it for missing.
_UNTRACKED = ("--model-loader-extra-config", '{"enable_weights_track": false}')


@dataclass(frozen=True, slots=True)
class ExportedHead:
    """What was written, and how the engine is told of it."""

    directory: Path
    engine: str
    method: str  # "eagle3" or "medusa"
    num_bytes: int  # of all files
    speculative_config: Mapping[str, Any]  # of vLLM, and of this package
    arguments: tuple[str, ...]  # of the engine's command, beside that config


def export_head(
    source: str | Path,
    directory: str | Path,
    engine: str,
    target: LoadedModel,
    num_speculative_tokens: int | None = None,
) -> ExportedHead:
    """Write the head in `source`, which is of `target`, for an engine of `ENGINES`.

    Args:
        num_speculative_tokens: for the config; None: 4, of Medusa as many as there are heads.

    Raises:
        ModelError: for an unknown engine, a head that can't be loaded, is of another target or has
            what the engine would not honour, and a directory that is not free.
        OSError: the directory can't be written.
    """
    if engine not in ENGINES:
        raise ModelError(f"unknown engine {engine!r}; valid are {', '.join(ENGINES)}")
    path, place = head_directory(source), Path(directory)
    values = read_json(path / "config.json")
    arguments: tuple[str, ...] = ()
    if any(key in values for key in _MEDUSA_KEYS):
        method = "medusa"
        heads = _export_medusa(path, place, engine, target)
        length = num_speculative_tokens or heads.num_heads
        if length > heads.num_heads:
            raise ModelError(f"{length} drafts were asked for; {path} has {heads.num_heads} heads")
        if engine == VLLM and heads.draft_vocab_size is not None:
            arguments = _UNTRACKED
    else:
        method, length = "eagle3", num_speculative_tokens or DEFAULT_DRAFT_LENGTH
        _export_eagle3(path, place, engine, target)
    config = {"method": method, "model": str(place), "num_speculative_tokens": length}
    if engine == SGLANG:
        arguments = _of_sglang(config)
    num_bytes = sum(file.stat().st_size for file in place.iterdir())
    return ExportedHead(place, engine, method, num_bytes, config, arguments)


def _export_eagle3(path: Path, place: Path, engine: str, target: LoadedModel) -> None:
    head = load_eagle3(path, target.config, target_sha256=_sha256(target))
    config = head.config
    if engine != HF and config.norm_output:
        raise ModelError(f"{path}: norm_output is not read by {engine} from such a checkpoint")
    if engine == SGLANG and config.norm_before_residual:
        raise ModelError(f"{path}: norm_before_residual is not read by {engine}")
    layers = config.layers_of(target.config)
    if engine != HF and not layers[0] < layers[1] < layers[2]:
        raise ModelError(
            f"{path}: it reads the depths {', '.join(map(str, layers))} of a target of "
            f"{target.config.num_layers} layers; {engine} tells each depth once, lowest first"
        )
    values = eagle3_config_to_json(replace(config, feature_layers=layers))
    if engine == SGLANG:
        values = _as_sglang_counts(values, layers, target.config)
    tensors = eagle3_tensors(head)
    if engine == HF and _EMBEDDING not in tensors:
        tensors[_EMBEDDING] = _all_rows(target, target.model.embed)
    write_head(place, values | {"torch_dtype": "bfloat16"}, tensors, torch.bfloat16)


def _as_sglang_counts(
    values: Mapping[str, Any], layers: tuple[int, ...], target: ModelConfig
) -> dict[str, Any]:
    """SGLang takes a layer's id for what leaves it, and one of the three that EAGLE chooses, which
    it takes where none are told, for what enters it.
    """
    count = target.num_layers
    told = {key: value for key, value in values.items() if key != _LAYERS}
    eagle = {key: value for key, value in values["eagle_config"].items() if key != _LAYERS}
    if layers != (2, count // 2, count - 3):
        if layers[0] == 0:
            raise ModelError("SGLang can't tell a head the embedding, which this one reads")
        eagle[_LAYERS] = [layer - 1 for layer in layers]
    return told | {"eagle_config": eagle}


def _export_medusa(path: Path, place: Path, engine: str, target: LoadedModel) -> MedusaConfig:
    """What reads the target's vocabulary head gets a copy: vLLM shares one among heads, but not
    with the target.
    """
    if engine == SGLANG:
        raise ModelError(f"{path}: SGLang runs no Medusa heads")
    rows = _all_rows(target, target.model.head_rows)
    heads = load_medusa(path, target.config, target_sha256=_sha256(target), head=rows)
    config = heads.config
    if engine == VLLM and config.draft_vocab_size is not None and not config.shared_head:
        raise ModelError(
            f"{path}: each head has a reduced vocabulary head of its own; vllm reads a reduced "
            "one only where all heads share it"
        )
    if not config.own_head:
        own = replace(config, own_head=True)
        filled = type(heads)(own, heads.draft_ids, rows)
        filled.blocks.load_state_dict(heads.blocks.state_dict())
        heads = filled
    save_medusa(heads, place)
    return config


def _all_rows(target: LoadedModel, read: Any) -> Tensor:
    """`[V, H]` of an embedding or a head that is read by ids."""
    ids = torch.arange(target.config.vocab_size, device=target.device)
    rows: Tensor = read(ids)
    return rows.to("cpu", torch.float32)


def _sha256(target: LoadedModel) -> str | None:
    return fingerprint(target.path) if target.path.exists() else None


def _of_sglang(config: Mapping[str, Any]) -> tuple[str, ...]:
    length = int(config["num_speculative_tokens"])
    return (
        "--speculative-algorithm",
        "EAGLE3",
        "--speculative-draft-model-path",
        str(config["model"]),
        "--speculative-num-steps",
        str(length),
        "--speculative-eagle-topk",
        "1",
        "--speculative-num-draft-tokens",
        str(length + 1),
    )
