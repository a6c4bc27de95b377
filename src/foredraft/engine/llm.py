"""The offline interface: prompts in, finished outputs or a stream out.

Knows prompts as text or ids and how to turn sampling parameters into requests; knows nothing of
what happens in a step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from foredraft.cache.tensors import KVCache
from foredraft.core.coins import mix
from foredraft.core.errors import ConfigError, InvalidRequest
from foredraft.core.sampling import Sampler, SamplingParams
from foredraft.drafters.catalog import DEFAULT_DRAFT_LENGTH, build_drafter
from foredraft.drafters.interface import Drafter
from foredraft.engine.config import EngineConfig, SpeculativeConfig
from foredraft.engine.engine import Engine, Tap
from foredraft.engine.outputs import RequestOutput, StreamDelta
from foredraft.engine.request import Request
from foredraft.engine.stops import StopRules
from foredraft.models.load import LoadedModel, load_model
from foredraft.models.tokenizer import Detokenizer
from foredraft.planning.policy import FixedWidth

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


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
        self.loaded = (
            model
            if isinstance(model, LoadedModel)
            else load_model(
                model, dtype=dtype, device=device, kernels=kernels, num_threads=num_threads
            )
        )
        self.tokenizer = self.loaded.tokenizer
        self.speculative = (
            None
            if speculative_config is None
            else SpeculativeConfig.from_mapping(speculative_config)
        )
        self.drafter, self.num_speculative_tokens = self._make_drafter(drafter)
        cache_dtype = _cache_dtype(kv_dtype, self.loaded)
        self.config = self._engine_config(
            max_model_len, kv_cache_gib, cache_dtype,
            page_size=page_size, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens, prefill_chunk_size=prefill_chunk_size,
        )  # fmt: skip
        model_config = self.loaded.config
        cache = KVCache(
            model_config.num_layers, self.config.num_pages, model_config.num_kv_heads, page_size,
            model_config.head_dim, cache_dtype, self.loaded.device,
        )  # fmt: skip
        policy = FixedWidth(self.num_speculative_tokens)
        self.engine = Engine(self.loaded.model, self.drafter, policy, self.config, cache, tap)
        self._seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        self._num_requests = 0

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
        many = _as_prompts(prompts)
        if params is None:
            params = SamplingParams()
        each = [params] * len(many) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise InvalidRequest(f"{len(many)} prompts with {len(each)} sampling parameters")
        groups: list[_Group] = []
        try:
            for prompt, prompt_params in zip(many, each, strict=True):
                groups.append(self._make_group(prompt, prompt_params))
            for group in groups:
                self._add(group)
            while not all(group.finished for group in groups):
                self.engine.step()
        finally:
            self._abort(groups)
        return [group.output(self.num_speculative_tokens) for group in groups]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        return self.generate([self._template(one) for one in conversations], params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamDelta]:
        """Generate one completion, yielding what each step adds. Leaving early frees everything.

        Raises:
            InvalidRequest: also for `n > 1`: a stream carries one completion.
        """
        params = SamplingParams() if params is None else params
        if params.n != 1:
            raise InvalidRequest(f"a stream carries one completion, got n = {params.n}")
        return self._stream(self._make_group(prompt, params))

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> Iterator[StreamDelta]:
        """`stream` for a conversation, through the model's chat template."""
        return self.stream(self._template(messages), params)

    def _stream(self, group: _Group) -> Iterator[StreamDelta]:
        request = group.requests[0]
        try:
            # Only now: closing a generator that was never started runs no `finally`.
            self._add(group)
            while True:
                if not request.finished:
                    self.engine.step()
                finished = group.output(self.num_speculative_tokens) if request.finished else None
                text, tokens, origins = request.drain()
                if text or tokens or finished is not None:
                    yield StreamDelta(text, tokens, origins, finished)
                if finished is not None:
                    return
        finally:
            self._abort([group])

    def _add(self, group: _Group) -> None:
        for request in group.requests:
            self.engine.add(request)

    def _abort(self, groups: Sequence[_Group]) -> None:
        for group in groups:
            for request in group.requests:
                self.engine.abort(request)

    def _template(self, messages: Sequence[Message]) -> list[int]:
        return self.tokenizer.apply_chat_template(messages)

    def _make_group(self, prompt: Prompt, params: SamplingParams) -> _Group:
        """Requests for one prompt, checked but not queued. Raises InvalidRequest."""
        token_ids = self.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)
        self._check_prompt(token_ids)
        number = self._num_requests
        self._num_requests += 1
        seed = mix(self._seed, number + 1) if params.seed is None else params.seed
        eos = frozenset() if params.ignore_eos else frozenset(self.loaded.eos_ids)
        room = self.config.max_model_len - len(token_ids)
        rules = StopRules(
            eos_token_ids=eos,
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            stop_strings=_as_strings(params.stop),
            include_stop_string=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        )
        sampler = Sampler(
            params,
            self.loaded.config.vocab_size,
            eos | rules.stop_token_ids,
            self.loaded.model.kernels.row_math,
            self.loaded.device,
        )
        group_id = f"request-{number}"
        group = _Group(
            prompt if isinstance(prompt, str) else None,
            [
                Request(
                    group_id if params.n == 1 else f"{group_id}-{index}",
                    token_ids,
                    params,
                    group=group_id,
                    index=index,
                    sampler=sampler,
                    rules=rules,
                    seed=mix(seed, index),
                    coupled=self._coupled(params),
                    detokenizer=Detokenizer(self.tokenizer, params.skip_special_tokens),
                )
                for index in range(params.n)
            ],
        )
        self.engine.scheduler.check_fits(group.requests[0])
        return group

    def _coupled(self, params: SamplingParams) -> bool:
        rule = self.speculative.rejection_sample_method if self.speculative else None
        return params.seed is not None if rule is None else rule == "coupled"

    def _check_prompt(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise InvalidRequest("the prompt is empty: at least one token is needed")
        if len(token_ids) >= self.config.max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(token_ids)} tokens, the context holds "
                f"{self.config.max_model_len} with at least one for the answer"
            )
        vocab_size = self.loaded.config.vocab_size
        for token in token_ids:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"prompt token {token!r} is not an id in 0..{vocab_size - 1} of this model"
                )

    def _make_drafter(self, drafter: Drafter | None) -> tuple[Drafter | None, int]:
        """The drafter and the most draft tokens a step; an object goes before the configuration."""
        config = self.speculative
        if drafter is not None:
            default = drafter.capabilities.num_speculative_tokens or DEFAULT_DRAFT_LENGTH
        elif config is None:
            return None, 0
        else:
            built = build_drafter(config.method, config.options, self.loaded)
            drafter, default = built.drafter, built.num_speculative_tokens
        asked = None if config is None else config.num_speculative_tokens
        return drafter, default if asked is None else asked

    def _engine_config(
        self, max_model_len: int | None, kv_cache_gib: float, dtype: torch.dtype, **sizes: Any
    ) -> EngineConfig:
        model = self.loaded.config
        longest = model.max_position_embeddings
        length = longest if max_model_len is None else max_model_len
        if length > longest:
            raise ConfigError(f"max_model_len {length} is beyond the model's {longest} positions")
        config = EngineConfig(max_model_len=length, **sizes)
        if not kv_cache_gib > 0:
            raise ConfigError(f"kv_cache_gib must be above 0, got {kv_cache_gib!r}")
        page_bytes = KVCache.bytes_per_page(
            model.num_layers, model.num_kv_heads, config.page_size, model.head_dim, dtype
        )
        affordable = int(kv_cache_gib * 2**30) // page_bytes
        if affordable < 1:
            raise ConfigError(
                f"kv_cache_gib {kv_cache_gib} is less than a page of {page_bytes} bytes"
            )
        useful = config.max_num_seqs * config.pages_for(length)
        return EngineConfig(max_model_len=length, num_pages=min(affordable, useful), **sizes)


