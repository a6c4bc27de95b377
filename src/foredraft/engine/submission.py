"""From a prompt and sampling parameters to requests the engine can run.

Knows the model's tokenizer and limits, and the rule that verifies a request; knows no page, no step
and no drafter.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from operator import index as as_int
from typing import Any

from foredraft.core.coins import mix
from foredraft.core.errors import ConfigError, InvalidRequest
from foredraft.core.sampling import Sampler, SamplingParams
from foredraft.engine.config import Rule, SpeculativeConfig, Verification, default_rule
from foredraft.engine.exiting import computing
from foredraft.engine.outputs import RequestOutput
from foredraft.engine.request import Request
from foredraft.engine.stops import StopRules
from foredraft.grammar.compiler import CompiledGrammar, compiler_of
from foredraft.models.chat_messages import Message
from foredraft.models.load import LoadedModel
from foredraft.models.tokenizer import Detokenizer

Prompt = str | Sequence[int]
LONGEST_LABEL = 256  # characters
# Iterable, but neither text nor token ids in an order; bytes would be read as ids.
_UNORDERED = (Mapping, set, frozenset, bytes, bytearray)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request may ask for beside sampling. No field changes what an exact rule emits.

    Raises InvalidRequest for values out of range.
    """

    # A label, in metrics and for what is expected to be accepted; "": by its sampling.
    request_type: str = ""
    cache_salt: str = ""  # prompts share cached pages only within one salt
    speculate: bool = True  # False: plain decoding
    num_speculative_tokens: int | None = None  # draft tokens a step at most; None: as the engine
    # The output that is expected, as text or token ids, for drafters that read it.
    prediction: Prompt | None = None

    def __post_init__(self) -> None:
        for name in ("request_type", "cache_salt"):
            value = getattr(self, name)
            if not isinstance(value, str) or len(value) > LONGEST_LABEL:
                raise InvalidRequest(
                    f"{name} must be text of {LONGEST_LABEL} characters at most, "
                    f"got {_short(value)}"
                )
        if type(self.speculate) is not bool:
            raise InvalidRequest(f"speculate must be true or false, got {_short(self.speculate)}")
        width = self.num_speculative_tokens
        if width is not None and (type(width) is not int or width < 0):
            raise InvalidRequest(
                f"num_speculative_tokens must be an integer of 0 or more, got {_short(width)}"
            )
        if self.prediction is not None and not isinstance(self.prediction, str):
            # A list would make equal options unequal when it changes.
            object.__setattr__(self, "prediction", tuple(_as_ids(self.prediction, "a prediction")))

    @property
    def max_width(self) -> int | None:
        """Draft tokens a step at most; None: as the engine."""
        return self.num_speculative_tokens if self.speculate else 0


NO_OPTIONS = RequestOptions()


class Group:
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
            num_cached_tokens=first.num_cached_tokens,
        )


