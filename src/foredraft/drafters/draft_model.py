"""A smaller model of the same vocabulary drafts for the target (Leviathan et al. 2211.17192).

Knows a model, its own cache and how far each request is in it; knows no target and no engine. What
it computed is never rolled back: the next call keeps of it what the committed tokens confirm and
writes over the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from foredraft.cache.tensors import KVCache
from foredraft.core.errors import ConfigError
from foredraft.drafters.drawing import PROBABILISTIC, check_sample_method
from foredraft.drafters.growth import ChainGrower, Computed, Grower, Growth, NoGrowth, Rows
from foredraft.drafters.interface import Capabilities, Draft, DraftRequest, StepResult
from foredraft.drafters.text_growth import TextGrower
from foredraft.drafters.tree_growth import NO_TREE, TreeGrower, TreeShape
from foredraft.kernels.quantized import check_quantization
from foredraft.models.decoder import cache_shape
from foredraft.models.interface import FlatBatch
from foredraft.models.load import LoadedModel, load_model
from foredraft.models.vocabulary import (
    OtherVocabulary,
    Reading,
    SameVocabulary,
    SharedVocabulary,
)

DEFAULT_DRAFT_LENGTH = 4
SAME, SHARED, TEXT = "same", "shared", "text"
VOCABULARIES = (SAME, SHARED, TEXT)


class DraftModelDrafter:
    """Drafts a chain or a tree with a model of its own, one pass a level for all requests."""

    def __init__(
        self,
        model: str | Path | LoadedModel,
        target: LoadedModel,
        num_speculative_tokens: int = DEFAULT_DRAFT_LENGTH,
        draft_sample_method: str = PROBABILISTIC,
        draft_tree: str = NO_TREE,
        draft_tree_branching: Sequence[int] | None = None,
        draft_vocabulary: str = SAME,
        quantization: str | None = None,
    ) -> None:
        """Load `model` as the target is loaded (kernels, dtype, device, threads), or take one that
        is.

        Args:
            draft_sample_method: "probabilistic" draws from the draft model's law under the
                request's own processors, with the target's noise in the coupled rule; "greedy"
                drafts the most likely tokens.
            draft_tree: "none" drafts chains; "top_k" the likeliest nodes; "sampled" siblings drawn
                without replacement, in a shape that is fixed before they are drawn.
            draft_tree_branching: most siblings by depth, the last for all below.
            draft_vocabulary: "same" as the target's; "shared": of another, only the tokens that
                both have; "text": of another, what its text reads as in the target's.
            quantization: of a model that is loaded here: "q8_0" keeps its weights in 8 bits.

        Raises:
            ModelError: the model cannot be loaded.
            ConfigError: another vocabulary than was said, or an option out of range.
        """
        self.sampled = check_sample_method(draft_sample_method)
        shape = TreeShape.of(draft_tree, draft_tree_branching, sampled=self.sampled)
        if draft_vocabulary not in VOCABULARIES:
            raise ConfigError(
                f"draft_vocabulary must be one of {', '.join(VOCABULARIES)}, "
                f"got {draft_vocabulary!r}"
            )
        if draft_vocabulary == TEXT and shape is not None:
            raise ConfigError(
                f'draft_tree {draft_tree!r} needs "draft_vocabulary": "same" or "shared"'
            )
        check_quantization(quantization)
        self.loaded = (
            model if isinstance(model, LoadedModel) else _load_like(model, target, quantization)
        )
        self._vocabulary: Reading
        self._grower: Grower[Any]
        if draft_vocabulary == TEXT:
            self._vocabulary = other = OtherVocabulary(target, self.loaded)
            self._grower = TextGrower(other)
            self.sampled = False
        else:
            kind = SameVocabulary if draft_vocabulary == SAME else SharedVocabulary
            self._vocabulary = kind(target, self.loaded)
            self._grower = (
                ChainGrower(self.sampled) if shape is None else TreeGrower(shape, self.sampled)
            )
        self.capabilities = Capabilities(
            deterministic=not (self.sampled if shape is None else shape.drawn),
            tree=shape is not None,
            num_speculative_tokens=num_speculative_tokens,
            cache=cache_shape(self.loaded.config, self.loaded.cache_dtype),
            weight_bytes=self.loaded.weight_bytes,
            costs_passes=True,
            max_positions=self.loaded.config.max_position_embeddings,
            observes=False,
        )
        self.takes_growers = draft_vocabulary != TEXT  # it drafts the target's tokens
        self._computed: dict[str, Computed] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        return self.grown(requests, self._grower)

    def grown(self, requests: Sequence[DraftRequest], grower: Grower[Any]) -> Sequence[Draft]:
        """`propose`, by another grower."""
        growths = [self._open(request, grower) for request in requests]
        growing = [each for each in growths if not each.done]
        while growing:
            self._pass(growing, grower)
            growing = [each for each in growing if not each.done]
        return [each.draft() for each in growths]

    def observe(self, results: Sequence[StepResult]) -> None:
        """Nothing to learn: `propose` compares what it computed with what is committed."""

    def release(self, request_id: str) -> None:
        self._computed.pop(request_id, None)

    def _open(self, request: DraftRequest, grower: Grower[Any]) -> Growth:
        """What is to be computed for one request: all that its cache does not hold yet.

        A context longer than the draft model's ends speculation for the request.
        """
        tokens, longest = request.tokens, self.loaded.config.max_position_embeddings
        if max(len(tokens), request.num_prompt_tokens) > longest:
            self.release(request.id)
            return NoGrowth(request)
        room = request.max_nodes
        start = self._computed.get(request.id, Computed(request.num_cached)).confirmed(tokens)
        if room:
            start = min(start, len(tokens) - 1)  # the last token's logits are needed
        self._computed[request.id] = Computed(start)
        opened: Growth = grower.open(request, start, room, longest - len(tokens) + 1)
        return opened

    def _pass(self, growths: Sequence[Growth], grower: Grower[Any]) -> None:
        """One pass over what each computes next, and drafts that grow from it."""
        parts = [each.rows() for each in growths]
        logits = self._run(parts, _cache(growths[0].request))
        for each in growths:
            each.passed()
            self._computed[each.request.id] = each.computed
        asking = [each for each, part in zip(growths, parts, strict=True) if part.wanted]
        if asking:
            grower.grow(asking, logits, self.loaded.model.kernels.row_math)
            for each in asking:
                self._computed[each.request.id] = each.computed

    def _run(self, parts: Sequence[Rows], cache: KVCache) -> Tensor:
        """The logits `[R, V]` of the rows that the parts want, end to end."""
        read = self._vocabulary.read
        token_ids: list[int] = []
        wanted: list[int] = []
        for part in parts:
            wanted += [len(token_ids) + row for row in part.wanted]
            token_ids += part.token_ids if part.own_ids else map(read, part.token_ids)
        batch = FlatBatch(token_ids, [part.segment for part in parts], wanted)
        return self._vocabulary.fit(self.loaded.model.run(batch, cache).logits)


def _load_like(model: str | Path, target: LoadedModel, quantization: str | None) -> LoadedModel:
    return load_model(
        model,
        dtype=str(target.dtype).removeprefix("torch."),
        device=target.device,
        kernels=target.model.kernels.name,
        num_threads=target.num_threads,
        quantization=quantization,
    )


def _cache(request: DraftRequest) -> KVCache:
    if request.cache is None:
        raise RuntimeError(f"request {request.id} came without the drafter's cache")
    return request.cache
