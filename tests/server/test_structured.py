"""Answers held to a schema, an expression or a choice, by OpenAI's and vLLM's fields."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from openai import BadRequestError

from .rig import NAME, Running

CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "abc"}]}
CHOICE = ["abc", "abd", "xyz"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"choice": CHOICE}},
        {"guided_choice": CHOICE},
        {"structured_outputs": {"regex": "[a-c]{3}[dz]"}},
        {"guided_regex": "[a-c]{3}[dz]"},
        {"guided_grammar": 'start: "abc" | "xyz"'},
    ],
)
def test_an_answer_is_what_it_must_be(server: Running, fields: Any, stream: bool) -> None:
    client = server.openai()
    request: dict[str, Any] = {**CHAT, "max_tokens": 20, "seed": 4, "extra_body": fields}
    if stream:
        chunks = client.chat.completions.create(stream=True, **request)
        text = "".join(each.choices[0].delta.content or "" for each in chunks)
    else:
        found = client.chat.completions.create(**request).choices[0]
        assert found.finish_reason == "stop"
        text = found.message.content or ""
    assert text in CHOICE or re.fullmatch("[a-c]{3}[dz]", text)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"foo": 1}}, "structured_outputs.foo"),
        ({"guided_regex": "("}, "structured_outputs"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {
                "name": "a", "schema": {"type": "nothing"}}}},
            "response_format",
        ),
    ],
)  # fmt: skip
def test_what_is_no_grammar_is_refused_by_name(server: Running, fields: Any, param: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        server.openai().chat.completions.create(**CHAT, extra_body=fields)
    assert refused.value.param == param


def test_json_by_a_schema(real_server: Running) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    found = real_server.openai().chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "Ada is 36. Answer in JSON."}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": schema, "strict": True},
        },
        temperature=0,
        max_tokens=60,
    )
    value = json.loads(found.choices[0].message.content or "")
    assert set(value) == {"name", "age"}
    assert isinstance(value["age"], int)
