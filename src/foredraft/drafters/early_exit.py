"""The target's own first layers draft for the rest of it (LayerSkip, Elhoushi et al. 2404.16710).

Knows some layers of the target and its cache; knows no engine and keeps nothing by request. What it
computes is not computed again: keys and values go to the slots that the step has reserved, and the
pass that verifies goes on from the hidden states at the exit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from foredraft.cache.tensors import KVCache
from foredraft.core.errors import ConfigError
from foredraft.drafters.drawing import PROBABILISTIC, DrawnChain, check_sample_method, draw
from foredraft.drafters.interface import Capabilities, Draft, DraftRequest, StepResult
from foredraft.kernels.interface import Segment
from foredraft.models.first_layers import FirstLayers
from foredraft.models.interface import FlatBatch, LayerResume
from foredraft.models.load import LoadedModel

DEFAULT_DRAFT_LENGTH = 4
DEFAULT_SHARE = 4  # the exit is behind one layer in so many


@dataclass(slots=True)
class _Chain:
    """One request's draft while it grows."""

    drawn: DrawnChain
    start: int  # positions that are through the first layers
    pending: list[int]  # tokens to compute next
    hidden: list[Tensor] = field(default_factory=list)  # [rows, H] at the exit

    def draft(self, layer: int) -> Draft:
        if not self.hidden:
            return Draft()
        drawn, resume = self.drawn, LayerResume(layer, torch.cat(self.hidden))
        confidence = drawn.confidence if drawn.rates_tokens else None
        return Draft.chain(drawn.tokens, drawn.probs, confidence=confidence, resume=resume)


class EarlyExitDrafter:
    """Drafts a chain with the target's first layers, its final norm and its head; one pass of those
    a token for all requests together.

    The last draft token is not run: only the target's pass needs what follows it.
    """

    def __init__(
        self,
        target: LoadedModel,
        num_speculative_tokens: int = DEFAULT_DRAFT_LENGTH,
        exit_layer: int | None = None,
        draft_sample_method: str = PROBABILISTIC,
    ) -> None:
        """
        Args:
            exit_layer: layers that draft, 1 to one less than the target has; a quarter of them
                where it isn't said.
            draft_sample_method: "probabilistic" draws from the exit's law under the request's own
                processors, with the target's noise in the coupled rule; "greedy" drafts the most
                likely tokens.

        Raises ConfigError for a value out of range, naming it, and for a target of one layer.
        """
        self.sampled = check_sample_method(draft_sample_method)
        count = target.config.num_layers
        layer = max(1, count // DEFAULT_SHARE) if exit_layer is None else exit_layer
        if type(layer) is not int or not 1 <= layer < count:
            valid = f"an integer in 1..{count - 1}" if count > 1 else "left out: nothing fits"
            raise ConfigError(
                f"exit_layer must be {valid} for a target of {count} layers, got {layer!r}"
            )
        self.first_layers = FirstLayers(target.model, layer)
        self.capabilities = Capabilities(
            deterministic=not self.sampled,
            num_speculative_tokens=num_speculative_tokens,
            costs_passes=True,
            target_layers=layer,
            observes=False,
        )

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        chains = [_opened(request) for request in requests]
        growing = [chain for chain in chains if chain.pending]
        while growing:
            self._grow(growing)
            growing = [chain for chain in growing if chain.pending]
        return [chain.draft(self.capabilities.target_layers) for chain in chains]

    def observe(self, results: Sequence[StepResult]) -> None:
        """Nothing to learn: each draft begins at what the target's cache holds."""

    def release(self, request_id: str) -> None:
        """Nothing is kept by request."""

    def _grow(self, chains: Sequence[_Chain]) -> None:
        """One pass over what is pending, and one more draft token for each."""
        counts = [len(chain.pending) for chain in chains]
        token_ids = [token for chain in chains for token in chain.pending]
        segments = [
            Segment(chain.start, count, (), chain.drawn.request.pages)
            for chain, count in zip(chains, counts, strict=True)
        ]
        ends = [end - 1 for end in accumulate(counts)]
        batch = FlatBatch(token_ids, segments, ends)
        logits, hidden = self.first_layers.run_with_hidden(batch, _cache(chains[0].drawn.request))
        parts = [hidden[end + 1 - count : end + 1] for end, count in zip(ends, counts, strict=True)]
        row_math = self.first_layers.kernels.row_math
        tokens = draw([chain.drawn for chain in chains], logits, row_math, sampled=self.sampled)
        for chain, part, token in zip(chains, parts, tokens, strict=True):
            chain.hidden.append(part)
            chain.start += len(part)
            chain.pending = [] if token is None or not chain.drawn.goes_on else [token]


def _opened(request: DraftRequest) -> _Chain:
    """What the target has not computed yet: the end of a prompt, or the pending token."""
    drawn = DrawnChain(request)
    pending = list(request.tokens[request.num_computed :]) if drawn.goes_on else []
    return _Chain(drawn, request.num_computed, pending)


def _cache(request: DraftRequest) -> KVCache:
    if request.target_cache is None:
        raise RuntimeError(f"request {request.id} came without the target's cache")
    return request.target_cache
