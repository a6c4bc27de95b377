"""A smaller model of the same vocabulary drafts for the target (Leviathan et al. 2211.17192).

Knows a model, its own cache and how far each request is in it; knows no target and no engine. What
it computed is never rolled back: the next call keeps of it what the committed tokens confirm and
writes over the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foredraft.cache.tensors import KVCache
from foredraft.drafters.drawing import PROBABILISTIC, DrawnChain, check_sample_method, draw
from foredraft.drafters.interface import Capabilities, Draft, DraftRequest, StepResult
from foredraft.kernels.interface import Segment
from foredraft.models.decoder import cache_shape
from foredraft.models.interface import FlatBatch
from foredraft.models.load import LoadedModel, load_model
from foredraft.models.vocabulary import check_same_vocabulary

DEFAULT_DRAFT_LENGTH = 4
MAX_ROWS = 1024  # of one request in a pass, when there is much to catch up on


@dataclass(frozen=True, slots=True)
class _Computed:
    """What the cache holds of a request: committed tokens, then draft tokens behind them."""

    num_committed: int = 0
    drafted: tuple[int, ...] = ()

    def confirmed(self, tokens: Sequence[int]) -> int:
        """How many positions hold what `tokens` now say."""
        count = min(self.num_committed, len(tokens))
        for token in self.drafted:
            if count == len(tokens) or tokens[count] != token:
                break
            count += 1
        return count


@dataclass(slots=True)
class _Chain:
    """One request's draft while it grows."""

    drawn: DrawnChain
    room: int  # draft tokens still to be had
    start: int  # positions computed
    pending: list[int]  # tokens to compute next

    @property
    def request(self) -> DraftRequest:
        return self.drawn.request

    @property
    def last_pass(self) -> bool:
        """Whether the next pass computes all that is pending."""
        return len(self.pending) <= MAX_ROWS

    def draft(self) -> Draft:
        drawn, num_cached = self.drawn, min(self.start, len(self.request.tokens))
        confidence = drawn.confidence if drawn.rates_tokens else None
        return Draft.chain(drawn.tokens, drawn.probs, num_cached, confidence)


class DraftModelDrafter:
    """Drafts a chain with a model of its own, one pass a token for all requests together."""

    def __init__(
        self,
        model: str | Path | LoadedModel,
        target: LoadedModel,
        num_speculative_tokens: int = DEFAULT_DRAFT_LENGTH,
        draft_sample_method: str = PROBABILISTIC,
    ) -> None:
        """Load `model` as the target is loaded (kernels, dtype, device, threads), or take one that
        is.

        Args:
            draft_sample_method: "probabilistic" draws from the draft model's law under the
                request's own processors, with the target's noise in the coupled rule; "greedy"
                drafts the most likely tokens.

        Raises:
            ModelError: the model cannot be loaded.
            ConfigError: another vocabulary than the target's, or an unknown method.
        """
        self.sampled = check_sample_method(draft_sample_method)
        self.loaded = model if isinstance(model, LoadedModel) else _load_like(model, target)
        check_same_vocabulary(target, self.loaded)
        self.capabilities = Capabilities(
            deterministic=not self.sampled,
            num_speculative_tokens=num_speculative_tokens,
            cache=cache_shape(self.loaded.config, self.loaded.cache_dtype),
            weight_bytes=self.loaded.weight_bytes,
            costs_passes=True,
            max_positions=self.loaded.config.max_position_embeddings,
        )
        self._vocab_size = target.config.vocab_size
        self._computed: dict[str, _Computed] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        chains = [self._open(request) for request in requests]
        growing = [chain for chain in chains if chain.pending]
        while growing:
            self._grow(growing)
            growing = [chain for chain in growing if chain.pending]
        return [chain.draft() for chain in chains]

    def observe(self, results: Sequence[StepResult]) -> None:
        """Nothing to learn: `propose` compares what it computed with what is committed."""

    def release(self, request_id: str) -> None:
        self._computed.pop(request_id, None)

    def _open(self, request: DraftRequest) -> _Chain:
        """What is to be computed for one request: all that its cache does not hold yet.

        A context longer than the draft model's ends speculation for the request.
        """
        tokens, longest = request.tokens, self.loaded.config.max_position_embeddings
        room = min(request.max_nodes, longest - len(tokens) + 1)
        if max(len(tokens), request.num_prompt_tokens) > longest:
            self.release(request.id)
            return _Chain(DrawnChain(request), 0, 0, [])
        start = self._computed.get(request.id, _Computed(request.num_cached)).confirmed(tokens)
        if room:
            start = min(start, len(tokens) - 1)  # the last token's logits are needed
        self._computed[request.id] = _Computed(start)
        return _Chain(DrawnChain(request), room, start, list(tokens[start:]))

    def _grow(self, chains: Sequence[_Chain]) -> None:
        """One pass over what is pending, and one more draft token for those that are through."""
        asking = [chain for chain in chains if chain.last_pass and chain.room]
        logits = self._run(chains, asking)
        for chain in chains:
            computed = chain.pending[:MAX_ROWS]
            chain.start += len(computed)
            chain.pending = chain.pending[MAX_ROWS:]
            committed = min(chain.start, len(chain.request.tokens))
            drafted = chain.drawn.tokens[: chain.start - committed]
            self._computed[chain.request.id] = _Computed(committed, tuple(drafted))
        chains_drawn = [chain.drawn for chain in asking]
        row_math = self.loaded.model.kernels.row_math
        tokens = draw(chains_drawn, logits, row_math, sampled=self.sampled)
        for chain, token in zip(asking, tokens, strict=True):
            if token is not None:
                chain.room = chain.room - 1 if chain.drawn.goes_on else 0
                chain.pending = [token] if chain.room else []

    def _run(self, chains: Sequence[_Chain], asking: Sequence[_Chain]) -> Tensor:
        """The logits `[asking, V]` after the last pending token of each chain in `asking`."""
        # A padding id of the target's, beyond the embedding here, is read as the last id.
        last_id = self.loaded.config.vocab_size - 1
        token_ids: list[int] = []
        segments = []
        rows = []
        asked = {id(chain) for chain in asking}
        for chain in chains:
            computed = chain.pending[:MAX_ROWS]
            token_ids += [min(token, last_id) for token in computed]
            segments.append(Segment(chain.start, len(computed), (), chain.request.pages))
            if id(chain) in asked:
                rows.append(len(token_ids) - 1)
        batch = FlatBatch(token_ids, segments, rows)
        logits = self.loaded.model.run(batch, _cache(chains[0].request)).logits
        return _fitted(logits, self._vocab_size)


def _load_like(model: str | Path, target: LoadedModel) -> LoadedModel:
    return load_model(
        model,
        dtype=str(target.dtype).removeprefix("torch."),
        device=target.device,
        kernels=target.model.kernels.name,
        num_threads=target.num_threads,
    )


def _cache(request: DraftRequest) -> KVCache:
    if request.cache is None:
        raise RuntimeError(f"request {request.id} came without the drafter's cache")
    return request.cache


def _fitted(logits: Tensor, vocab_size: int) -> Tensor:
    """`[R, V']` as `[R, V]`: rows of the embedding beyond the vocabulary are padding."""
    own = logits.shape[1]
    if own > vocab_size:
        return logits[:, :vocab_size].contiguous()
    return torch.nn.functional.pad(logits, (0, vocab_size - own), value=float("-inf"))