class RequestFactory:
    """Makes requests for one engine, numbered; one without a seed gets a seed of its own."""

    def __init__(
        self,
        loaded: LoadedModel,
        max_model_len: int,
        speculative: SpeculativeConfig | None,
        num_speculative_tokens: int,
        seed: int | None,
        *,
        predicts: bool = False,
    ) -> None:
        """`predicts`: the drafter reads predictions; else requests that have one are refused."""
        self._loaded = loaded
        self._grammars = compiler_of(loaded.tokenizer, loaded.config.vocab_size)
        self._predicts = predicts
        self._max_model_len = max_model_len
        self._speculative = speculative
        self._num_speculative_tokens = num_speculative_tokens
        if seed is not None and (not isinstance(seed, Integral) or isinstance(seed, bool)):
            raise ConfigError(f"seed must be an integer or None, got {seed!r}")
        self._seed = int.from_bytes(os.urandom(8), "little") if seed is None else int(seed)
        self._numbers = itertools.count()

    def make(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions | None = None
    ) -> Group:
        """Requests for one prompt, not queued yet. Raises InvalidRequest."""
        with computing:
            return self._make(prompt, params, options)

    def _make(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions | None
    ) -> Group:
        check_params(params)
        options = self._check_options(NO_OPTIONS if options is None else options)
        loaded = self._loaded
        if isinstance(prompt, str):
            text, token_ids = prompt, loaded.tokenizer.encode_prompt(prompt)
        else:
            text, token_ids = None, _as_ids(prompt)
        self._check_prompt(token_ids)
        prediction = self._prediction(options.prediction)
        number = next(self._numbers)
        seed = mix(self._seed, number + 1) if params.seed is None else int(params.seed)
        rules = self._stop_rules(params, len(token_ids))
        sampler = Sampler(
            params,
            loaded.config.vocab_size,
            rules.eos_token_ids | rules.stop_token_ids,
            loaded.model.kernels.row_math,
            loaded.device,
        )
        verification = self._verification(params)
        grammar = self.grammar(params)
        if grammar is not None and verification.rule is Rule.SYNTHETIC:
            raise InvalidRequest(
                "structured_outputs can't be honoured with rejection_sample_method 'synthetic', "
                "which accepts tokens whatever they are"
            )
        group_id = f"request-{number}"
        requests = [
            Request(
                group_id if params.n == 1 else f"{group_id}-{index}",
                token_ids,
                params if index == 0 else replace(params, prompt_logprobs=None),
                group=group_id,
                index=index,
                sampler=sampler,
                rules=rules,
                seed=mix(seed, index),
                verification=verification,
                detokenizer=Detokenizer(loaded.tokenizer, params.skip_special_tokens),
                request_type=options.request_type,
                max_width=options.max_width,
                cache_salt=options.cache_salt,
                prediction=prediction,
                matcher=None
                if grammar is None
                else grammar.matcher(rules.eos_token_ids | rules.stop_token_ids),
            )
            for index in range(params.n)
        ]
        return Group(text, requests)

    def grammar(self, params: SamplingParams) -> CompiledGrammar | None:
        """What `params` hold the answer to, compiled at its first use and kept. Raises
        InvalidRequest.
        """
        structured = params.structured_outputs
        return None if structured is None else self._grammars.compile(structured)

    def prepare(self, params: SamplingParams) -> None:
        """Have ready what `make` would have to compile for `params`. Raises InvalidRequest."""
        with computing:
            self.grammar(check_params(params))

    def _check_options(self, options: Any) -> RequestOptions:
        if not isinstance(options, RequestOptions):
            raise InvalidRequest(f"request options must be RequestOptions, got {_short(options)}")
        asked, most = options.num_speculative_tokens, self._num_speculative_tokens
        if asked is not None and asked > most:
            raise InvalidRequest(
                f"num_speculative_tokens {asked} of a request is more than the engine's {most}"
            )
        return options

    def _prediction(self, prediction: Prompt | None) -> Sequence[int]:
        """Token ids; what goes beyond the context is left out."""
        if prediction is None:
            return ()
        if not self._predicts:
            raise InvalidRequest(
                "prediction is read by the speculative method 'prediction', which this engine "
                "does not use"
            )
        if isinstance(prediction, str):
            ids = self._loaded.tokenizer.encode(prediction)
        else:
            ids = _as_ids(prediction, "a prediction")
        self._check_ids("prediction", ids)
        return ids[: self._max_model_len]

    def _stop_rules(self, params: SamplingParams, num_prompt: int) -> StopRules:
        room = self._max_model_len - num_prompt
        return StopRules(
            eos_token_ids=frozenset(() if params.ignore_eos else self._loaded.eos_ids),
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            stop_strings=params.stop_strings,
            include_stop_string=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        )

    def _verification(self, params: SamplingParams) -> Verification:
        seeded = params.seed is not None
        if self._speculative is None:
            return Verification(default_rule(seeded))
        return self._speculative.verification(seeded, self._num_speculative_tokens)

    def _check_prompt(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise InvalidRequest("the prompt is empty: at least one token is needed")
        if len(token_ids) >= self._max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(token_ids)} tokens, the context holds "
                f"{self._max_model_len} with at least one for the answer"
            )
        self._check_ids("prompt", token_ids)

    def _check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        vocab_size = self._loaded.config.vocab_size
        for token in token_ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"{name} token {token} is not an id in 0..{vocab_size - 1} of this model"
                )


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or many, as a list of prompts. Raises InvalidRequest for what is neither."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, _UNORDERED):
        raise _no_prompt(prompts)
    many = list(prompts)
    if many and not any(isinstance(one, str) or _holds_items(one) for one in many):
        return [many]
    return many


def _holds_items(value: Any) -> bool:
    """Whether this is a collection: a NumPy or torch scalar is iterable by type alone."""
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0


def as_conversations(messages: Any) -> list[Sequence[Message]]:
    """One conversation or many, as a list of them. Raises InvalidRequest for what is neither."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequest(
            "messages must be a list of messages with role and content, or a list of such lists, "
            f"got {_short(messages)}"
        )
    kinds = {isinstance(one, Mapping) for one in messages}
    if len(kinds) == 2:
        raise InvalidRequest(
            "messages must be all messages or all lists of messages, not some of both"
        )
    return [messages] if kinds == {True} else list(messages)


def check_params(params: Any) -> SamplingParams:
    """`params`. Raises InvalidRequest for anything but SamplingParams."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"sampling parameters must be SamplingParams, got {_short(params)}")
    return params


def _as_ids(prompt: Any, what: str = "a prompt") -> list[int]:
    if not isinstance(prompt, Iterable) or isinstance(prompt, _UNORDERED):
        raise _no_prompt(prompt, what)
    try:
        return [as_int(token) for token in prompt]
    except TypeError as error:
        raise _no_prompt(prompt, what) from error


def _no_prompt(prompt: Any, what: str = "a prompt") -> InvalidRequest:
    return InvalidRequest(f"{what} must be text or a list of token ids, got {_short(prompt)}")


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
