"""Checkpoints of EAGLE-1 and EAGLE-2 heads as others write them, strictly.

Knows the keys and tensors of the authors' directories (yuhuili/EAGLE-*; `LlamaForCausalLM`, one
layer), which vLLM and SGLang read under names of their own. None is written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from foredraft.core.errors import ModelError
from foredraft.models.config import ModelConfig
from foredraft.models.fields import Fields
from foredraft.models.heads.belonging import check_target
from foredraft.models.heads.config import EagleConfig
from foredraft.models.heads.eagle import EMBEDDING, FUSED, VOCABULARY, Eagle, tensor_shapes
from foredraft.models.heads.files import HeadFiles, check_tensors
from foredraft.models.heads.layer_fields import read_layer
from foredraft.models.hf_config import refuse_unread

ARCHITECTURES = ("LlamaForCausalLM", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle")


def load_eagle(path: str | Path, target: ModelConfig | None = None) -> Eagle:
    """The head in a directory, in float32. With a `target` one of other sizes is refused; a
    checkpoint doesn't say more of whose head it is.

    Raises ModelError for a config that can't be honoured, for tensors that are missing, unknown or
    of another shape, and for a head of another target.
    """
    files = HeadFiles.open(path)
    with files.named():
        config = read_eagle_config(files.values, files.config_source, files.tensors)
        if target is not None:
            check_target(config.hidden_size, config.vocab_size, None, target, None)
    check_tensors(tensor_shapes(config), files.tensors, files.source)
    return Eagle(config, {name: each.to(torch.float32) for name, each in files.tensors.items()})


def read_eagle_config(
    values: Mapping[str, Any], source: str, tensors: Mapping[str, Any]
) -> EagleConfig:
    """The config of a parsed config.json; what it doesn't say the names of the tensors do.

    Raises ModelError for what can't be honoured.
    """
    fields = Fields(values, source)
    names = fields.value("architectures")
    if not (isinstance(names, list) and len(names) == 1 and names[0] in ARCHITECTURES):
        raise fields.fail("architectures", f"one of {', '.join(ARCHITECTURES)}, in a list")
    fused_bias = fields.flag("bias", f"{FUSED}.bias" in tensors)
    qkv_bias = fields.flag("qkv_bias", False)
    try:
        config = EagleConfig(
            **read_layer(fields),
            fc_bias=fused_bias,
            qkv_bias=qkv_bias,
            own_embedding=EMBEDDING in tensors,
            own_head=VOCABULARY in tensors,
        )
    except ModelError as error:
        raise error if str(error).startswith(source) else ModelError(f"{source}: {error}") from None
    refuse_unread(fields, "an EAGLE head")
    return config
