"""An EAGLE-3 head drafts from the target's own features (Li et al. 2503.01840).

Knows a head, its own cache, and what it was told of each request's rows; knows no engine. Slot p of
the cache is filled from the target's features at p and the token at p + 1, so a text of n tokens
fills n - 1 slots; what the head made of its own guesses is never kept: the next call computes those
slots anew from the features of what was accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.cache.tensors import KVCache
from foredraft.core.errors import ConfigError
from foredraft.drafters.drawing import PROBABILISTIC, check_sample_method
from foredraft.drafters.growth import ChainGrower, Grower, Growth, NoGrowth, Rows
from foredraft.drafters.interface import Capabilities, Draft, DraftRequest, StepResult
from foredraft.drafters.shipped.catalog import built_in_head
from foredraft.drafters.tree_growth import NO_TREE, TreeGrower, TreeShape
from foredraft.kernels.interface import Segment
from foredraft.models.heads.belonging import check_checksum, check_target
from foredraft.models.heads.eagle import Eagle, KernelEagle
from foredraft.models.heads.eagle3 import Eagle3
from foredraft.models.heads.eagle3_checkpoint import load_eagle3
from foredraft.models.heads.eagle3_kernels import KernelEagle3
from foredraft.models.load import LoadedModel

DEFAULT_DRAFT_LENGTH = 4


@dataclass(slots=True)
class Told:
    """Features of one request's computed positions, `first` on, that may still be needed."""

    first: int = 0
    parts: list[Tensor] = field(default_factory=list)  # [rows, F] each

    @property
    def end(self) -> int:
        return self.first + sum(map(len, self.parts))

    def add(self, position: int, features: Tensor) -> None:
        """What was told before is of no use where something is missing between."""
        if not self.parts or position != self.end:
            self.first, self.parts = position, []
        self.parts.append(features)

    def keep_from(self, position: int) -> None:
        """Drop what is before `position`."""
        while self.parts and self.first + len(self.parts[0]) <= position:
            self.first += len(self.parts.pop(0))
        if self.parts and self.first < position:
            self.parts[0] = self.parts[0][position - self.first :]
            self.first = position


@dataclass(slots=True)
class _Drafting:
    """One request's draft while it grows."""

    growth: Growth  # in places of the text: the row of place i lies in slot i - 1
    first: int = 0  # position of the first row of `fused`
    fused: Tensor | None = None  # [rows, H]
    outputs: dict[int, Tensor] = field(default_factory=dict)  # [H] by node, -1 the pending token

    def hidden(self, part: Rows) -> list[Tensor]:
        """What the rows of a pass read beside their tokens, `[.., H]` each."""
        count = len(part.token_ids) - len(part.drafted)
        found: list[Tensor] = []
        if count and self.fused is not None:
            start = part.segment.prefix - 1 - self.first
            found.append(self.fused[start : start + count])
        found += [self.outputs[parent][None] for _, parent in part.drafted]
        return found

    def keep(self, part: Rows, outputs: Sequence[Tensor]) -> None:
        """The outputs of the rows that a part wants, for the nodes below them."""
        count = len(part.token_ids) - len(part.drafted)
        for row, output in zip(part.wanted, outputs, strict=True):
            node = part.drafted[row - count][0] if row >= count else -1
            self.outputs[node] = output

    def draft(self) -> Draft:
        draft = self.growth.draft()
        return replace(draft, num_cached=max(0, draft.num_cached - 1))


