"""Medusa's heads draft from the target's last hidden state, each a position further ahead (Cai et
al. 2401.10774).

Knows heads and the last hidden state of each request; knows no engine and no cache. A head sees
nothing of what the heads before it drafted: the draft is their product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.core.errors import ConfigError
from foredraft.drafters.drawing import PROBABILISTIC, check_sample_method
from foredraft.drafters.growth import ChainGrower, Grower, Growth
from foredraft.drafters.interface import Capabilities, Draft, DraftRequest, StepResult
from foredraft.drafters.tree_growth import KINDS, NO_TREE, TreeGrower, TreeShape
from foredraft.models.heads.belonging import check_checksum, check_target
from foredraft.models.heads.medusa import Medusa
from foredraft.models.heads.medusa_checkpoint import load_medusa
from foredraft.models.heads.medusa_kernels import KernelMedusa
from foredraft.models.interface import HEAD_INPUT
from foredraft.models.load import LoadedModel

MEASURED = "measured"  # the tree of the ranks that were right most often
NUM_TREE_NODES = 8  # draft tokens a step, of such a tree, where nobody says


class MedusaDrafter:
    """Drafts a chain or a tree; each level costs one head."""

    def __init__(
        self,
        model: str | Path | Medusa,
        target: LoadedModel,
        num_speculative_tokens: int | None = None,
        draft_sample_method: str = PROBABILISTIC,
        draft_tree: str | None = None,
        draft_tree_branching: Sequence[int] | None = None,
        quantization: str | None = None,
    ) -> None:
        """
        Args:
            model: the directory of a checkpoint, or heads.
            num_speculative_tokens: None: as many as there are heads; 8 nodes of a measured tree.
            draft_sample_method, draft_tree_branching: as of a draft model.
            draft_tree: "none", "top_k" and "sampled" as of a draft model; "measured": the nodes
                most likely by how often the token of each rank of each head was right, which the
                checkpoint says. None: that where it says so, else a chain.
            quantization: "q8_0" keeps the heads' weights in 8 bits; None: as the target's.

        Raises:
            ModelError: the heads cannot be loaded, or are of another target.
            ConfigError: an option out of range.
        """
        self.sampled = check_sample_method(draft_sample_method)
        heads = model if isinstance(model, Medusa) else load_medusa(model, target.config)
        config = heads.config
        check_target(config.hidden_size, config.vocab_size, None, target.config, None)
        if not isinstance(model, Medusa):
            check_checksum(config.target_sha256, target)
        kind = draft_tree or (MEASURED if config.accuracies else NO_TREE)
        self._accuracies: Sequence[Sequence[float]] = ()
        self._grower: Grower[Any] | None = None
        drawn = False
        if kind == MEASURED:
            _check_measured(config.accuracies, draft_tree_branching)
            self._accuracies = config.accuracies
        elif kind not in KINDS:
            raise ConfigError(
                f"draft_tree must be one of {', '.join((*KINDS, MEASURED))}, got {draft_tree!r}"
            )
        else:
            shape = TreeShape.of(kind, draft_tree_branching, sampled=self.sampled)
            drawn = self.sampled if shape is None else shape.drawn
            self._grower = (
                ChainGrower(self.sampled) if shape is None else TreeGrower(shape, self.sampled)
            )
        default = NUM_TREE_NODES if kind == MEASURED else config.num_heads
        self.heads = KernelMedusa(heads, target, quantization)
        self.capabilities = Capabilities(
            deterministic=not drawn,
            tree=kind != NO_TREE,
            num_speculative_tokens=(
                default if num_speculative_tokens is None else num_speculative_tokens
            ),
            weight_bytes=self.heads.weight_bytes,
            costs_passes=True,
            feature_layers=(HEAD_INPUT,),
        )
        self.takes_growers = True
        self._last: dict[str, tuple[int, Tensor]] = {}  # position and [H], by request

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        return self.grown(requests, self._grower)

    def grown(
        self, requests: Sequence[DraftRequest], grower: Grower[Any] | None
    ) -> Sequence[Draft]:
        """`propose`, by another grower; None: the nodes of the best ranks."""
        asked = [each for each in requests if self._knows(each)]
        if not asked:
            return [Draft() for _ in requests]
        states = torch.stack([self._last[each.id][1] for each in asked])
        if grower is None:
            drafts = self._ranked(asked, states)
        else:
            drafts = self._grown(grower, asked, states)
        by_id = {each.id: draft for each, draft in zip(asked, drafts, strict=True)}
        return [by_id.get(each.id, Draft()) for each in requests]

    def observe(self, results: Sequence[StepResult]) -> None:
        """Keep the hidden state that the pending token came from."""
        for result in results:
            if result.features is None:
                self._last.pop(result.id, None)
                continue
            at = max(i for i, row in enumerate(result.rows) if row.committed)
            self._last[result.id] = result.rows[at].position, result.features[at].clone()

    def release(self, request_id: str) -> None:
        self._last.pop(request_id, None)

    def _knows(self, request: DraftRequest) -> bool:
        """Whether it was told of the row that the last token came from."""
        known = self._last.get(request.id)
        return request.max_nodes > 0 and known is not None and known[0] == len(request.tokens) - 2

    def _grown(
        self, grower: Grower[Any], requests: Sequence[DraftRequest], states: Tensor
    ) -> list[Draft]:
        """Level by level, as long as there are heads."""
        depth = self.heads.config.num_heads
        growths: list[Growth] = [
            grower.open(each, len(each.tokens) - 1, each.max_nodes, depth) for each in requests
        ]
        for level in range(depth):
            growing = [i for i, each in enumerate(growths) if not each.done]
            if not growing:
                break
            logits = self.heads.logits(level, states[growing])
            asking: list[Growth] = []
            rows: list[Tensor] = []
            for row, i in enumerate(growing):
                part = growths[i].rows()
                growths[i].passed()
                if part.wanted:
                    asking.append(growths[i])
                    rows += [logits[row]] * len(part.wanted)
            if asking:
                grower.grow(asking, torch.stack(rows), self.heads.row_math)
        return [replace(each.draft(), num_cached=0) for each in growths]

    def _ranked(self, requests: Sequence[DraftRequest], states: Tensor) -> list[Draft]:
        """The nodes of the best ranks' products, filled with the heads' likeliest tokens."""
        shapes = [ranked_tree(self._accuracies, each) for each in requests]
        depth = max((len(path) for shape in shapes for path in shape), default=0)
        most = [0] * depth  # ranks of each head
        for path in (path for shape in shapes for path in shape):
            most[len(path) - 1] = max(most[len(path) - 1], path[-1] + 1)
        tops = [
            self.heads.row_math.top_ids(self.heads.logits(level, states), count)
            for level, count in enumerate(most)
        ]
        return [self._filled(shape, [level[i] for level in tops]) for i, shape in enumerate(shapes)]

    def _filled(self, shape: Sequence[tuple[int, ...]], tops: Sequence[Sequence[int]]) -> Draft:
        """`tops`: by head, its likeliest tokens."""
        place = {path: i for i, path in enumerate(shape)} | {(): -1}
        return Draft(
            tuple(tops[len(path) - 1][path[-1]] for path in shape),
            tuple(place[path[:-1]] for path in shape),
            confidence=[self._accuracies[len(path) - 1][path[-1]] for path in shape],
        )


def ranked_tree(
    accuracies: Sequence[Sequence[float]], request: DraftRequest
) -> list[tuple[int, ...]]:
    """The nodes that `request` has use for, as paths of ranks, the likeliest first.

    A node's probability is the product of the accuracies on its path. They fall from rank to rank,
    so that the best tree of n nodes is the n best paths (Medusa's greedy search).
    """
    found: list[tuple[int, ...]] = []
    least, threshold = request.least_path, request.confidence_threshold
    frontier: list[tuple[float, int, tuple[int, ...], float]] = []  # -value, order, path, parent's
    order = 0

    def push(path: tuple[int, ...], reached: float) -> None:
        nonlocal order
        ranks = accuracies[len(path) - 1] if len(path) <= len(accuracies) else ()
        if path[-1] < len(ranks) and ranks[path[-1]] > 0.0 and ranks[path[-1]] >= threshold:
            order += 1
            heappush(frontier, (-reached * ranks[path[-1]], order, path, reached))

    push((0,), 1.0)
    while frontier and len(found) < request.max_nodes:
        negative, _, path, reached = heappop(frontier)
        if least and -negative < least[min(len(found), len(least) - 1)]:
            break
        found.append(path)
        push((*path[:-1], path[-1] + 1), reached)
        push((*path, 0), -negative)
    return found


def _check_measured(accuracies: Sequence[Sequence[float]], branching: object) -> None:
    if not accuracies:
        raise ConfigError(
            'draft_tree "measured" needs heads whose config.json has their accuracies; valid are '
            f"{', '.join(KINDS)}"
        )
    if branching is not None:
        raise ConfigError('draft_tree_branching needs "draft_tree": "top_k" or "sampled"')
