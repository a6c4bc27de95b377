"""A head of EAGLE-1 or EAGLE-2 drafts from the target's last hidden states (Li et al. 2401.15077).

Knows what differs from EAGLE-3: which head is loaded, and what of the target it reads. EAGLE-2 is
the same head with a tree chosen anew at each step: `draft_tree`.
"""

from __future__ import annotations

from typing import Any

from foredraft.core.errors import ConfigError
from foredraft.drafters.eagle import EagleDrafter
from foredraft.models.heads.belonging import check_target
from foredraft.models.heads.eagle import Eagle, KernelEagle
from foredraft.models.heads.eagle_checkpoint import load_eagle
from foredraft.models.interface import HEAD_INPUT
from foredraft.models.load import LoadedModel


class EarlierEagleDrafter(EagleDrafter):
    """Drafts as an `EagleDrafter` does, with a head published for EAGLE-1 or EAGLE-2."""

    def _open_head(
        self, model: Any, target: LoadedModel, quantization: str | None
    ) -> tuple[KernelEagle, tuple[int, ...]]:
        if model is None:
            raise ConfigError("method 'eagle' needs a model: the directory of a head")
        head = model if isinstance(model, Eagle) else load_eagle(model, target.config)
        config = head.config
        check_target(config.hidden_size, config.vocab_size, None, target.config, None)
        return KernelEagle(head, target, quantization), (HEAD_INPUT,)
