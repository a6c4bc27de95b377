"""From settings to an engine that is ready: the one place where model, drafter, caches, policy and
engine are put together.

Knows settings and how the rooms fit together; knows neither how requests are waited for, nor what
happens in a step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from foredraft.cache.tensors import CacheShape, KVCache
from foredraft.core.errors import ConfigError, InvalidRequest
from foredraft.core.sampling import SamplingParams
from foredraft.drafters.catalog import DEFAULT_DRAFT_LENGTH, build_drafter, resolve_method
from foredraft.drafters.interface import MOST_UNREAD, Drafter
from foredraft.engine.calibration import cost_curve
from foredraft.engine.capacity import Capacity, capacity, capacity_words, middling_size
from foredraft.engine.config import (
    FIXED,
    POLICY_KEYS,
    RULE_KEYS,
    SpeculativeConfig,
    by_batch_size,
)
from foredraft.engine.engine import Engine, Tap
from foredraft.engine.exiting import computing
from foredraft.engine.memory import (
    ModelMemory,
    choose_budget,
    choose_cache_dtype,
    plan_engine,
    size_words,
)
from foredraft.engine.submission import Group, Prompt, RequestFactory, RequestOptions
from foredraft.models.chat_messages import Message
from foredraft.models.decoder import activation_dtype, cache_shape
from foredraft.models.interface import HEAD_INPUT
from foredraft.models.load import LoadedModel, load_model
from foredraft.planning.adaptive import AdaptivePolicy
from foredraft.planning.allocation import Objective
from foredraft.planning.confident import ConfidentOnly
from foredraft.planning.policy import FixedWidth, Policy

_logger = logging.getLogger("foredraft")


class EngineFront:
    """What `LLM` and `AsyncEngine` have in common: an engine, and what made it."""

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
        kv_cache_gib: float | None = None,
        memory: float | str | None = None,
        enable_prefix_caching: bool = True,
        seed: int | None = None,
        tap: Tap | None = None,
    ) -> None:
        """Load `model` (a built-in name, a directory, a GGUF file) or take a loaded one.

        Args:
            speculative_config: see `SpeculativeConfig`; None is plain decoding.
            drafter: an object of one's own, instead of a configured method.
            kv_cache_gib: memory for keys and values, in GiB; taken as it is used. 2 by default.
            memory: instead, for weights, keys and values of the target and of a draft model: GiB
                (4, "4.5GiB") or a share of the machine's or the GPU's ("50%").
            enable_prefix_caching: keep what was computed of prompts for others that begin alike.
            seed: of the requests that have none; None draws one from the system.
            tap: called with (request id, position, token, logits row) for every committed token.

        Raises:
            ModelError, ConfigError: with the offending value and what would be valid.
        """
        self.loaded = _load(model, dtype, device, kernels, num_threads)
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
        self.method = _method(drafter, self.speculative, self.loaded)
        self.drafter, self.num_speculative_tokens = self._make_drafter(drafter)
        budget = choose_budget(memory, kv_cache_gib, self.loaded.device)
        self.draft_working_bytes = self._working_bytes(max_num_seqs, max_num_batched_tokens)
        models = self._models(kv_dtype)
        plan = partial(
            plan_engine,
            self.loaded.config.max_position_embeddings,
            budget=budget,
            max_model_len=max_model_len,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefill_chunk_size=prefill_chunk_size,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.config, self.config_without_drafter = plan(models), plan(models[:1])
        shapes = [model.cache for model in models if model.cache is not None]
        caches = [
            KVCache(shape, self.config.num_pages, page_size, self.loaded.device) for shape in shapes
        ]
        policy = self._make_policy(shapes[0])
        if self.speculative is not None and self.speculative.draft_confidence_threshold:
            policy = ConfidentOnly(policy, self.speculative.draft_confidence_threshold)
        self.engine = Engine(self.loaded.model, self.drafter, policy, self.config, *caches, tap=tap)
        self._requests = RequestFactory(
            self.loaded,
            self.config.max_model_len,
            self.speculative,
            self.num_speculative_tokens,
            seed,
            predicts=self.drafter is not None and self.drafter.capabilities.prediction,
        )
        if _logger.isEnabledFor(logging.INFO):
            _logger.info("%s: %s", self.loaded.name, self.capacity_line())

    def _make(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions | None = None
    ) -> Group:
        """Requests that could be queued. Raises InvalidRequest."""
        group = self._requests.make(prompt, params, options)
        self.engine.scheduler.check_fits(group.requests[0])
        return group

    def _template(self, messages: Sequence[Message]) -> list[int]:
        with computing:
            return self.tokenizer.apply_chat_template(messages)

    def capacity(
        self, prompt_tokens: int, max_tokens: int, *, speculation: bool = True
    ) -> Capacity:
        """How many requests of this size run at once, by the rule that admits them: with this
        engine's drafter, or as it would be without one (`speculation=False`).

        `max_tokens` is cut to what the context leaves, as in a request; a prompt that leaves
        nothing is never admitted. Raises InvalidRequest for numbers below 1.
        """
        for name, value in (("prompt_tokens", prompt_tokens), ("max_tokens", max_tokens)):
            if type(value) is not int or value < 1:
                raise InvalidRequest(f"{name} must be a positive integer, got {value!r}")
        if speculation:
            policy = self.engine.scheduler.policy
            return capacity(self.config, policy, prompt_tokens, max_tokens)
        return capacity(self.config_without_drafter, FixedWidth(0), prompt_tokens, max_tokens)

    def capacity_line(self) -> str:
        """One line to start with: the cache, how many middling requests run at once, and what
        speculation takes of both.
        """
        prompt_tokens, max_tokens = middling_size(self.config)
        here = self.capacity(prompt_tokens, max_tokens)
        plain = None
        if self.drafter is not None:
            plain = self.capacity(prompt_tokens, max_tokens, speculation=False)
        held = sum(
            cache.num_bytes for cache in (self.engine.cache, self.engine.draft_cache) if cache
        )
        line = capacity_words(
            here, plain, self.config, self.config_without_drafter.num_pages, size_words(held)
        )
        if not self.draft_working_bytes:
            return line
        return f"{line}; the drafter remembers up to {size_words(self.draft_working_bytes)}"

    def _working_bytes(self, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """What the drafter remembers at most, the features that it has not read yet among it."""
        if self.drafter is None:
            return 0
        capabilities, loaded = self.drafter.capabilities, self.loaded
        num_layers = loaded.config.num_layers
        for depth in capabilities.feature_layers:
            if depth != HEAD_INPUT and not 0 <= depth <= num_layers:
                raise ConfigError(
                    f"the drafter asks for features at depth {depth} of a target with depths "
                    f"0..{num_layers}"
                )
        # What is read is kept until the step that read it is committed.
        unread = 1 if capabilities.cache is None else 2 * MOST_UNREAD
        rows = max_num_seqs * unread + 2 * max_num_batched_tokens
        depths = len(capabilities.feature_layers)
        itemsize = activation_dtype(loaded.dtype).itemsize
        features = rows * depths * loaded.config.hidden_size * itemsize
        return capabilities.working_bytes + features

    def _models(self, kv_dtype: str) -> list[ModelMemory]:
        """What the target takes of memory, and the drafter if there is one."""
        dtype = choose_cache_dtype(kv_dtype, self.loaded)
        shape = cache_shape(self.loaded.config, dtype)
        models = [ModelMemory("target", self.loaded.weight_bytes, shape)]
        if self.drafter is not None:
            capabilities = self.drafter.capabilities
            own = capabilities.cache
            if own is not None and kv_dtype != "auto":
                own = replace(own, dtype=dtype)
            models.append(
                ModelMemory("drafter", capabilities.weight_bytes, own, self.draft_working_bytes)
            )
        return models

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
            catches_up=self.drafter.capabilities.cache is not None,
        )


def _load(
    model: str | Path | LoadedModel,
    dtype: str,
    device: str,
    kernels: str,
    num_threads: int | None,
) -> LoadedModel:
    if not isinstance(model, LoadedModel):
        return load_model(
            model, dtype=dtype, device=device, kernels=kernels, num_threads=num_threads
        )
    if (dtype, device, kernels, num_threads) != ("auto", "cpu", "auto", None):
        raise ConfigError(
            "dtype, device, kernels and num_threads belong to loading: "
            "leave them out beside a model that is loaded"
        )
    return model


def _guessed_draft_ratio(loaded: LoadedModel, drafter: Drafter) -> float:
    """Drafting one token / a plain pass of the target: both read weights, or layers of the same
    and its head. A first guess; nothing for a drafter that itself sees what is worth a pass.
    """
    capabilities, config = drafter.capabilities, loaded.config
    if not capabilities.costs_passes:
        return 0.0
    ratio = capabilities.weight_bytes / loaded.weight_bytes
    if capabilities.target_layers:
        head_bytes = config.vocab_size * config.hidden_size * loaded.dtype.itemsize
        head = min(1.0, head_bytes / loaded.weight_bytes)
        ratio += head + (1.0 - head) * capabilities.target_layers / config.num_layers
    return ratio


def _method(
    drafter: Drafter | None, config: SpeculativeConfig | None, loaded: LoadedModel
) -> str | None:
    """The method in effect: what "auto" stands for, an object's class; None without speculation."""
    if drafter is not None:
        return type(drafter).__name__
    return None if config is None else resolve_method(config.method, config.options, loaded)


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
