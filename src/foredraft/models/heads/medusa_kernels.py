"""Medusa's heads over a set of kernels: what drafts.

Knows packed weights and the order of operations, which `Medusa` in torch is the reference of; knows
no request and no draft.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foredraft.kernels.quantized import as_stored, check_quantization
from foredraft.models.heads.medusa import Medusa
from foredraft.models.load import LoadedModel


class KernelMedusa:
    """Heads beside their target: its kernels, its dtype, its vocabulary head where they share it.

    Of that the rows that can be drafted are kept once more.
    """

    def __init__(self, heads: Medusa, target: LoadedModel, quantization: str | None = None) -> None:
        """Raises ConfigError for an unknown `quantization`."""
        check_quantization(quantization)
        self._quantization = quantization
        config = self.config = heads.config
        self._target = target
        self._kernels = target.model.kernels
        self.row_math = self._kernels.row_math
        self.weight_bytes = 0
        ids = heads.draft_ids.to(target.device)
        self._draft_ids = None if config.draft_vocab_size is None else ids
        weights = dict(heads.named_parameters())
        self._blocks = [
            [
                self._pack(weights[f"{name}.weight"], weights.get(f"{name}.bias"))
                for name in (f"blocks.{i}.layers.{layer}" for layer in range(config.num_layers))
            ]
            for i in range(config.num_heads)
        ]
        if config.own_head:
            number = 1 if config.shared_head else config.num_heads
            self._heads = [self._pack(weights[f"lm_heads.{i}.weight"]) for i in range(number)]
        else:
            self._heads = [self._pack(target.model.head_rows(ids))]

    def _pack(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        target = self._target
        weight = weight.detach().to(target.device, target.dtype)
        stored = as_stored(weight, self._quantization)
        self.weight_bytes += stored.nbytes
        return self._kernels.pack(stored, None if bias is None else bias.detach())

    def logits(self, index: int, x: Tensor) -> Tensor:
        """The target's last hidden states `[R, H]`, behind its final norm -> `[R, V]` of one head,
        -inf for what is never drafted.
        """
        kernels = self._kernels
        for layer in self._blocks[index]:
            x = x + torch.nn.functional.silu(kernels.linear(x, layer))
        shared = len(self._heads) == 1
        logits = kernels.linear(x, self._heads[0 if shared else index])
        if self._draft_ids is None:
            return logits
        whole = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return whole.index_copy_(1, self._draft_ids, logits)
