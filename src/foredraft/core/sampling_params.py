"""Sampling parameters: the fields of a request that shape its output, checked.

Knows fields and their ranges; knows no vocabulary, logits or model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from foredraft.core.errors import InvalidRequest
from foredraft.core.structured_outputs import StructuredOutputs

LOWEST_TEMPERATURE = 1e-5  # below it logits / temperature leaves float32; vLLM calls it greedy
LARGEST_FACTOR = 1e15  # of bias, penalty and temperature: their products stay within float32
MOST_COMPLETIONS = 4096
_LAW = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled; the names are vLLM's and OpenAI's.

    Numbers may be of any real type (numpy's, fractions); those that shape the law are kept as
    floats.

    Raises:
        InvalidRequest: a field is out of range or of the wrong type; the message names it.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0 or -1: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] | None = None
    stop: Sequence[str] | str | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # top alternatives beside the chosen token; 0 = only the chosen one
    prompt_logprobs: int | None = None
    seed: int | None = None  # any 64-bit integer, signed or unsigned; -1 and 2^64 - 1 are the same
    structured_outputs: StructuredOutputs | None = None  # what the answer's text must be

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_law()
        self._check_tokens()
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InvalidRequest(f"{name} must be true or false, got {value!r}")
        _check_integer("logprobs", self.logprobs, 0, optional=True)
        _check_integer("prompt_logprobs", self.prompt_logprobs, 0, optional=True)
        _check_integer("seed", self.seed, -(2**63), 2**64 - 1, optional=True)
        structured = self.structured_outputs
        if structured is not None and not isinstance(structured, StructuredOutputs):
            raise InvalidRequest(
                f"structured_outputs must be a StructuredOutputs, got a {type(structured).__name__}"
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _check_lengths(self) -> None:
        _check_integer("n", self.n, 1, MOST_COMPLETIONS)
        _check_integer("max_tokens", self.max_tokens, 1, optional=True)
        _check_integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )

    def _check_law(self) -> None:
        _check_number("temperature", self.temperature, 0.0, LARGEST_FACTOR)
        if 0.0 < self.temperature < LOWEST_TEMPERATURE:
            raise InvalidRequest(
                f"temperature must be 0 (greedy) or at least {LOWEST_TEMPERATURE},"
                f" got {self.temperature!r}"
            )
        _check_integer("top_k", self.top_k, -1)
        _check_number("top_p", self.top_p, 0.0, 1.0, above=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number(
            "repetition_penalty", self.repetition_penalty, 1 / LARGEST_FACTOR, LARGEST_FACTOR
        )
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for name in _LAW:
            object.__setattr__(self, name, float(getattr(self, name)))

    def _check_tokens(self) -> None:
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(f"logit_bias must map ids to numbers, got {self.logit_bias!r}")
        if self.stop is not None and not isinstance(self.stop, Sequence):
            raise InvalidRequest(f"stop must be a string or a list of strings, got {self.stop!r}")
        for token, bias in (self.logit_bias or {}).items():
            _check_integer("logit_bias token id", token, 0)
            _check_number(f"logit_bias of token {token}", bias, -LARGEST_FACTOR, LARGEST_FACTOR)
        for name in ("allowed_token_ids", "banned_token_ids", "stop_token_ids"):
            tokens = getattr(self, name)
            if tokens is not None and (not isinstance(tokens, Sequence) or isinstance(tokens, str)):
                raise InvalidRequest(f"{name} must be a list of ids, got {tokens!r}")
            for token in tokens or ():
                _check_integer(f"{name} entry", token, 0)
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) == 0:
            raise InvalidRequest("allowed_token_ids must hold at least one id, got none")
        for string in self.stop_strings:
            if not isinstance(string, str) or not string:
                raise InvalidRequest(f"stop must hold non-empty strings, got {string!r}")


def _check_integer(
    name: str, value: object, low: int, high: int | None = None, *, optional: bool = False
) -> None:
    if value is None and optional:
        return
    valid = f"at least {low}" if high is None else f"in {low} .. {high}"
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be an integer {valid}, got {value!r}")
    if int(value) < low or (high is not None and int(value) > high):
        raise InvalidRequest(f"{name} must be {valid}, got {value!r}")


def _check_number(
    name: str, value: object, low: float, high: float, *, above: bool = False
) -> None:
    """`value` is finite and in [low, high], or (low, high] where `above`."""
    if math.isinf(low):
        valid = "finite"
    elif math.isinf(high):
        valid = f"finite and {'above' if above else 'at least'} {low:g}"
    else:
        valid = (
            f"{'above' if above else 'from'} {low:g} {'and at most' if above else 'to'} {high:g}"
        )
    if not isinstance(value, Real) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be a number, {valid}, got {value!r}")
    number = float(value)
    if not math.isfinite(number) or not low <= number <= high or (above and number == low):
        raise InvalidRequest(f"{name} must be {valid}, got {value!r}")
