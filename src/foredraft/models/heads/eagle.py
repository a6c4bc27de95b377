"""The head of EAGLE-1 (Li et al. 2401.15077), whose trees EAGLE-2 chooses anew (2406.16858), over a
set of kernels.

Knows packed weights and the order of operations; knows no file, no request and no draft. A row is
the pair (feature at p, token at p + 1) and lies in slot p; a feature is the target's last hidden
state behind its final norm, or what the head gave in its place.
Shapes: T rows of a flat pass, H hidden size, F inner size of the gated network, V vocabulary.

Formulas: z = fc [embedding ; feature]; a = z + attention(z), of z as it is, without a norm before;
f = a + gated(norm(a)); the logits are the vocabulary head's of f, without a norm between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.cache.tensors import CacheShape, KVCache
from foredraft.kernels.interface import Segment
from foredraft.kernels.quantized import as_stored, check_quantization
from foredraft.models.decoder import activation_dtype
from foredraft.models.heads.belonging import check_kernels
from foredraft.models.heads.config import EagleConfig
from foredraft.models.load import LoadedModel

FUSED = "fc"
LAYER = "layers.0"
EMBEDDING, VOCABULARY = "embed_tokens.weight", "lm_head.weight"
_QKV = tuple(f"{LAYER}.self_attn.{each}_proj" for each in "qkv")
_OUTPUT = f"{LAYER}.self_attn.o_proj"
_GATE, _UP, _DOWN = (f"{LAYER}.mlp.{each}_proj" for each in ("gate", "up", "down"))
_NORM = f"{LAYER}.post_attention_layernorm"


@dataclass(frozen=True, slots=True)
class Eagle:
    """A head as its checkpoint holds it: `tensors` are those of `tensor_shapes(config)`."""

    config: EagleConfig
    tensors: Mapping[str, Tensor]


def tensor_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's tensors."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    rows = dict(zip(_QKV, (queries, keys, keys), strict=True))
    shapes: dict[str, tuple[int, ...]] = {
        f"{FUSED}.weight": (hidden, 2 * hidden),
        **{f"{name}.weight": (count, hidden) for name, count in rows.items()},
        f"{_OUTPUT}.weight": (hidden, queries),
        f"{_GATE}.weight": (inner, hidden),
        f"{_UP}.weight": (inner, hidden),
        f"{_DOWN}.weight": (hidden, inner),
        f"{_NORM}.weight": (hidden,),
    }
    if config.fc_bias:
        shapes[f"{FUSED}.bias"] = (hidden,)
    if config.qkv_bias:
        shapes |= {f"{name}.bias": (count,) for name, count in rows.items()}
    for name, own in ((EMBEDDING, config.own_embedding), (VOCABULARY, config.own_head)):
        if own:
            shapes[name] = (config.vocab_size, hidden)
    return shapes


class KernelEagle:
    """A head beside its target: its kernels, its dtype, its embedding and its vocabulary head where
    the head has none. Of the vocabulary head a copy is kept.
    """

    def __init__(self, head: Eagle, target: LoadedModel, quantization: str | None = None) -> None:
        """Raises ModelError for attention heads that the target's kernels don't serve, ConfigError
        for an unknown `quantization`.
        """
        check_quantization(quantization)
        self._quantization = quantization
        config = self.config = head.config
        check_kernels("EAGLE", target, config.head_dim)
        self._target, self._tensors = target, head.tensors
        self._kernels = kernels = target.model.kernels
        self._wide = activation_dtype(target.dtype)
        self.row_math = kernels.row_math
        self.weight_bytes = 0
        self.cache_shape = CacheShape(1, config.num_kv_heads, config.head_dim, target.cache_dtype)
        self._fc = self._linear(FUSED)
        self._qkv, self._output = self._linear(*_QKV), self._linear(_OUTPUT)
        self._gate_up, self._down = self._linear(_GATE, _UP), self._linear(_DOWN)
        norm = head.tensors[f"{_NORM}.weight"]
        self._norm = norm.to(target.device, self._wide).contiguous()
        self._tables = config.rope.tables(
            config.head_dim, config.max_position_embeddings, self._wide, target.device
        )
        self._embedding = self._pack(head.tensors[EMBEDDING]) if config.own_embedding else None
        ids = torch.arange(config.vocab_size, device=target.device)
        own = head.tensors.get(VOCABULARY)
        self._head = self._pack(target.model.head_rows(ids) if own is None else own)

    def _linear(self, *names: str) -> Any:
        """Linears that read the same input, as one."""
        tensors = self._tensors
        weight = torch.cat([tensors[f"{name}.weight"] for name in names])
        if f"{names[0]}.bias" not in tensors:
            return self._pack(weight)
        bias = torch.cat([tensors[f"{name}.bias"] for name in names])
        return self._pack(weight, bias.to(self._target.device, self._wide))

    def _pack(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        weight = weight.to(self._target.device, self._target.dtype)
        stored = as_stored(weight, self._quantization)
        self.weight_bytes += stored.nbytes
        return self._kernels.pack(stored, bias)

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """`[T]` ids of the target -> `[T, H]`."""
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self._target.device)
        if self._embedding is None:
            return self._target.model.embed(ids)
        return self._kernels.embedding(ids, self._embedding)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features `[T, H]`, as they are: they are read beside the token."""
        return features

    def run(
        self,
        token_ids: Sequence[int],
        hidden: Tensor,
        segments: Sequence[Segment],
        cache: KVCache,
    ) -> Tensor:
        """One pass: features `[T, H]`, or rows that this gave, to `[T, H]`; keys and values go to
        the segments' slots.
        """
        config, kernels = self.config, self._kernels
        keys, values = cache.keys[0], cache.values[0]
        plan = kernels.prepare(segments, cache.page_size)
        both = torch.cat([self.embed(token_ids), hidden], dim=1)
        fused = kernels.linear(both, self._fc)
        qkv = kernels.linear(fused, self._qkv)
        queries = kernels.rope_and_store(qkv, *self._tables, keys, values, plan, None)
        attended = kernels.attention(queries, keys, values, plan, config.head_dim**-0.5, 0, 0.0)
        out = kernels.linear(attended, self._output, fused)
        normed = kernels.rms_norm(out, self._norm, config.rms_norm_eps)
        inner = kernels.gate_multiply(kernels.linear(normed, self._gate_up), "silu")
        return kernels.linear(inner, self._down, out)

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows that `run` gave `[R, H]` -> `[R, V]`."""
        return self._kernels.linear(hidden, self._head)
