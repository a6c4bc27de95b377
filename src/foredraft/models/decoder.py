"""One decoder for every family, over a set of kernels.

Knows a config, its packed weights and the order of operations; knows no request, no drafter and no
file. A pass is one flat batch: prompt chunks, pending tokens and draft nodes of all requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foredraft.cache.tensors import CacheShape, KVCache
from foredraft.kernels.block import Block, HeadNorms
from foredraft.kernels.interface import Kernels
from foredraft.kernels.quantized import as_stored
from foredraft.models.config import ModelConfig
from foredraft.models.first_layers import (
    FirstLayers,
    asked_rows,
    put_together,
    resume_layer,
    uncovered,
)
from foredraft.models.interface import HEAD_INPUT, FlatBatch, ModelOutput
from foredraft.models.rope import Rope
from foredraft.models.weights import (
    Reader,
    gate_up_parts,
    mlp_norm_part,
    qkv_parts,
    rotated_in_pairs,
)


def activation_dtype(weight_dtype: torch.dtype) -> torch.dtype:
    """float64 weights compute in float64; all others in float32."""
    return torch.float64 if weight_dtype == torch.float64 else torch.float32


def cache_shape(config: ModelConfig, dtype: torch.dtype) -> CacheShape:
    """What a model of this config keeps of each position, in `dtype`."""
    return CacheShape(config.num_layers, config.num_kv_heads, config.head_dim, dtype)


def new_cache(
    config: ModelConfig,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> KVCache:
    """A cache of `num_pages` pages for a model of this config."""
    return KVCache(cache_shape(config, dtype), num_pages, page_size, device)


class Decoder:
    """`Model` over any `Kernels`; `weights` maps Hugging Face's names to tensors.

    Weights are kept in `dtype` (float32, bfloat16; float64 with kernels that compute in it), norms
    and activations in `activation_dtype(dtype)`. Tensors are taken from `weights` layer by layer,
    so that a lazy mapping never has more than one layer widened. With a `quantization` linears and
    embedding are kept in that instead (`kernels.quantized`). Raises ModelError for tensors that are
    missing, unknown or of the wrong shape.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        kernels: Kernels,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        quantization: str | None = None,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.dtype = dtype
        self.device = torch.device(device)
        self._quantization = quantization
        self._num_saved = 0
        # Read wide, tensors that a file has in 8 bits come back as they are there.
        read = dtype if quantization is None else activation_dtype(dtype)
        reader = Reader(config, weights, read, self.device)
        embedding = reader.tensor("model.embed_tokens.weight")
        self._embedding = self._pack(embedding)
        if config.tie_word_embeddings:
            self._head = self._embedding
        else:
            self._head = self._pack(reader.tensor("lm_head.weight"))
        del embedding
        # As transformers does: rounded to the weights' dtype, in which such models were trained.
        self._embedding_scale = float(torch.tensor(config.embedding_scale).to(dtype))
        tables = self._rope_tables()
        self._blocks = [
            kernels.compile(self._block(reader, i, tables[config.layer_rope(i)]))
            for i in range(config.num_layers)
        ]
        self._norm = reader.norm("model.norm")
        self.weight_bytes = reader.num_bytes - self._num_saved

    def _pack(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        stored = as_stored(weight, self._quantization)
        self._num_saved += weight.nbytes - stored.nbytes
        return self.kernels.pack(stored, bias)

    def _rope_tables(self) -> dict[Rope, tuple[Tensor, Tensor]]:
        config = self.config
        dtype = activation_dtype(self.dtype)
        return {
            rope: rope.tables(config.head_dim, config.max_position_embeddings, dtype, self.device)
            for rope in {config.layer_rope(i) for i in range(config.num_layers)}
        }

    def _block(self, reader: Reader, index: int, tables: tuple[Tensor, Tensor]) -> Block:
        config, pack = self.config, self._pack
        name = f"model.layers.{index}"
        attention, post = f"{name}.self_attn", config.post_norms

        def fused(parts: Sequence[str], bias: bool) -> tuple[Tensor, Tensor | None]:
            return reader.fused([f"{name}.{part}" for part in parts], bias)

        return Block(
            attention_norm=reader.norm(f"{name}.input_layernorm"),
            qkv=pack(*rotated_in_pairs(config, *fused(qkv_parts(config), config.qkv_bias))),
            output=pack(*fused(["self_attn.o_proj"], config.output_bias)),
            mlp_norm=reader.norm(f"{name}.{mlp_norm_part(config)}"),
            gate_up=pack(*fused(gate_up_parts(config), config.mlp_bias)),
            down=pack(*fused(["mlp.down_proj"], config.mlp_bias)),
            cos=tables[0],
            sin=tables[1],
            eps=config.rms_norm_eps,
            scale=config.attention_scale,
            window=config.window(index),
            soft_cap=config.attention_soft_cap,
            activation=config.activation,
            head_norms=_head_norms(reader, attention, config) if config.head_norms else None,
            attention_post_norm=reader.norm(f"{name}.post_attention_layernorm") if post else None,
            mlp_post_norm=reader.norm(f"{name}.post_feedforward_layernorm") if post else None,
        )

    def run(self, batch: FlatBatch, cache: KVCache) -> ModelOutput:
        """One pass over all rows; logits of the asked rows only. See `Model.run`.

        Raises ValueError for depths that the model hasn't, or that resumed rows have passed.
        """
        done, hidden = self._begin(batch, cache)
        plan = self.kernels.prepare(batch.segments, cache.page_size)
        if not batch.feature_layers:
            hidden = self.layers(done, self.config.num_layers, hidden, plan, cache)
            return self.head(asked_rows(hidden, batch.logit_rows))
        hidden, features = self._with_features(done, hidden, plan, cache, batch.feature_layers)
        return replace(self.head(asked_rows(hidden, batch.logit_rows)), features=features)

    def _with_features(
        self, done: int, hidden: Tensor, plan: Any, cache: KVCache, depths: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """All layers from `done` on, and what the rows are at `depths` beside each other."""
        last = self.config.num_layers
        wrong = [d for d in depths if d != HEAD_INPUT and not done <= d <= last]
        if wrong:
            raise ValueError(f"features at depth {wrong[0]} of a pass through {done}..{last}")
        at: dict[int, Tensor] = {}
        for depth in sorted({last, *depths} - {HEAD_INPUT}):
            if depth > done:
                hidden = self.layers(done, depth, hidden, plan, cache)
            at[depth], done = hidden, depth
        if HEAD_INPUT in depths:
            at[HEAD_INPUT] = self.kernels.rms_norm(hidden, self._norm, self.config.rms_norm_eps)
        parts = [at[depth] for depth in depths]
        return hidden, parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _begin(self, batch: FlatBatch, cache: KVCache) -> tuple[int, Tensor]:
        """Layers that all rows are through, and their hidden states `[T, H]`."""
        if not batch.resumes:
            return 0, self.embed(batch.token_ids)
        layer = resume_layer(batch.resumes)
        rest = uncovered(batch)
        hidden = next(iter(batch.resumes.values())).hidden[:0]
        if rest.rows:
            hidden = FirstLayers(self, layer).hidden(rest.batch, cache)
        return layer, put_together(batch, rest, hidden)

    def embed(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        """`[T]` ids -> `[T, H]`."""
        if not isinstance(token_ids, Tensor):
            token_ids = torch.tensor(token_ids, dtype=torch.int64, device=self.device)
        rows = self.kernels.embedding(token_ids, self._embedding)
        return rows if self._embedding_scale == 1.0 else rows * self._embedding_scale

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """Rows `[T, H]` of the vocabulary head, of `[T]` int64 ids."""
        return self.kernels.embedding(token_ids, self._head)

    def layers(self, lo: int, hi: int, hidden: Tensor, plan: Any, cache: KVCache) -> Tensor:
        """Layers `lo .. hi - 1` over `hidden [T, H]`; see `Model.layers`."""
        return self.kernels.run_blocks(
            hidden, self._blocks[lo:hi], cache.keys[lo:hi], cache.values[lo:hi], plan
        )

    def head(self, hidden: Tensor) -> ModelOutput:
        """Final norm and logits of `hidden [R, H]`."""
        normed = self.kernels.rms_norm(hidden, self._norm, self.config.rms_norm_eps)
        logits = self.kernels.linear(normed, self._head)
        if self.config.final_soft_cap:
            logits = self.kernels.soft_cap(logits, self.config.final_soft_cap)
        return ModelOutput(logits, normed)


def _head_norms(reader: Reader, attention: str, config: ModelConfig) -> HeadNorms:
    return HeadNorms(
        reader.norm(f"{attention}.q_norm"), reader.norm(f"{attention}.k_norm"), config.rms_norm_eps
    )
