"""Every sampling field is checked; the error names the field, the value and what would be valid."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from foredraft.core.errors import InvalidRequest, UserError
from foredraft.core.row_math import TorchRowMath
from foredraft.core.sampling import Sampler, SamplingParams

NAN = float("nan")

WRONG: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", 1.5),
    ("n", True),
    ("max_tokens", 0),
    ("max_tokens", "16"),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("temperature", -0.1),
    ("temperature", 1e-9),
    ("temperature", NAN),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("top_k", -2),
    ("top_k", 2.0),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", NAN),
    ("min_p", -0.01),
    ("min_p", 1.5),
    ("min_p", NAN),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.inf),
    ("repetition_penalty", NAN),
    ("presence_penalty", 2.5),
    ("presence_penalty", NAN),
    ("frequency_penalty", -2.5),
    ("frequency_penalty", NAN),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"1": 1.0}),
    ("logit_bias", {1: NAN}),
    ("logit_bias", {1: math.inf}),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-3]),
    ("banned_token_ids", [1.0]),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [3]),
    ("stop_token_ids", [-1]),
    ("ignore_eos", 1),
    ("include_stop_str_in_output", None),
    ("skip_special_tokens", "yes"),
    ("logprobs", -1),
    ("prompt_logprobs", 0.5),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("seed", 1.0),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(**{name: value})
    message = str(raised.value)
    assert name in message
    assert "\n" not in message
    shown = value
    if isinstance(value, dict):
        shown = next(iter(value.items()))[1 if next(iter(value)) == 1 else 0]
    elif isinstance(value, list):
        shown = value[-1] if value else "none"
    assert (shown if isinstance(shown, str) else repr(shown)) in message
    assert isinstance(raised.value, UserError)
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0.0, "top_p": 1, "top_k": -1},
        {"max_tokens": None, "min_tokens": 1000},
        {"max_tokens": 5, "min_tokens": 5},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"seed": 0},
        {"stop": "END"},
        {"stop": ["a", "b"]},
        {"stop": []},
        {"banned_token_ids": []},
        {"logprobs": 0},
        {"logit_bias": {}},
        {"logit_bias": {3: -100}},
    ],
)
def test_the_ends_of_the_ranges_are_valid(fields: dict[str, Any]) -> None:
    SamplingParams(**fields)


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"]
)
@pytest.mark.parametrize(
    "value", [Fraction(1, 2), np.float32(0.5), np.float64(0.5), 1, np.int64(1)]
)
def test_numbers_of_any_type_are_floats(name: str, value: Any) -> None:
    kept = getattr(SamplingParams(**{name: value}), name)
    assert type(kept) is float
    assert kept == value


def test_stop_strings_is_stop_as_a_tuple() -> None:
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="x").stop_strings == ("x",)
    assert SamplingParams(stop=["x", "y"]).stop_strings == ("x", "y")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"logit_bias": {8: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [0, 8]}, "allowed_token_ids"),
        ({"banned_token_ids": [9]}, "banned_token_ids"),
        ({"stop_token_ids": [8]}, "stop_token_ids"),
        ({"logprobs": 9}, "logprobs"),
        ({"prompt_logprobs": 9}, "prompt_logprobs"),
        ({"allowed_token_ids": [1, 2], "banned_token_ids": [2, 1]}, "banned_token_ids"),
        ({"banned_token_ids": list(range(8))}, "banned_token_ids"),
    ],
)
def test_what_only_the_vocabulary_can_refuse(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        Sampler(SamplingParams(**fields), 8, frozenset(), TorchRowMath())