class EagleDrafter:
    """Drafts a chain or a tree with an EAGLE-3 head, one pass a level for all requests.

    A prompt's last part is read when its features are told, so that drafts begin with the second
    token of the output.
    """

    def __init__(
        self,
        target: LoadedModel,
        model: str | Path | Eagle3 | Eagle | None = None,
        num_speculative_tokens: int = DEFAULT_DRAFT_LENGTH,
        draft_sample_method: str = PROBABILISTIC,
        draft_tree: str = NO_TREE,
        draft_tree_branching: Sequence[int] | None = None,
        quantization: str | None = None,
    ) -> None:
        """
        Args:
            model: the directory of a checkpoint, or a head; None: the one that comes with the
                target.
            draft_sample_method, draft_tree, draft_tree_branching: as of a draft model.
            quantization: "q8_0" keeps the head's weights in 8 bits; None: as the target's.

        Raises:
            ModelError: the head cannot be loaded, or is of another target.
            ConfigError: an option out of range, or no head comes with the target.
        """
        self.sampled = check_sample_method(draft_sample_method)
        shape = TreeShape.of(draft_tree, draft_tree_branching, sampled=self.sampled)
        self.head, depths = self._open_head(model, target, quantization)
        self._grower: Grower[Any] = (
            ChainGrower(self.sampled) if shape is None else TreeGrower(shape, self.sampled)
        )
        self.capabilities = Capabilities(
            deterministic=not (self.sampled if shape is None else shape.drawn),
            tree=shape is not None,
            num_speculative_tokens=num_speculative_tokens,
            cache=self.head.cache_shape,
            weight_bytes=self.head.weight_bytes,
            costs_passes=True,
            max_positions=self.head.config.max_position_embeddings,
            feature_layers=depths,
        )
        self.takes_growers = True
        self._told: dict[str, Told] = {}

    def _open_head(
        self, model: Any, target: LoadedModel, quantization: str | None
    ) -> tuple[KernelEagle3 | KernelEagle, tuple[int, ...]]:
        """The head over the target's kernels, and the depths of the target that it reads."""
        if model is None:
            model = _shipped(target)
        head = model if isinstance(model, Eagle3) else _load(model, target)
        depths = _check(head, target)
        return KernelEagle3(head, target, quantization), depths

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        return self.grown(requests, self._grower)

    def grown(self, requests: Sequence[DraftRequest], grower: Grower[Any]) -> Sequence[Draft]:
        """`propose`, by another grower."""
        drafting = [_Drafting(self._open(request, grower)) for request in requests]
        growing = [each for each in drafting if not each.growth.done]
        self._fuse(growing)
        while growing:
            self._pass(growing, grower)
            growing = [each for each in growing if not each.growth.done]
        return [each.draft() for each in drafting]

    def observe(self, results: Sequence[StepResult]) -> None:
        """Keep the features of what was committed until they are read."""
        for result in results:
            if result.features is None:
                self._told.pop(result.id, None)
                continue
            rows = [i for i, row in enumerate(result.rows) if row.committed]
            position = result.rows[rows[0]].position
            told = self._told.setdefault(result.id, Told())
            told.add(position, result.features[rows])

    def release(self, request_id: str) -> None:
        self._told.pop(request_id, None)

    def _open(self, request: DraftRequest, grower: Grower[Any]) -> Growth:
        """What is to be computed for one request: the slots that it was told of since, and a draft
        where these reach up to the pending token.
        """
        told = self._told.setdefault(request.id, Told())
        longest = self.head.config.max_position_embeddings
        length, cached = len(request.tokens), request.num_cached
        told.keep_from(min(cached, length - 2))
        end = told.end if told.parts else 0
        if max(length, request.num_prompt_tokens) > longest or not told.first <= cached <= end:
            return NoGrowth(request._replace(tokens=()))
        room = request.max_nodes if told.parts and end == length - 1 else 0
        if room:
            cached = min(cached, length - 2)  # the last slot's output is needed
        elif end < length - 1:
            request = request._replace(tokens=request.tokens[: end + 1])
        opened: Growth = grower.open(request, cached + 1, room, longest - length + 1)
        return opened

    def _fuse(self, drafting: Sequence[_Drafting]) -> None:
        """What the head makes of all features that are to be read, in one call."""
        if not drafting:
            return
        features: list[Tensor] = []
        for each in drafting:
            told = self._told[each.growth.request.id]
            skipped = each.growth.start - 1 - told.first
            parts = told.parts
            features.append((parts[0] if len(parts) == 1 else torch.cat(parts))[skipped:])
            each.first = each.growth.start - 1
        fused = self.head.fuse(torch.cat(features))
        split = torch.split(fused, [len(each) for each in features])
        for drafted, rows in zip(drafting, split, strict=True):
            drafted.fused = rows

    def _pass(self, drafting: Sequence[_Drafting], grower: Grower[Any]) -> None:
        """One pass over what each computes next, and drafts that grow from it."""
        parts = [each.growth.rows() for each in drafting]
        token_ids = [token for part in parts for token in part.token_ids]
        read = [each.hidden(part) for each, part in zip(drafting, parts, strict=True)]
        hidden = torch.cat([rows for each in read for rows in each])
        segments = [_one_slot_before(part.segment) for part in parts]
        outputs = self.head.run(token_ids, hidden, segments, _cache(drafting[0].growth.request))
        wanted: list[Tensor] = []
        first = 0
        for each, part in zip(drafting, parts, strict=True):
            rows = [outputs[first + row] for row in part.wanted]
            first += len(part.token_ids)
            each.keep(part, rows)
            each.growth.passed()
            wanted += rows
        asking = [e.growth for e, part in zip(drafting, parts, strict=True) if part.wanted]
        if asking:
            logits = self.head.logits(torch.stack(wanted))
            grower.grow(asking, logits, self.head.row_math)


def _load(path: str | Path, target: LoadedModel) -> Eagle3:
    """The head of a directory, refused where it says that it is of another target's files."""
    head = load_eagle3(path, target.config)
    check_checksum(head.config.target_sha256, target)
    return head


def _check(head: Eagle3, target: LoadedModel) -> tuple[int, ...]:
    """The depths of the target that the head reads. Raises ModelError for one of another target."""
    config = head.config
    check_target(config.target_hidden_size, config.vocab_size, None, target.config, None)
    return config.layers_of(target.config)


def _one_slot_before(segment: Segment) -> Segment:
    return replace(segment, prefix=segment.prefix - 1)


def _cache(request: DraftRequest) -> KVCache:
    if request.cache is None:
        raise RuntimeError(f"request {request.id} came without the drafter's cache")
    return request.cache


def _shipped(target: LoadedModel) -> Path:
    found = built_in_head(target.name, target.path)
    if found is None:
        raise ConfigError(
            f"no EAGLE-3 head comes with {target.name!r}: `foredraft train eagle3` makes one, to "
            "be given as model"
        )
    return found
