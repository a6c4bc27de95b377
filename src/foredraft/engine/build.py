"""From settings to an engine that is ready: the one place where model, drafter, caches, policy and
engine are put together.

Knows settings and how the rooms fit together; knows neither how requests are waited for, nor what
happens in a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from foredraft.cache.tensors import CacheShape, KVCache
from foredraft.core.errors import ConfigError
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
from foredraft.engine.submission import Group, Prompt, RequestFactory, RequestOptions
from foredraft.models.chat import Message
from foredraft.models.decoder import cache_shape
from foredraft.models.load import LoadedModel, load_model
from foredraft.planning.adaptive import AdaptivePolicy
from foredraft.planning.allocation import Objective
from foredraft.planning.policy import FixedWidth, Policy


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
        kv_cache_gib: float = 2.0,
        enable_prefix_caching: bool = True,
        seed: int | None = None,
        tap: Tap | None = None,
    ) -> None:
        """Load `model` (a built-in name, a directory, a GGUF file) or take a loaded one.

        Args:
            speculative_config: see `SpeculativeConfig`; None is plain decoding.
            drafter: an object of one's own, instead of a configured method.
            kv_cache_gib: memory for keys and values, in GiB; taken as it is used.
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
            enable_prefix_caching=enable_prefix_caching,
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

    def _make(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions | None = None
    ) -> Group:
        """Requests that could be queued. Raises InvalidRequest."""
        group = self._requests.make(prompt, params, options)
        self.engine.scheduler.check_fits(group.requests[0])
        return group

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
