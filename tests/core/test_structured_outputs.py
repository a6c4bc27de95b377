"""What a request may ask for as structured output, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foredraft.core.errors import InvalidRequest
from foredraft.core.sampling import SamplingParams
from foredraft.core.structured_outputs import (
    DEEPEST_SCHEMA,
    LONGEST_REGEX,
    LONGEST_TEXT,
    MOST_CHOICES,
    StructuredOutputs,
)

SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "fields",
    [
        {"json": SCHEMA},
        {"json": True},
        {"json": False},
        {"regex": "a+"},
        {"choice": ["yes", "no"]},
        {"grammar": 'start: "a"'},
        {"json_object": True},
    ],
)
def test_one_of_each_kind(fields: dict[str, Any]) -> None:
    made = StructuredOutputs(**fields)
    assert made.kind == next(iter(fields))
    assert SamplingParams(structured_outputs=made).structured_outputs is made


def test_a_schema_is_kept_as_text_in_one_form() -> None:
    given = StructuredOutputs(json=SCHEMA)
    assert given == StructuredOutputs(json=json.dumps(SCHEMA, indent=3))
    assert hash(given) == hash(StructuredOutputs(json=SCHEMA))
    assert isinstance(given.json, str)
    assert json.loads(given.json) == SCHEMA


def test_choices_are_kept_apart_from_the_list_given() -> None:
    given = ["yes", "no", "yes"]
    made = StructuredOutputs(choice=given)
    given.clear()
    assert made.choice == ("yes", "no")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, got none"),
        ({"json_object": False}, "got none"),
        ({"json": SCHEMA, "regex": "a"}, "got json and regex"),
        ({"json": False, "regex": "a"}, "got json and regex"),
        ({"json_object": "yes"}, "json_object must be true"),
        ({"json": "{"}, "no JSON: .* line 1, column 2"),
        ({"json": '{"const": NaN}'}, "NaN is no JSON number"),
        ({"json": {"const": float("inf")}}, "no JSON value"),
        ({"json": {"const": object()}}, "no JSON value"),
        ({"json": "[1]"}, "must be a JSON schema"),
        ({"json": "[" * 100_000}, "can't be read"),
        ({"json": nested(DEEPEST_SCHEMA + 1)}, "nested deeper than"),
        ({"json": {"enum": ["x" * LONGEST_TEXT]}}, "characters"),
        ({"json": {"title": "\ud800"}}, "half of a pair"),
        ({"regex": ""}, "regex must hold text, it is empty"),
        ({"choice": ["a", ""]}, "choice must hold text, it is empty"),
        ({"regex": 5}, "regex must be text, got 5"),
        ({"regex": "a" * (LONGEST_REGEX + 1)}, "at most are read"),
        ({"choice": "yes"}, "list of one or more texts"),
        ({"choice": []}, "list of one or more texts"),
        ({"choice": ["yes", 3]}, "choice must be text, got 3"),
        ({"choice": [str(i) for i in range(MOST_CHOICES + 1)]}, "at most are read"),
        ({"choice": ["x" * LONGEST_TEXT, "y"]}, "at most are read"),
        ({"grammar": ["start"]}, "grammar must be text"),
        ({"grammar": 'start: "\0"'}, "zero character"),
        ({"regex": "a", "disable_any_whitespace": True}, "needs json or json_object, got regex"),
        ({"json": SCHEMA, "disable_any_whitespace": 1}, "must be true or false"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        StructuredOutputs(**fields)
    assert "\n" not in str(refused.value)


def test_a_schema_that_contains_itself_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(InvalidRequest, match="nested deeper"):
        StructuredOutputs(json=schema)


def test_a_schema_that_doubles_at_every_depth_is_refused_before_it_is_written_out() -> None:
    schema: dict[str, Any] = {}
    for _ in range(60):
        schema = {"anyOf": [schema, schema]}
    with pytest.raises(InvalidRequest, match="values at one depth"):
        StructuredOutputs(json=schema)


def test_sampling_params_take_nothing_else() -> None:
    other: Any = {"regex": "a"}
    with pytest.raises(InvalidRequest, match="must be a StructuredOutputs, got a dict"):
        SamplingParams(structured_outputs=other)