class _Group:
    """The completions of one prompt."""

    def __init__(self, prompt: str | None, requests: list[Request]) -> None:
        self.prompt = prompt
        self.requests = requests

    @property
    def finished(self) -> bool:
        return all(request.finished for request in self.requests)

    def output(self, num_spec_tokens: int) -> RequestOutput:
        first = self.requests[0]
        return RequestOutput(
            request_id=first.group,
            prompt=self.prompt,
            prompt_token_ids=first.tokens[: first.num_prompt],
            outputs=[request.output(num_spec_tokens) for request in self.requests],
            prompt_logprobs=None
            if first.params.prompt_logprobs is None
            else list(first.prompt_logprobs),
        )


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    many: list[Any] = list(prompts)
    if many and all(isinstance(item, int) for item in many):
        return [many]
    return many


def _as_strings(stop: Sequence[str] | str | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _cache_dtype(kv_dtype: str, loaded: LoadedModel) -> torch.dtype:
    """float32 on a CPU (float64 for a float64 model), the model's dtype elsewhere."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
    if kv_dtype == "auto":
        if loaded.dtype == torch.float64 or torch.device(loaded.device).type != "cpu":
            return loaded.dtype
        return torch.float32
    if kv_dtype not in names:
        raise ConfigError(f"kv_dtype must be auto, {', '.join(names)}, got {kv_dtype!r}")
    return names[kv_dtype]
