"""The target as a teacher: hidden states at chosen depths, and its law of each next token.

Knows a loaded model, batches and kept features; knows no student. Nothing here has a gradient: the
target is frozen, and what it says is read where it was kept, else computed anew from the ids.
Shapes: B sequences, T positions, H hidden size, N rows, D ids that the student drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.cache.tensors import KVCache
from foredraft.kernels.interface import Segment
from foredraft.models.decoder import new_cache
from foredraft.models.load import LoadedModel
from foredraft.training.batches import Batch
from foredraft.training.begin import StoredWeights
from foredraft.training.features import Features

_PAGE = 16
_ROWS_AT_ONCE = 256  # whose logits over the whole vocabulary are in memory


@dataclass(frozen=True, slots=True)
class Taps:
    """Hidden states of one batch; zero behind a sequence's end."""

    depths: tuple[Tensor, ...]  # [B, T, H] each: what enters the layers that were asked for
    last: Tensor  # [B, T, H] before the final norm
    normaliser: Tensor | None = None  # [B, T] of the law behind each position; None: not kept


@dataclass(frozen=True, slots=True)
class Laws:
    """The target's laws of N next tokens."""

    hidden: Tensor  # [N, H] after the final norm
    logprobs: Tensor  # [N, D] over the ids that were asked for, out of the whole vocabulary


class Target:
    """A frozen model that answers questions about batches."""

    def __init__(self, loaded: LoadedModel, features: Features | None = None) -> None:
        """`features`: of all the answers that will be asked about; None: none are kept."""
        self.loaded = loaded
        self.device = loaded.device
        self._features = features
        self._cache: KVCache | None = None
        self._reading: _Reading | None = None

    @torch.no_grad()
    def taps(self, batch: Batch, depths: Sequence[int]) -> Taps:
        """Of all sequences: as kept where these depths are, else by one pass. Depth d is what
        enters layer d.
        """
        kept = self._features
        if kept is not None and set(depths) <= set(kept.kept.depths):
            return _kept_taps(kept, batch, depths)
        model, num_layers = self.loaded.model, self.loaded.config.num_layers
        real = [row[:n] for row, n in zip(batch.tokens, batch.lengths, strict=True)]
        segments, num_pages = _segments(batch.lengths)
        cache = self._room(num_pages)
        plan = model.kernels.prepare(segments, _PAGE)
        hidden = model.embed(torch.cat(real))
        found: dict[int, Tensor] = {}
        layer = 0
        for depth in sorted({*depths, num_layers}):
            hidden = model.layers(layer, depth, hidden, plan, cache) if depth > layer else hidden
            found[depth] = _padded(hidden, batch)
            layer = depth
        return Taps(tuple(found[depth] for depth in depths), found[num_layers])

    @torch.no_grad()
    def laws(self, taps: Taps, places: Tensor, ids: Tensor | None) -> Laws:
        """The laws behind `places [B, T]` (bool), in their order, over `ids [D]`; None: all ids."""
        last = taps.last[places]
        if ids is not None and taps.normaliser is not None:
            if self._reading is None or self._reading.ids is not ids:
                self._reading = _Reading.of(self.loaded, ids)
            with torch.autocast(self.device.type, enabled=False):
                return self._reading.laws(last, taps.normaliser[places])
        hidden, laws = [], []
        for rows in torch.split(last, _ROWS_AT_ONCE):
            output = self.loaded.model.head(rows.contiguous())
            logprobs = output.logits.log_softmax(-1)
            hidden.append(output.hidden)
            laws.append(logprobs if ids is None else logprobs.index_select(1, ids))
        return Laws(torch.cat(hidden), torch.cat(laws))

    @torch.no_grad()
    def normalisers(self, last: Tensor) -> Tensor:
        """`[N]` of rows `last [N, H]`: log of the sum of the exponentials of all logits."""
        parts = torch.split(last, _ROWS_AT_ONCE)
        head = self.loaded.model.head
        return torch.cat([head(rows.contiguous()).logits.logsumexp(-1) for rows in parts])

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings `[..., H]` of token ids `[...]`, as the target reads them."""
        rows = self.loaded.model.embed(tokens.reshape(-1))
        return rows.reshape(*tokens.shape, rows.shape[-1])

    def _room(self, num_pages: int) -> KVCache:
        if self._cache is None or self._cache.num_pages < num_pages:
            loaded = self.loaded
            self._cache = new_cache(
                loaded.config, num_pages, _PAGE, loaded.cache_dtype, loaded.device
            )
        return self._cache


@dataclass(frozen=True, slots=True)
class _Reading:
    """The target's final norm and the part of its vocabulary head that a student drafts."""

    ids: Tensor  # [D]
    head: Tensor  # [D, H]
    norm: Tensor  # [H]
    eps: float
    soft_cap: float  # 0: none

    @classmethod
    def of(cls, loaded: LoadedModel, ids: Tensor) -> _Reading:
        weights, config = StoredWeights(loaded), loaded.config
        head = weights.head()[ids.cpu()].to(ids.device)
        norm = weights.norm("model.norm").to(ids.device)
        return cls(ids, head, norm, config.rms_norm_eps, config.final_soft_cap)

    def laws(self, last: Tensor, normaliser: Tensor) -> Laws:
        hidden = F.rms_norm(last, self.norm.shape, self.norm, self.eps)
        logits = F.linear(hidden, self.head).float()
        if self.soft_cap:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return Laws(hidden, logits - normaliser[:, None])


def _kept_taps(features: Features, batch: Batch, depths: Sequence[int]) -> Taps:
    size, device = features.kept.hidden_size, batch.tokens.device
    hidden = torch.zeros(*batch.tokens.shape, features.kept.width)
    normaliser = torch.zeros(batch.tokens.shape)
    for row, (place, length) in enumerate(zip(batch.places, batch.lengths, strict=True)):
        hidden[row, :length], normaliser[row, :length] = features.read(place, length)
    *parts, last = torch.split(hidden.to(device), size, dim=-1)
    found = dict(zip(features.kept.depths, parts, strict=True))
    return Taps(tuple(found[depth] for depth in depths), last, normaliser.to(device))


def _segments(lengths: Sequence[int]) -> tuple[list[Segment], int]:
    """A segment for each sequence on pages of its own, and how many pages that takes."""
    segments, first = [], 0
    for length in lengths:
        count = -(-length // _PAGE)
        segments.append(Segment(0, length, (), range(first, first + count)))
        first += count
    return segments, first


def _padded(flat: Tensor, batch: Batch) -> Tensor:
    """`[B, T, H]` out of the sequences' rows laid end to end."""
    padded = flat.new_zeros(*batch.tokens.shape, flat.shape[-1])
    for row, part in zip(padded, torch.split(flat, list(batch.lengths)), strict=True):
        row[: len(part)] = part
    return padded
