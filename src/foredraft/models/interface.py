"""What the engine asks of a model: one flat pass over the rows of many requests.

Knows rows, segments and logits; knows no family, no weights and no request.
Shapes: T rows of the flat batch, R asked rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from foredraft.cache.tensors import KVCache
from foredraft.kernels.interface import Kernels, Segment
from foredraft.models.config import ModelConfig

# Among depths of a model: its last hidden states behind the final norm, which its head reads.
HEAD_INPUT = -1


@dataclass(frozen=True, slots=True)
class LayerResume:
    """Where a pass goes on from: the first rows of a segment are through the layers below `layer`,
    whose keys and values of those rows are in the cache already.
    """

    layer: int
    hidden: Tensor  # [k, H] of the segment's first k rows, before layer `layer`


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """The rows of all segments, laid end to end in the segments' order."""

    token_ids: Sequence[int] | Tensor  # [T]
    segments: Sequence[Segment]  # their rows add up to T
    logit_rows: Sequence[int] | None = None  # flat rows whose logits are asked for; None = all
    # By index of the segment, all of one layer. Of a segment whose draft is a tree the rows are
    # covered up to that draft, or all of them.
    resumes: Mapping[int, LayerResume] = field(default_factory=dict)
    # Depths whose hidden states are asked for: k is what enters layer k, the number of layers what
    # leaves the last, `HEAD_INPUT` what the head reads. None of those that resumes have passed.
    feature_layers: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """`logits[i]` and `hidden[i]` belong to the flat row `logit_rows[i]`."""

    logits: Tensor  # [R, V] in the activation dtype
    hidden: Tensor  # [R, H] after the final norm: what the head reads
    # [T, depths * H]: of every row the hidden states at the depths asked for, in their order.
    features: Tensor | None = None


class Model(Protocol):
    """A target or a draft model.

    `run` is `head(layers(0, num_layers, embed(ids), ...))`; the parts are public so that a pass can
    stop after some layers and go on later from its hidden states.
    """

    config: ModelConfig
    kernels: Kernels

    def run(self, batch: FlatBatch, cache: KVCache) -> ModelOutput:
        """One pass; writes the keys and values of every row to its slot."""

    def embed(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        """`[T]` ids -> hidden states `[T, H]` before the first layer."""

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """Rows `[T, H]` of the vocabulary head, of `[T]` int64 ids."""

    def layers(self, lo: int, hi: int, hidden: Tensor, plan: Any, cache: KVCache) -> Tensor:
        """Layers `lo .. hi - 1`: hidden states `[T, H]` in and out; `plan` from `kernels`."""

    def head(self, hidden: Tensor) -> ModelOutput:
        """The final norm and the logits of `hidden` `[R, H]`."""
