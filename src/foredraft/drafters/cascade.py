"""A cascade: a cheap drafter drafts for a draft model, which drafts for the target.

Knows a draft model and a drafter by its capabilities; knows no method by name. Each stage is exact
for the next: what the draft model hands on obeys its own law, so the target verifies it by that law
as if nobody had drafted for the model. The model's first pass of a step verifies the cheap draft;
further tokens cost it a pass each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from foredraft.core.errors import ConfigError
from foredraft.drafters.catalog import build_member
from foredraft.drafters.draft_model import DEFAULT_DRAFT_LENGTH, DraftModelDrafter
from foredraft.drafters.drawing import PROBABILISTIC
from foredraft.drafters.interface import Draft, Drafter, DraftRequest, StepResult
from foredraft.drafters.staged_growth import StagedGrower
from foredraft.models.load import LoadedModel


class CascadeDrafter(DraftModelDrafter):
    """A draft model that another drafter drafts for."""

    def __init__(
        self,
        model: str | Path | LoadedModel,
        drafter: Mapping[str, Any] | Drafter,
        target: LoadedModel,
        num_speculative_tokens: int = DEFAULT_DRAFT_LENGTH,
        draft_sample_method: str = PROBABILISTIC,
    ) -> None:
        """`drafter` is a method with its options, as in a config of its own, or an object; it
        drafts without drawing, without a cache and without running layers of the target. The others
        are those of a draft model.

        Raises ConfigError as that does, and for a drafter that can't be made or is another kind.
        """
        super().__init__(model, target, num_speculative_tokens, draft_sample_method)
        self.inner = build_member("drafter", drafter, target)
        inner = self.inner.capabilities
        if not inner.deterministic or inner.cache is not None or inner.target_layers:
            kept = "a law"
            if inner.deterministic:
                kept = "a cache" if inner.cache is not None else "layers"
            raise ConfigError(
                f"drafter: a cascade's drafter must draft without {kept} of its own: valid are "
                'methods such as "ngram", "suffix" and "recycling"'
            )
        self.capabilities = replace(
            self.capabilities,
            top_ids=inner.top_ids,
            prediction=inner.prediction,
            observes=inner.observes,
        )
        self._staged = self._grower = StagedGrower(self.sampled)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        # The model adds a token of its own to what it accepts.
        asked = [r._replace(max_nodes=r.max_nodes - 1) for r in requests if r.max_nodes > 1]
        drafts = self.inner.propose(asked) if asked else ()
        self._staged.guesses = {r.id: draft for r, draft in zip(asked, drafts, strict=True)}
        return super().propose(requests)

    def observe(self, results: Sequence[StepResult]) -> None:
        self.inner.observe(results)

    def release(self, request_id: str) -> None:
        super().release(request_id)
        self.inner.release(request_id)
