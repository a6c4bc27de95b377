"""Passes that are computed once: a model that remembers what it gave.

Knows the seam `Model`; knows no engine, no rule and no drafter. An engine over a
`RememberedModel` does all that it always does, except that a row is computed the first time only:
on kernels whose rows do not depend on their company, and they alone are certified to the bit, that
is the same number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from foredraft.cache.tensors import KVCache
from foredraft.kernels.interface import Kernels, Segment
from foredraft.models.decoder import new_cache
from foredraft.models.first_layers import FirstLayers
from foredraft.models.interface import FlatBatch, Model, ModelOutput
from foredraft.models.load import LoadedModel

Suffix = tuple[int, ...]  # tokens after the base

MOST_ROWS = 1024  # of logits kept: 200 MB for a vocabulary of 49,152
MOST_NODES = 32  # of the tree that missing rows are computed in
_BYTES = 3  # of a token id in a slot


@dataclass(frozen=True, slots=True)
class _Remembered:
    """One row."""

    logits: Tensor  # [V]
    hidden: Tensor  # [H]
    features: Tensor | None  # [F], where they are told


class RememberedModel:
    """A model for contexts that start with one `base`, each row of logits computed once.

    In place of keys and values the engine's cache holds the ids themselves, in the first numbers of
    each slot (a byte each, which every dtype holds exactly), so that whatever the engine does to
    slots and pages is done to them. What is missing is computed on a cache of its own, as the nodes
    of a tree.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        base: Sequence[int],
        cache_dtype: torch.dtype,
        feature_layers: Sequence[int] = (),
    ) -> None:
        """Compute `base`, whose last token's row is the first to be remembered.

        `cache_dtype` is that of keys and values, as the engine under test has it; `feature_layers`
        are the depths that its drafter is told of, of all rows.
        """
        self._depths = tuple(feature_layers)
        self._model: Model = loaded.model
        self.config = loaded.model.config
        self.kernels: Kernels = loaded.model.kernels
        # As a draft model reads a padding id of the target's.
        self.base = tuple(min(token, self.config.vocab_size - 1) for token in base)
        self._rows: OrderedDict[Suffix, _Remembered] = OrderedDict()
        self._base_features: Tensor | None = None  # [len(base), F], where they are told
        page_size = len(self.base) + MOST_NODES
        self._cache = new_cache(self.config, 1, page_size, cache_dtype, loaded.device)
        self._pass(Segment(0, len(self.base), (), [0]), self.base, [()])
        self._first = self._rows[()]

    def run(self, batch: FlatBatch, cache: KVCache) -> ModelOutput:
        """The remembered rows of a pass; writes the ids to the slots. See `Model.run`."""
        every = self._suffixes(batch, cache)
        suffixes = _asked(every, batch.logit_rows)
        if batch.feature_layers:
            self._compute([suffix for suffix in every if suffix is not None])
        self._compute(suffixes)
        rows = [self._recalled(suffix) for suffix in suffixes]
        features = self._features(batch, every) if batch.feature_layers else None
        self._forget()
        first = self._recalled(())
        return ModelOutput(
            _stacked([each.logits for each in rows], first.logits),
            _stacked([each.hidden for each in rows], first.hidden),
            features,
        )

    def _features(self, batch: FlatBatch, every: Sequence[Suffix | None]) -> Tensor:
        """Of all rows; those within the base are known by their positions."""
        if tuple(batch.feature_layers) != self._depths or self._base_features is None:
            raise ValueError(f"only features at depths {self._depths} are remembered")
        starts = accumulate((segment.rows for segment in batch.segments), initial=0)
        found: list[Tensor] = []
        for segment, start in zip(batch.segments, starts, strict=False):
            for i in range(segment.rows):
                suffix = every[start + i]
                row = None if suffix is None else self._recalled(suffix).features
                found.append(self._base_features[segment.prefix + i] if row is None else row)
        return torch.stack(found)

    def logits(self, suffix: Suffix) -> Tensor:
        """`[V]` the logits after the base and `suffix`; not to be written to."""
        self._compute([suffix])
        logits = self._recalled(suffix).logits
        self._forget()
        return logits

    def embed(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        """The model's own; see `Model.embed`."""
        return self._model.embed(token_ids)

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """The model's own; see `Model.head_rows`."""
        return self._model.head_rows(token_ids)

    def layers(self, lo: int, hi: int, hidden: Tensor, plan: Any, cache: KVCache) -> Tensor:
        """Refused with a TypeError: only whole passes are remembered."""
        raise TypeError("a model that remembers whole passes cannot run some of its layers")

    def head(self, hidden: Tensor) -> ModelOutput:
        """The model's own; see `Model.head`."""
        return self._model.head(hidden)

    def _recalled(self, suffix: Suffix) -> _Remembered:
        self._rows.move_to_end(suffix)
        return self._rows[suffix]

    def _forget(self) -> None:
        while len(self._rows) > MOST_ROWS:
            self._rows.popitem(last=False)
        self._rows.setdefault((), self._first)

    def _suffixes(self, batch: FlatBatch, cache: KVCache) -> list[Suffix | None]:
        """What stands between the base and each row, that row's token included; None within it."""
        ids = [int(token) for token in batch.token_ids]
        committed = self._committed(batch.segments, cache)
        self._store(ids, batch.segments, cache)
        every: list[Suffix | None] = []
        for segment, before in zip(batch.segments, committed, strict=True):
            tokens = ids[len(every) : len(every) + segment.rows]
            every += self._of_segment(segment, tokens, before)
        return every

    def _of_segment(
        self, segment: Segment, tokens: Sequence[int], committed: Suffix
    ) -> list[Suffix | None]:
        start = segment.prefix
        known = self.base[start : start + segment.chain]
        if tuple(tokens[: len(known)]) != known:
            raise ValueError(f"the context at position {start} does not start with the base")
        found: list[Suffix | None] = [None] * max(0, len(known) - 1)
        suffix = committed
        if known:
            found.append(() if start + len(known) == len(self.base) else None)
        for token in tokens[len(known) : segment.chain]:
            suffix = (*suffix, token)
            found.append(suffix)
        nodes: list[Suffix] = []
        for parent, token in zip(segment.parents, tokens[segment.chain :], strict=True):
            nodes.append((*(suffix if parent < 0 else nodes[parent]), token))
        return [*found, *nodes]

    def _committed(self, segments: Sequence[Segment], cache: KVCache) -> list[Suffix]:
        """The ids that the cache holds of each segment, behind the base."""
        slots = [_slots(s, len(self.base), s.prefix, cache.page_size) for s in segments]
        flat = list(chain.from_iterable(slots))
        if not flat:
            return [()] * len(segments)
        pages, offsets = _index(flat, cache)
        ids = iter(_from_bytes(cache.values[0, pages, 0, offsets, :_BYTES]))
        return [tuple(next(ids) for _ in of_segment) for of_segment in slots]

    def _store(self, ids: Sequence[int], segments: Sequence[Segment], cache: KVCache) -> None:
        flat: list[tuple[int, int]] = []
        stored: list[int] = []
        first = 0
        for segment in segments:
            start, end = max(segment.prefix, len(self.base)), segment.prefix + segment.rows
            flat += _slots(segment, start, end, cache.page_size)
            stored += ids[first + start - segment.prefix : first + segment.rows]
            first += segment.rows
        if flat:
            pages, offsets = _index(flat, cache)
            values = _to_bytes(stored).to(cache.values)
            cache.values[0, pages, 0, offsets, :_BYTES] = values

    def _compute(self, suffixes: Sequence[Suffix]) -> None:
        """Compute the rows that are missing, with their ancestors, as trees below the base."""
        nodes: dict[Suffix, int] = {}
        for suffix in sorted({suffix for suffix in suffixes if suffix not in self._rows}):
            path = [suffix[:length] for length in range(1, len(suffix) + 1)]
            new = [node for node in path if node not in nodes]
            if len(nodes) + len(new) > MOST_NODES:
                self._pass_tree(nodes)
                nodes, new = {}, path
            for node in new:
                nodes[node] = len(nodes)
        if nodes:
            self._pass_tree(nodes)

    def _pass_tree(self, nodes: dict[Suffix, int]) -> None:
        """The rows of `nodes`, each with its index; a parent comes before its children."""
        parents = tuple(nodes.get(suffix[:-1], -1) for suffix in nodes)
        tokens = [self.base[-1], *(suffix[-1] for suffix in nodes)]
        self._pass(Segment(len(self.base) - 1, 1, parents, [0]), tokens, list(nodes))

    @torch.inference_mode()
    def _pass(self, segment: Segment, tokens: Sequence[int], suffixes: Sequence[Suffix]) -> None:
        """Compute a segment, and remember its last rows."""
        rows = range(segment.rows - len(suffixes), segment.rows)
        batch = FlatBatch(tokens, [segment], rows, feature_layers=self._depths)
        output = self._model.run(batch, self._cache)
        if self._base_features is None:
            self._base_features = output.features
        told = [None] * len(suffixes) if output.features is None else output.features[rows.start :]
        for suffix, logits, hidden, features in zip(
            suffixes, output.logits, output.hidden, told, strict=True
        ):
            kept = None if features is None else features.clone()
            self._rows[suffix] = _Remembered(logits.clone(), hidden.clone(), kept)


class RememberedLayers(FirstLayers):
    """The first layers of a target, each row of logits computed once.

    They write to the target's own cache, which holds ids in the place of keys and values: those
    that the target will write there itself. So the drafts of an exit can be remembered beside the
    target's rows.
    """

    def __init__(
        self, loaded: LoadedModel, num_layers: int, base: Sequence[int], cache_dtype: torch.dtype
    ) -> None:
        super().__init__(loaded.model, num_layers)
        first = FirstLayers(loaded.model, num_layers)
        self._rows = RememberedModel(replace(loaded, model=first), base, cache_dtype)

    def run_with_hidden(self, batch: FlatBatch, cache: KVCache) -> tuple[Tensor, Tensor]:
        """The remembered logits, and hidden states of 0: a `RememberedModel` goes on from none, its
        rows are those of whole passes.
        """
        logits = self._rows.run(batch, cache).logits
        return logits, logits.new_zeros(len(batch.token_ids), self.config.hidden_size)


def _asked(every: Sequence[Suffix | None], rows: Sequence[int] | None) -> list[Suffix]:
    asked = range(len(every)) if rows is None else rows
    found = [suffix for row in asked if (suffix := every[row]) is not None]
    if len(found) < len(asked):
        raise ValueError("rows within the base were asked for; only its last is remembered")
    return found


def _stacked(rows: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.stack(list(rows)) if rows else like.new_empty(0, len(like))


def _slots(segment: Segment, start: int, end: int, page_size: int) -> list[tuple[int, int]]:
    """(page, offset) of the slots `start .. end - 1`."""
    return [(segment.pages[at // page_size], at % page_size) for at in range(start, end)]


def _index(slots: Sequence[tuple[int, int]], cache: KVCache) -> tuple[Tensor, Tensor]:
    pages, offsets = torch.tensor(slots, dtype=torch.int64, device=cache.device).unbind(1)
    return pages, offsets


def _to_bytes(ids: Sequence[int]) -> Tensor:
    column = torch.tensor(ids, dtype=torch.int64)[:, None]
    return column >> torch.arange(0, 8 * _BYTES, 8) & 255


def _from_bytes(numbers: Tensor) -> list[int]:
    shifted = numbers.to("cpu", torch.int64) << torch.arange(0, 8 * _BYTES, 8)
    ids: list[int] = shifted.sum(dim=1).tolist()
    return ids
