"""The offline interface: prompts in, finished outputs or a stream out.

Knows prompts as text or ids and how to turn sampling parameters into requests; knows nothing of
what happens in a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from foredraft.cache.tensors import CacheShape, KVCache
from foredraft.core.errors import ConfigError, InvalidRequest
from foredraft.core.sampling import SamplingParams
from foredraft.drafters.catalog import DEFAULT_DRAFT_LENGTH, build_drafter, resolve_method
from foredraft.drafters.interface import Drafter
from foredraft.engine.calibration import cost_curve
from foredraft.engine.config import (
    FIXED,
    POLICY_KEYS,
    RULE_KEYS,
    SpeculativeConfig,
    by_batch_size,
)
from foredraft.engine.engine import Engine, Tap
from foredraft.engine.memory import choose_cache_dtype, plan_engine
from foredraft.engine.outputs import RequestOutput, StreamDelta
from foredraft.engine.submission import (
    Group,
    Prompt,
    RequestFactory,
    as_conversations,
    as_prompts,
    check_params,
)
from foredraft.models.chat import Message
from foredraft.models.decoder import cache_shape
from foredraft.models.load import LoadedModel, load_model
from foredraft.planning.adaptive import AdaptivePolicy
from foredraft.planning.allocation import Objective
from foredraft.planning.policy import FixedWidth, Policy


class LLM:
    """A model ready to generate, with or without speculation; the output is the same.

    Several LLMs may share one loaded model, each with its own cache, drafter and requests.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        drafter: Drafter | None = None,
        dtype: str = "auto",
        kv_dtype: str = "auto",
        device: str = "cpu",
        kernels: str = "auto",
        num_threads: int | None = None,
        max_model_len: int | None = None,
        page_size: int = 16,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 256,
        prefill_chunk_size: int | None = None,
        kv_cache_gib: float = 2.0,
        seed: int | None = None,
        tap: Tap | None = None,
    ) -> None:
        """Load `model` (a built-in name, a directory, a GGUF file) or take a loaded one.

        Args:
            speculative_config: see `SpeculativeConfig`; None is plain decoding.
            drafter: an object of one's own, instead of a configured method.
            kv_cache_gib: memory for keys and values, in GiB; taken as it is used.
            seed: of the requests that have none; None draws one from the system.
            tap: called with (request id, position, token, logits row) for every committed token.

        Raises:
            ModelError, ConfigError: with the offending value and what would be valid.
        """
        if isinstance(model, LoadedModel):
            if (dtype, device, kernels, num_threads) != ("auto", "cpu", "auto", None):
                raise ConfigError(
                    "dtype, device, kernels and num_threads belong to loading: "
                    "leave them out beside a model that is loaded"
                )
            self.loaded = model
        else:
            self.loaded = load_model(
                model, dtype=dtype, device=device, kernels=kernels, num_threads=num_threads
            )
        self.tokenizer = self.loaded.tokenizer
        self.speculative = (
            None
            if speculative_config is None
            else SpeculativeConfig.from_mapping(speculative_config)
        )
        if drafter is not None:
            _check_drafter(drafter, speculative_config or {})
        if tap is not None and not callable(tap):
            raise ConfigError(f"tap must be a function, got {tap!r}")
        self.method = _method(drafter, self.speculative)
        self.drafter, self.num_speculative_tokens = self._make_drafter(drafter)
        shapes = self._cache_shapes(kv_dtype)
        plan = partial(
            plan_engine,
            self.loaded.config.max_position_embeddings,
            kv_cache_gib=kv_cache_gib,
            max_model_len=max_model_len,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefill_chunk_size=prefill_chunk_size,
        )
        self.config, self.config_without_drafter = plan(shapes), plan(shapes[:1])
        caches = [
            KVCache(shape, self.config.num_pages, page_size, self.loaded.device) for shape in shapes
        ]
        policy = self._make_policy(shapes[0])
        self.engine = Engine(self.loaded.model, self.drafter, policy, self.config, *caches, tap=tap)
        self._requests = RequestFactory(
            self.loaded,
            self.config.max_model_len,
            self.speculative,
            self.num_speculative_tokens,
            seed,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; the outputs come in the order of the prompts.

        Args:
            prompts: text, token ids, or a sequence of either.
            params: for all prompts, or one each; None: the defaults.

        Raises:
            InvalidRequest: a prompt or its parameters can't be honoured; nothing was generated.
        """
        many = as_prompts(prompts)
        if params is None:
            params = SamplingParams()
        each = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(each) != len(many):
            raise InvalidRequest(f"{len(many)} prompts with {len(each)} sampling parameters")
        groups = [self._make(*one) for one in zip(many, each, strict=True)]
        try:
            try:
                for group in groups:
                    self._add(group)
                while not all(group.finished for group in groups):
                    self.engine.step()
            finally:
                self._abort(groups)
        finally:
            self._abort(groups)  # again: an interrupt may have cut the first short
        return [group.output(self.num_speculative_tokens) for group in groups]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template."""
        conversations = as_conversations(messages)
        return self.generate([self._template(one) for one in conversations], params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamDelta]:
        """Generate one completion, yielding what each step adds. Leaving early frees everything.

        Raises:
            InvalidRequest: also for `n > 1`: a stream carries one completion.
        """
        params = check_params(SamplingParams() if params is None else params)
        if params.n != 1:
            raise InvalidRequest(f"a stream carries one completion, got n = {params.n}")
        return self._stream(self._make(prompt, params))

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> Iterator[StreamDelta]:
        """`stream` for a conversation, through the model's chat template."""
        return self.stream(self._template(messages), params)

    def _stream(self, group: Group) -> Iterator[StreamDelta]:
        try:
            try:
                # Only now: closing a generator that was never started runs no `finally`.
                self._add(group)
                yield from self._deltas(group)
            finally:
                self._abort([group])
        finally:
            self._abort([group])  # again: an interrupt may have cut the first short

    def _deltas(self, group: Group) -> Iterator[StreamDelta]:
        request = group.requests[0]
        finished = None
        while finished is None:
            if not request.finished:
                self.engine.step()
            if request.finished:
                finished = group.output(self.num_speculative_tokens)
            text, tokens, origins = request.drain()
            if text or tokens or finished is not None:
                yield StreamDelta(text, tokens, origins, finished)

    def _make(self, prompt: Prompt, params: SamplingParams) -> Group:
        group = self._requests.make(prompt, params)
        self.engine.scheduler.check_fits(group.requests[0])
        return group

    def _add(self, group: Group) -> None:
        for request in group.requests:
            self.engine.add(request)

    def _abort(self, groups: Sequence[Group]) -> None:
        self.engine.abort([request for group in groups for request in group.requests])

    def _template(self, messages: Sequence[Message]) -> list[int]:
        return self.tokenizer.apply_chat_template(messages)

    def _cache_shapes(self, kv_dtype: str) -> list[CacheShape]:
        """What is kept of each position: the target's, then the drafter's own if it has any."""
        dtype = choose_cache_dtype(kv_dtype, self.loaded)
        shapes = [cache_shape(self.loaded.config, dtype)]
        own = None if self.drafter is None else self.drafter.capabilities.cache
        if own is not None:
            shapes.append(own if kv_dtype == "auto" else replace(own, dtype=dtype))
        return shapes

    def _make_drafter(self, drafter: Drafter | None) -> tuple[Drafter | None, int]:
        """The drafter and the most draft tokens a step; an object goes before the configuration."""
        config = self.speculative
        if drafter is not None:
            wish = drafter.capabilities.num_speculative_tokens
            default = DEFAULT_DRAFT_LENGTH if wish is None else wish
        elif config is None:
            return None, 0
        else:
            built = build_drafter(str(self.method), config.options, self.loaded)
            drafter, default = built.drafter, built.num_speculative_tokens
        asked = None if config is None else config.num_speculative_tokens
        num_tokens = default if asked is None else asked
        if config is not None:
            config.check_drafter(num_tokens, drafter.capabilities.tree)
        return drafter, num_tokens

    def _make_policy(self, shape: CacheShape) -> Policy:
        """Who chooses draft lengths, for a target's cache of `shape`."""
        config, most = self.speculative, self.num_speculative_tokens
        if config is None or self.drafter is None or not most:
            return FixedWidth(most)
        if config.num_speculative_tokens_per_batch_size is not None:
            return by_batch_size(config.num_speculative_tokens_per_batch_size)
        if config.policy == FIXED:
            return FixedWidth(most)
        return AdaptivePolicy(
            most,
            cost_curve(self.loaded, shape, recalibrate=config.recalibrate),
            _guessed_draft_ratio(self.loaded, self.drafter),
            Objective(config.objective or Objective.THROUGHPUT),
        )


def _guessed_draft_ratio(loaded: LoadedModel, drafter: Drafter) -> float:
    """Drafting one token / a plain pass of the target: both read their weights. A first guess."""
    return drafter.capabilities.weight_bytes / loaded.weight_bytes


def _method(drafter: Drafter | None, config: SpeculativeConfig | None) -> str | None:
    """The method in effect: what "auto" stands for, an object's class; None without speculation."""
    if drafter is not None:
        return type(drafter).__name__
    return None if config is None else resolve_method(config.method, config.options)


def _check_drafter(drafter: object, config: Mapping[str, Any]) -> None:
    """An object that drafts, and a configuration that does not name another."""
    if not isinstance(drafter, Drafter):
        raise ConfigError(
            f"drafter {drafter!r} needs capabilities, propose, observe and release (see Drafter)"
        )
    valid = ("num_speculative_tokens", *POLICY_KEYS, *RULE_KEYS)
    others = sorted(set(config) - set(valid))
    if others:
        raise ConfigError(
            f"speculative_config has {', '.join(others)} beside a drafter object; valid then are "
            f"{', '.join(valid)}"
        )
