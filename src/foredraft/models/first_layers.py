"""A model cut after some of its layers, and going on from there.

Knows the seam `Model`, segments and rows; knows no family, no request and no drafter. Whatever the
first layers compute is what the whole model computes in them: same weights, same cache, and on the
native kernels the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foredraft.cache.tensors import KVCache
from foredraft.kernels.interface import Segment
from foredraft.models.interface import FlatBatch, LayerResume, Model, ModelOutput


class FirstLayers:
    """The first layers of a model as one of their own, with its embedding, final norm and head.

    It writes the keys and values of those layers to the cache that it is given, which may be the
    whole model's.
    """

    def __init__(self, model: Model, num_layers: int) -> None:
        """Raises ValueError unless `num_layers` is from 1 to one less than the model's."""
        config = model.config
        if not 1 <= num_layers < config.num_layers:
            raise ValueError(
                f"num_layers must be in 1..{config.num_layers - 1} of {config.num_layers}, "
                f"got {num_layers}"
            )
        windows = config.windows[:num_layers]
        self.config = replace(config, num_layers=num_layers, windows=windows)
        self.kernels = model.kernels
        self._model = model

    def run(self, batch: FlatBatch, cache: KVCache) -> ModelOutput:
        """One pass; see `Model.run`."""
        return self.head(asked_rows(self.hidden(batch, cache), batch.logit_rows))

    def run_with_hidden(self, batch: FlatBatch, cache: KVCache) -> tuple[Tensor, Tensor]:
        """The logits `[R, V]` of the asked rows, and the hidden states `[T, H]` of all, from which
        the whole model can go on.
        """
        hidden = self.hidden(batch, cache)
        return self.head(asked_rows(hidden, batch.logit_rows)).logits, hidden

    def hidden(self, batch: FlatBatch, cache: KVCache) -> Tensor:
        """The hidden states `[T, H]` after the last of the layers."""
        plan = self.kernels.prepare(batch.segments, cache.page_size)
        return self.layers(0, self.config.num_layers, self.embed(batch.token_ids), plan, cache)

    def embed(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        """See `Model.embed`."""
        return self._model.embed(token_ids)

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """See `Model.head_rows`."""
        return self._model.head_rows(token_ids)

    def layers(self, lo: int, hi: int, hidden: Tensor, plan: Any, cache: KVCache) -> Tensor:
        """See `Model.layers`."""
        return self._model.layers(lo, hi, hidden, plan, cache)

    def head(self, hidden: Tensor) -> ModelOutput:
        """See `Model.head`."""
        return self._model.head(hidden)


@dataclass(frozen=True, slots=True)
class Uncovered:
    """The rows of a batch whose first layers nobody has computed yet, as a batch of their own."""

    batch: FlatBatch
    rows: Sequence[int]  # their places in the whole batch


def uncovered(batch: FlatBatch) -> Uncovered:
    """What `batch.resumes` leave to compute. Raises ValueError where they can't be gone on from."""
    segments: list[Segment] = []
    rows: list[int] = []
    first = 0
    for index, segment in enumerate(batch.segments):
        resume = batch.resumes.get(index)
        count = 0 if resume is None else len(resume.hidden)
        rest = _rest(segment, count)
        if rest is not None:
            segments.append(rest)
            rows += range(first + count, first + segment.rows)
        first += segment.rows
    token_ids = [int(batch.token_ids[row]) for row in rows]
    return Uncovered(FlatBatch(token_ids, segments), rows)


def _rest(segment: Segment, count: int) -> Segment | None:
    """`segment` behind its first `count` rows: nodes of a chain are places of the text then."""
    if count > segment.rows:
        raise ValueError(f"hidden states of {count} rows for a segment of {segment.rows}")
    if count == segment.rows:
        return None
    if count < segment.chain:
        return replace(segment, prefix=segment.prefix + count, chain=segment.chain - count)
    if segment.parents != tuple(range(-1, len(segment.parents) - 1)):
        raise ValueError("a tree is gone on from with all its rows, or with none of its nodes")
    return Segment(segment.prefix + count, segment.rows - count, (), segment.pages)


def resume_layer(resumes: Mapping[int, LayerResume]) -> int:
    """The one layer that all go on from. Raises ValueError for several."""
    layers = {resume.layer for resume in resumes.values()}
    if len(layers) != 1:
        raise ValueError(f"one pass goes on from one layer, got {sorted(layers)}")
    return layers.pop()


def put_together(batch: FlatBatch, computed: Uncovered, hidden: Tensor) -> Tensor:
    """`[T, H]`: the hidden states of `batch.resumes`, and those `hidden` of the rows between."""
    num_rows = sum(segment.rows for segment in batch.segments)
    whole = hidden.new_empty(num_rows, hidden.shape[1])
    if computed.rows:
        whole[torch.tensor(computed.rows, device=hidden.device)] = hidden
    first = 0
    for index, segment in enumerate(batch.segments):
        resume = batch.resumes.get(index)
        if resume is not None:
            whole[first : first + len(resume.hidden)] = resume.hidden
        first += segment.rows
    return whole


def asked_rows(hidden: Tensor, rows: Sequence[int] | None) -> Tensor:
    """The rows `rows` of `hidden [T, H]`; itself where those are all."""
    if rows is None or (len(rows) == len(hidden) and all(row == i for i, row in enumerate(rows))):
        return hidden
    return hidden.index_select(0, torch.tensor(list(rows), dtype=torch.int64, device=hidden.device))
