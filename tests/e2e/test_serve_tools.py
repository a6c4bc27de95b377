"""Tools against the real server and model, by the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate
from openai import BadRequestError, OpenAI

from .test_serve import client_of, served

NAME = "smollm2-135m"
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather in a city.",
            "parameters": WEATHER,
            "strict": True,
        },
    }
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
PLAIN = {"speculation": {"enabled": False}}
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]


@pytest.fixture(scope="module")
def client(smollm2_path: Path) -> Iterator[OpenAI]:
    config = json.dumps({"method": "grammar", "num_speculative_tokens": 8})
    options = ["--served-model-name", NAME, "--speculative-config", config]
    with served(smollm2_path, *options) as (_, said):
        yield client_of(said)


def ask(client: OpenAI, **fields: Any) -> Any:
    request = {"model": NAME, "messages": ASKED, "tools": TOOLS, "max_tokens": 60, "seed": 1}
    return client.chat.completions.create(**{**request, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": NAMED, "temperature": 0},
        {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0.8},
    ],
    ids=["named", "required"],
)
def test_a_call_is_valid_however_it_is_asked_for(client: OpenAI, fields: Any) -> None:
    """Streamed, whole and without drafts: the same call, of the function's schema."""
    whole = ask(client, **fields)
    plain = ask(client, **fields, extra_body=PLAIN)
    # The client's own reading of a stream.
    request = {"model": NAME, "messages": ASKED, "tools": TOOLS, "max_tokens": 60, "seed": 1}
    with client.chat.completions.stream(**{**request, **fields}) as stream:
        streamed = stream.get_final_completion()
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    validate(json.loads(call.function.arguments), WEATHER)
    for answer in (whole, plain, streamed):
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None or choice.message.content == ""
        assert [each.function.arguments for each in choice.message.tool_calls] == [
            call.function.arguments
        ]
    stats = whole.model_extra["metrics"]["speculative_decoding"]
    assert stats["num_accepted_draft_tokens"] > 10  # what a call's form forces
    assert plain.usage.completion_tokens == whole.usage.completion_tokens


def test_a_conversation_of_calls_and_results(client: OpenAI) -> None:
    first = ask(client, tool_choice=NAMED, temperature=0).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "18, sunny"}
    # As the client gives the message: with all that it has.
    messages = [*ASKED, first.model_dump(exclude_none=True), result]
    answer = ask(client, messages=messages, tool_choice="none", temperature=0)
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None
    again = ask(client, messages=messages, temperature=0, max_tokens=20)
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens  # the tools are told


def test_the_pages_example_calls(client: OpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "server.md").read_text()
    code = page.split("## Tools\n")[1].split("```python\n")[1].split("```")[0]
    exec(code, {"client": client})
    assert "city" in json.loads(capsys.readouterr().out)


def test_mistakes_are_refused_by_name(client: OpenAI) -> None:
    for fields, param in (
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"tools": TOOLS * 2}, "tools.1.function.name"),
    ):
        with pytest.raises(BadRequestError) as refused:
            ask(client, **fields)
        assert refused.value.param == param
