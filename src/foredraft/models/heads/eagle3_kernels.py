"""The EAGLE-3 head over a set of kernels: what drafts.

Knows packed weights and the order of operations, which `Eagle3` in torch is the reference of; knows
no request and no draft. A row is the pair (hidden state at p, token at p + 1) and lies in slot p.
Shapes: T rows of a flat pass, H hidden size, Ht the target's, V its vocabulary, D the draft's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foredraft.cache.tensors import CacheShape, KVCache
from foredraft.kernels.block import Block
from foredraft.kernels.interface import Segment
from foredraft.kernels.quantized import as_stored, check_quantization
from foredraft.models.decoder import activation_dtype
from foredraft.models.heads.belonging import check_kernels
from foredraft.models.heads.eagle3 import DraftLayer, Eagle3
from foredraft.models.load import LoadedModel


class KernelEagle3:
    """A head beside its target: its kernels, its dtype, its embedding where the head has none."""

    def __init__(self, head: Eagle3, target: LoadedModel, quantization: str | None = None) -> None:
        """Raises ModelError for attention heads that the target's kernels don't serve, ConfigError
        for an unknown `quantization`.
        """
        check_quantization(quantization)
        self._quantization = quantization
        config = self.config = head.config
        check_kernels("EAGLE-3", target, config.head_dim)
        self._target = target
        self._kernels = kernels = target.model.kernels
        self._wide = activation_dtype(target.dtype)
        self.weight_bytes = 0
        self.cache_shape = CacheShape(1, config.num_kv_heads, config.head_dim, target.cache_dtype)
        self._fc = self._pack(head.fc.weight)
        self._block = kernels.compile(self._layer(head.midlayer))
        self._head = self._pack(head.lm_head.weight)
        self._embedding = self._pack(head.embed_tokens.weight) if config.own_embedding else None
        self._last_norm = self._norm(head.norm.weight)
        # None: the draft's vocabulary is the target's.
        whole = config.draft_vocab_size == config.vocab_size
        self._draft_ids = None if whole else head.draft_ids.to(target.device)
        self.row_math = kernels.row_math

    def _layer(self, layer: DraftLayer) -> Block:
        """The decoder layer: the embedding stands beside the hidden state."""
        config, attention, network = self.config, layer.self_attn, layer.mlp
        cos, sin = config.rope.tables(
            config.head_dim, config.max_position_embeddings, self._wide, self._target.device
        )
        return Block(
            attention_norm=self._norm(layer.hidden_norm.weight),
            qkv=self._pack(
                attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight
            ),
            output=self._pack(attention.o_proj.weight),
            mlp_norm=self._norm(layer.post_attention_layernorm.weight),
            gate_up=self._pack(network.gate_proj.weight, network.up_proj.weight),
            down=self._pack(network.down_proj.weight),
            cos=cos,
            sin=sin,
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            beside_norm=self._norm(layer.input_layernorm.weight),
            norm_residual=config.norm_before_residual,
        )

    def _pack(self, *weights: Tensor) -> Any:
        """Weights of linears that read the same input, as one."""
        target = self._target
        weight = torch.cat([each.detach() for each in weights]).to(target.device, target.dtype)
        stored = as_stored(weight, self._quantization)
        self.weight_bytes += stored.nbytes
        return self._kernels.pack(stored)

    def _norm(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self._target.device, self._wide).contiguous()

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """`[T]` ids of the target -> `[T, H]`; the target's rows as they are stored, unscaled."""
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self._target.device)
        if self._embedding is not None:
            return self._kernels.embedding(ids, self._embedding)
        rows = self._target.model.embed(ids)
        scale = self._target.config.embedding_scale
        return rows if scale == 1.0 else rows / scale

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features `[T, 3 Ht]` -> `[T, H]`."""
        return self._kernels.linear(features, self._fc)

    def run(
        self,
        token_ids: Sequence[int],
        hidden: Tensor,
        segments: Sequence[Segment],
        cache: KVCache,
    ) -> Tensor:
        """One pass: `hidden [T, H]` of `fuse`, or of rows that this gave, to `[T, H]`; keys and
        values go to the segments' slots.
        """
        kernels = self._kernels
        plan = kernels.prepare(segments, cache.page_size)
        out = kernels.run_blocks(
            hidden, [self._block], cache.keys, cache.values, plan, self.embed(token_ids)
        )
        if self.config.norm_output:
            out = kernels.rms_norm(out, self._last_norm, self.config.rms_norm_eps)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows that `run` gave `[R, H]` -> `[R, V]`, -inf for what is never drafted."""
        if not self.config.norm_output:
            hidden = self._kernels.rms_norm(hidden, self._last_norm, self.config.rms_norm_eps)
        logits = self._kernels.linear(hidden, self._head)
        if self._draft_ids is None:
            return logits
        whole = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return whole.index_copy_(1, self._draft_ids, logits)
