"""One drafter among others: its drafts with a confidence that its track record has corrected.

Knows a drafter by its capabilities, and what became of its drafts; knows no method by name and not
the other members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.drafters.interface import (
    MOST_UNREAD,
    Capabilities,
    Draft,
    Drafter,
    DraftRequest,
    StepResult,
)
from foredraft.drafters.track_record import TrackRecord

# Kinds of nodes: tenths of confidence (one more: none is stated) by depth, deep ones alike.
NUM_TENTHS, MAX_DEPTH = 10, 4
BELIEVED = 0.6  # of a node whose drafter states no confidence
# Of drafters that pay: the kind is the depth, what is believed of each token the same.
MAX_PROMISED = 16
BELIEVED_WHERE_PAID = 0.7


@dataclass(frozen=True, slots=True)
class Rated:
    """A draft and what is expected of it."""

    draft: Draft  # with the corrected confidence
    paths: Sequence[float]  # by node: P(its whole path is accepted), 0 of rows of the drafter's own
    score: float  # accepted tokens expected, of the nodes that pay for themselves
    paid: bool  # drafted at a price: asked for before anything of it was known


class Member:
    """Asks one drafter and learns what its drafts are worth."""

    def __init__(self, drafter: Drafter, target_bytes: int) -> None:
        self.drafter = drafter
        self.capabilities: Capabilities = drafter.capabilities
        # Drafting one token / a plain pass of the target: both read their weights.
        self._token_cost = self.capabilities.weight_bytes / max(1, target_bytes)
        self._nodes, self._depths = TrackRecord(), TrackRecord()

    def promise(self, most: int) -> tuple[float, int]:
        """Tokens a plain pass's cost that a chain is expected to bring (1 is what no draft brings),
        and its length: the best one up to `most`.
        """
        alive, expected, best = 1.0, 1.0, (1.0, 0)
        for depth in range(most):
            alive *= self._depths.value(min(depth, MAX_PROMISED - 1), BELIEVED_WHERE_PAID)
            expected += alive
            best = max(best, (expected / (1.0 + self._token_cost * (depth + 1)), depth + 1))
        return best

    def reads_along(self, request: DraftRequest) -> bool:
        """Whether the drafter is asked for no nodes, to read a prompt for its own cache, or what it
        was told of while others drafted.
        """
        if self.capabilities.cache is None:
            return False
        unread = request.num_computed - request.num_cached
        behind = bool(self.capabilities.feature_layers) and unread >= MOST_UNREAD
        return request.max_nodes == 0 or behind

    def propose(self, requests: Sequence[DraftRequest]) -> list[Rated]:
        drafts = self.drafter.propose(requests)
        return [self._rated(*each) for each in zip(requests, drafts, strict=True)]

    def observe(self, results: Sequence[StepResult]) -> None:
        self._nodes.observe(results)
        self._depths.observe(results)
        self.drafter.observe(results)

    def cut(self, results: Sequence[StepResult], told: Capabilities) -> Sequence[StepResult]:
        """`results` with as many top ids a row as this drafter asks for, and with the features that
        it asks for, where more are `told`.
        """
        wanted, depths = self.capabilities.top_ids, self.capabilities.feature_layers
        if wanted and wanted != told.top_ids:
            results = [
                replace(
                    each, rows=[replace(row, top_ids=row.top_ids[:wanted]) for row in each.rows]
                )
                for each in results
            ]
        if depths == told.feature_layers:
            return results
        return [
            replace(each, features=_at_depths(each.features, depths, told.feature_layers))
            for each in results
        ]

    def release(self, request_id: str) -> None:
        self._nodes.forget(request_id)
        self._depths.forget(request_id)
        self.drafter.release(request_id)

    def _rated(self, request: DraftRequest, draft: Draft) -> Rated:
        kinds: list[int] = []
        depths: list[int] = []
        paths: list[float] = []
        confidence: list[float] = []
        for node, parent in enumerate(draft.parents):
            depth = depths[parent] + 1 if parent >= 0 else 0
            stated = None if draft.confidence is None else draft.confidence[node]
            tenth = NUM_TENTHS if stated is None else min(int(NUM_TENTHS * stated), NUM_TENTHS - 1)
            kind = tenth * MAX_DEPTH + min(depth, MAX_DEPTH - 1)
            believed = BELIEVED if stated is None else stated
            corrected = self._nodes.value(kind, believed)
            own = draft.verify is not None and not draft.verify[node]
            kinds.append(kind)
            depths.append(depth)
            confidence.append(corrected)
            paths.append(0.0 if own else corrected * (paths[parent] if parent >= 0 else 1.0))
        if draft.tokens:
            self._nodes.expect(request.id, draft.tokens, draft.parents, kinds)
            if self.capabilities.costs_passes:
                promised = [min(depth, MAX_PROMISED - 1) for depth in depths]
                self._depths.expect(request.id, draft.tokens, draft.parents, promised)
        made = replace(draft, confidence=confidence)
        return Rated(made, paths, _score(paths, request), self.capabilities.costs_passes)


def _at_depths(
    features: Tensor | None, wanted: Sequence[int], told: Sequence[int]
) -> Tensor | None:
    """The columns of `features [rows, depths * H]` that belong to the wanted depths."""
    if features is None or not wanted:
        return None
    parts = features.chunk(len(told), dim=1)
    return torch.cat([parts[told.index(depth)] for depth in wanted], dim=1)


def _score(paths: Sequence[float], request: DraftRequest) -> float:
    """The sum of `paths` as far as their nodes pay, the likeliest ones first."""
    if not request.least_path:
        return sum(paths)
    ranked = zip(sorted(paths, reverse=True), request.least_path, strict=False)
    return sum(path for path, least in ranked if path >= least)
