"""One tree from two drafters: what one believes for nothing, and what another computes.

Knows drafters by what they offer; knows no method by name. One states its law of any next token at
no cost (`StatesLaws`: an n-gram table); the other has a model, whose drafts grow by a grower of
ours (`Grows`: a head, a draft model). Where the first is sure the second isn't asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from foredraft.core.errors import ConfigError
from foredraft.drafters.blend import Blend, Gains, surest
from foredraft.drafters.blend_growth import BlendGrower, Place
from foredraft.drafters.catalog import build_member
from foredraft.drafters.growth import Grower
from foredraft.drafters.interface import (
    MOST_UNREAD,
    Capabilities,
    Draft,
    Drafter,
    DraftRequest,
    StepResult,
)
from foredraft.drafters.ngram_blend import Law
from foredraft.drafters.track_record import emitted
from foredraft.models.load import LoadedModel

SHIPPED = ({"method": "ngram_table"}, {"method": "eagle3", "quantization": "q8_0"})
# Tokens that the time of a plain pass brings while drafts are verified.
TOKENS_A_PASS = 1.5


@runtime_checkable
class StatesLaws(Protocol):
    """A drafter that says of any path behind a request's tokens what it believes comes next, for
    next to nothing.
    """

    capabilities: Capabilities
    least_path: float  # of a node that it would draft: P(accepted)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]: ...
    def observe(self, results: Sequence[StepResult]) -> None: ...
    def release(self, request_id: str) -> None: ...
    def next_tokens(self, request: DraftRequest) -> Law: ...


@runtime_checkable
class Grows(Protocol):
    """A drafter with a model, whose drafts grow from its rows of logits by any grower."""

    capabilities: Capabilities
    takes_growers: bool

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]: ...
    def observe(self, results: Sequence[StepResult]) -> None: ...
    def release(self, request_id: str) -> None: ...
    def grown(self, requests: Sequence[DraftRequest], grower: Grower[Any]) -> Sequence[Draft]: ...


class BlendedDrafter:
    """Drafts the likeliest nodes by both."""

    def __init__(
        self,
        target: LoadedModel,
        drafters: Sequence[Mapping[str, Any] | Drafter] = SHIPPED,
        num_speculative_tokens: int | None = None,
        blended_min_gain: float | None = None,
    ) -> None:
        """
        Args:
            drafters: one that states laws and one with a model, each a method with its options;
                by default the table and the EAGLE-3 head that come with the target.
            num_speculative_tokens: nodes of a draft; None: as many as the first wants.
            blended_min_gain: tokens that a pass of the model must promise; 0: it is always asked.
                None: what a pass costs, by its weights over the target's.

        Raises ConfigError for other members, and for a value out of range.
        """
        if not isinstance(drafters, Sequence) or isinstance(drafters, str):
            raise ConfigError(f"drafters must be a list of two objects, got {drafters!r}")
        made = [build_member(f"drafters[{i}]", each, target) for i, each in enumerate(drafters)]
        self.source, self.model = _roles(made)
        length = num_speculative_tokens
        if length is not None and (type(length) is not int or length < 1):
            raise ConfigError(
                f"num_speculative_tokens must be an integer of 1 or more, got {length!r}"
            )
        theirs, models = self.source.capabilities, self.model.capabilities
        price = blended_min_gain
        if price is None:
            price = TOKENS_A_PASS * models.weight_bytes / max(1, target.weight_bytes)
        elif isinstance(price, bool) or not isinstance(price, int | float) or price < 0:
            raise ConfigError(f"blended_min_gain must be a number of 0 or more, got {price!r}")
        self.blend, self.gains = Blend(), Gains()
        self._grower = BlendGrower(self.blend, self.gains, float(price), self.source.least_path)
        self._places: dict[str, Sequence[Place]] = {}
        self.capabilities = replace(
            models,
            deterministic=True,
            tree=True,
            num_speculative_tokens=length or theirs.num_speculative_tokens,
            weight_bytes=models.weight_bytes + theirs.weight_bytes,
            working_bytes=models.working_bytes + theirs.working_bytes,
            costs_passes=False,
            max_positions=None,
            top_ids=max(models.top_ids, theirs.top_ids),
        )

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        laws = {each.id: self.source.next_tokens(each) for each in requests if each.max_nodes}
        asking = [self._asks(each, laws) for each in requests]
        drafts = self._of_both(requests, asking, laws)
        alone = [each for each in requests if each.max_nodes and not drafts[each.id].tokens]
        for request, draft in zip(alone, self.source.propose(alone), strict=True):
            cached = drafts[request.id].num_cached
            drafts[request.id] = replace(draft, num_cached=cached)
        return [drafts[each.id] for each in requests]

    def observe(self, results: Sequence[StepResult]) -> None:
        """Learn from what became of the drafts; tell both."""
        for result in results:
            output = tuple(emitted(result))
            for place in self._places.pop(result.id, ()):
                depth = len(place.path)
                if depth < len(output) and output[:depth] == place.path:
                    self.blend.learn(place.law, output[depth])
        try:
            self.source.observe(results)
        finally:
            self.model.observe(results)

    def release(self, request_id: str) -> None:
        self._places.pop(request_id, None)
        try:
            self.source.release(request_id)
        finally:
            self.model.release(request_id)

    def _asks(self, request: DraftRequest, laws: Mapping[str, Law]) -> bool:
        """Whether the model is worth a pass for the first token of a draft."""
        if not request.max_nodes:
            return False
        return self.gains.pays(surest(laws[request.id](())), self._grower.price)

    def _of_both(
        self,
        requests: Sequence[DraftRequest],
        asking: Sequence[bool],
        laws: dict[str, Law],
    ) -> dict[str, Draft]:
        """Drafts of the requests that the model is asked about; empty ones of the others, of which
        it reads what is due.
        """
        drafts = dict.fromkeys((each.id for each in requests), Draft())
        asked = [
            each if asks else each._replace(max_nodes=0)
            for each, asks in zip(requests, asking, strict=True)
            if asks or self._reads_along(each)
        ]
        self._grower.begin(laws)
        if asked:
            for request, draft in zip(asked, self.model.grown(asked, self._grower), strict=True):
                drafts[request.id] = draft
        for growth in self._grower.opened:
            self._places[growth.request.id] = growth.places
        return drafts

    def _reads_along(self, request: DraftRequest) -> bool:
        """Whether the model reads now what it would have to read anyway."""
        capabilities = self.model.capabilities
        if capabilities.cache is None:
            return False
        unread = request.num_computed - request.num_cached
        behind = bool(capabilities.feature_layers) and unread >= MOST_UNREAD
        return request.max_nodes == 0 or behind


def _roles(members: Sequence[Drafter]) -> tuple[StatesLaws, Grows]:
    sources = [each for each in members if isinstance(each, StatesLaws)]
    models = [each for each in members if isinstance(each, Grows) and each.takes_growers]
    if len(members) != 2 or len(sources) != 1 or len(models) != 1:
        raise ConfigError(
            "drafters must be one that states its law (ngram_table) and one with a model (eagle3, "
            f"medusa, draft_model), got {[type(each).__name__ for each in members]}"
        )
    return sources[0], models[0]
