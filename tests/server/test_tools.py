"""Tools by the official client: who has to call, who may, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from jsonschema import validate
from openai import BadRequestError

from foredraft import AsyncEngine
from foredraft.core.acceptance import Origin
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.engine.outputs import CompletionOutput, RequestOutput, StreamDelta
from foredraft.testing.drafters import LiarDrafter, OracleDrafter

from .byte_model import byte_model
from .rig import NAME, Running, serving
from .test_tools_parsing import joined, told

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "São Paulo"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "now": {"type": "object", "additionalProperties": False}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
CHAT: dict[str, Any] = {
    "model": NAME, "messages": [{"role": "user", "content": "abc"}], "max_tokens": 400, "seed": 5,
    "tools": TOOLS, "logit_bias": {"1": 20},  # the end, where there may be one
}  # fmt: skip
NAMED = {"type": "function", "function": {"name": "weather"}}
PLAIN = {"speculation": {"enabled": False}}


@contextmanager
def running(form: str, config: dict[str, Any] | None, **more: Any) -> Iterator[Running]:
    engine = AsyncEngine(byte_model(form), speculative_config=config, **more)
    with serving(engine) as server:
        yield server
    asyncio.run(engine.close())


@pytest.fixture(scope="module", params=["hermes", "mistral", "llama", "phi"])
def calling(request: pytest.FixtureRequest) -> Iterator[Running]:
    """A server for each format; forced tokens are drafted."""
    with running(request.param, {"method": "grammar", "num_speculative_tokens": 8}) as server:
        yield server


def whole(server: Running, **fields: Any) -> tuple[Any, Any]:
    answer = server.openai().chat.completions.create(**{**CHAT, **fields})
    choice = answer.choices[0]
    message = choice.message.model_dump(exclude_none=True)
    calls = message.get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    return told({"content": None, **message}), choice.finish_reason


def streamed(server: Running, **fields: Any) -> tuple[Any, Any]:
    chunks = server.openai().chat.completions.create(stream=True, **{**CHAT, **fields})
    choices = [chunk.choices[0] for chunk in chunks]
    assert [c.finish_reason for c in choices[:-1]] == [None] * (len(choices) - 1)
    deltas = [choice.delta.model_dump(exclude_none=True) for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    return joined(deltas), choices[-1].finish_reason


def test_who_has_to_call_calls(calling: Running) -> None:
    """And the same seed gives the same calls, streamed or whole, drafted or plain."""
    found = whole(calling, tool_choice="required")
    (content, calls), reason = found
    assert (content, reason) == (None, "tool_calls")
    assert calls
    for name, arguments in calls:
        validate(json.loads(arguments), SCHEMAS[name])
    assert whole(calling, tool_choice="required", extra_body=PLAIN) == found
    assert streamed(calling, tool_choice="required") == found
    calling.wait_until_free()


def test_a_named_function_is_called(calling: Running) -> None:
    found = whole(calling, tool_choice=NAMED)
    (content, calls), reason = found
    assert (content, reason) == (None, "tool_calls")
    assert [name for name, _ in calls] == ["weather"]
    validate(json.loads(calls[0][1]), WEATHER)
    tokens = {"return_token_origins": True}
    assert streamed(calling, tool_choice=NAMED, extra_body=tokens) == found


def test_forced_tokens_of_calls_are_drafted(calling: Running) -> None:
    answer = calling.openai().chat.completions.create(**CHAT, tool_choice=NAMED)
    stats = (answer.model_extra or {})["metrics"]["speculative_decoding"]
    assert stats["draft_acceptance_rate"] == 1.0
    assert stats["num_accepted_draft_tokens"] > 20


def test_a_limit_of_tokens_cuts_calls_the_same_way(calling: Running) -> None:
    for limit in (1, 30, 60):
        found = whole(calling, tool_choice=NAMED, max_tokens=limit)
        assert found[1] == "length"
        assert streamed(calling, tool_choice=NAMED, max_tokens=limit) == found


def test_a_stop_string_inside_a_call_leaves_it_open(calling: Running) -> None:
    found = whole(calling, tool_choice=NAMED, stop='"days"')
    (_, calls), reason = found
    assert (reason, calls[0][1].endswith('"days"')) == ("stop", False)
    assert streamed(calling, tool_choice=NAMED, stop='"days"') == found


def test_each_completion_has_calls_of_its_own(calling: Running) -> None:
    answer = calling.openai().chat.completions.create(**CHAT, n=2, tool_choice=NAMED, logprobs=True)
    ids = set()
    for choice in answer.choices:
        (call,) = choice.message.tool_calls or []
        ids.add(call.id)
        assert choice.finish_reason == "tool_calls"
        assert choice.logprobs is not None
    assert len(ids) == 2


def test_a_user_who_leaves_tools_alone_gets_text(calling: Running) -> None:
    plain = {key: value for key, value in CHAT.items() if key != "tools"}
    client = calling.openai()
    answer = client.chat.completions.create(**plain).choices[0]
    off = client.chat.completions.create(**CHAT, tool_choice="none").choices[0]
    assert off.message == answer.message
    assert (off.message.tool_calls, off.finish_reason) == (None, "stop")


FIRST = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
SECOND = '<tool_call>{"name": "weather", "arguments": {"days": 3}}</tool_call>'


def says(text: str, step: int, reason: Any = "stop") -> Any:
    """An engine's `stream` that says `text`, so many characters a step."""

    async def stream(prompt: Any, params: Any, options: Any) -> AsyncGenerator[StreamDelta, None]:
        for at in range(0, len(text), step):
            yield StreamDelta(text[at : at + step], [9], [Origin.PLAIN])
        whole = CompletionOutput(0, text, [9] * 3, [Origin.PLAIN] * 3, reason)
        finished = RequestOutput("a", None, prompt, [whole])
        yield StreamDelta("", [], finished=finished, completion=whole)

    return stream


def test_calls_that_a_model_makes_by_itself_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"Well.{FIRST}\n{SECOND} So."
    fields: dict[str, Any] = {"tools": TOOLS[:1]}
    with running("hermes", None) as server:
        for step in (1, 7, 1000):
            monkeypatch.setattr(server.engine, "stream", says(text, step))
            calls = [("now", "{}"), ("weather", '{"days": 3}')]
            expected: Any = (("Well.\n So.", calls), "tool_calls")
            assert whole(server) == streamed(server) == expected
            # A name that is not among the tools, and a call that breaks off: the text as it is.
            expected = ((f"Well.{FIRST}\n So.", calls[1:]), "tool_calls")
            assert whole(server, **fields) == streamed(server, **fields) == expected
            monkeypatch.setattr(server.engine, "stream", says(text[:40], step, "length"))
            assert whole(server) == streamed(server) == ((text[:40], []), "length")


def test_drafts_beyond_an_opening_are_held_to_the_call() -> None:
    """A window may hold the opening and what can't follow it: plain decoding's calls come of it."""
    strict = [{**t, "function": {**t["function"], "strict": True}} for t in TOOLS]
    fields = {"tools": strict, "logit_bias": {"4": 30, "1": 20}}
    with running("mistral", None) as server:
        expected = whole(server, **fields)
        (_, calls), reason = expected
        assert calls
        assert reason == "tool_calls"
        ids = (
            server.openai()
            .chat.completions.create(**{**CHAT, **fields}, extra_body={"return_token_ids": True})
            .choices[0]
            .model_extra
        )
    known = (ids or {})["token_ids"]
    assert known[0] == 4
    oracle = OracleDrafter(lambda _: known)
    garbage = OracleDrafter(lambda _: [4, *byte_model("mistral").tokenizer.encode(" no call" * 9)])
    for drafter in (oracle, LiarDrafter(oracle), garbage):
        with running("mistral", {"num_speculative_tokens": 5}, drafter=drafter) as server:
            assert streamed(server, **fields) == expected
            server.wait_until_free()


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def schema(**parameters: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [function(), function()]}, "tools.1.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name"),
        ({"tools": [function(foo=1)]}, "tools.0.function.foo"),
        ({"tools": [function()], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [function()], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [function()], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [function()], "guided_regex": "a"}, "structured_outputs"),
        ({"tools": [function()], "response_format": {"type": "json_object"}}, "response_format"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        (schema(type="string"), "tools.0.function.parameters.type"),
        (schema(properties=["a"]), "tools.0.function.parameters.properties"),
        (schema(properties={"a": 1}), "tools.0.function.parameters.properties.a"),
        (schema(properties={"a": {"type": "x"}}), "tools.0.function.parameters.properties.a.type"),
        (schema(required="a"), "tools.0.function.parameters.required"),
        (schema(anyOf={}), "tools.0.function.parameters.anyOf"),
        ({**schema(properties={"a": {"pattern": "("}}, required=["a"]), "tool_choice": "required"},
         "tools.0.function.parameters"),
        ({**schema(properties={"a": {"not": {}}}, required=["a"]), "tool_choice": "required"},
         "tools.0.function.parameters"),
    ],
)  # fmt: skip
def test_mistakes_are_told_by_their_field(server: Running, fields: Any, param: str) -> None:
    request = {key: CHAT[key] for key in ("model", "messages")}
    with pytest.raises(BadRequestError) as refused:
        server.openai().chat.completions.create(**request, max_tokens=1, extra_body=fields)
    assert refused.value.param is not None
    assert refused.value.param.startswith(param)
    assert refused.value.type == "invalid_request_error"
    assert param.split(".")[0] in str(refused.value)


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "1"}


def called(**fields: Any) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}", **fields}}
    return {"role": "assistant", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "1"}, "messages.1.tool_call_id"),
        ({**RESULT, "tool_call_id": "b"}, "messages.1.tool_call_id"),
        ({"role": "tool", "tool_call_id": "a"}, "messages.1.content"),
        ({"role": "user", "content": "x", "tool_call_id": "a"}, "messages.1.tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages.1.tool_calls"),
        ({"role": "user", "content": "x", "name": "me"}, "messages.1.name"),
        ({"role": "user"}, "messages.1.content"),
        ({"role": "assistant", "content": None}, "messages.1.content"),
        ({"role": "assistant", "tool_calls": []}, "messages.1.tool_calls"),
        (called(arguments="{"), "messages.1.tool_calls.0.function.arguments"),
        (called(arguments="[1]"), "messages.1.tool_calls.0.function.arguments"),
        (called(arguments='{"a": NaN}'), "messages.1.tool_calls.0.function.arguments"),
        (called(arguments='{"a": [-Infinity]}'), "messages.1.tool_calls.0.function.arguments"),
        (called(arguments='{"a": 1e999}'), "messages.1.tool_calls.0.function.arguments"),
        (called(arguments='{"a": 1, "a": 2}'), "messages.1.tool_calls.0.function.arguments"),
        (called(arguments=f'{{"a": {"9" * 40}}}'), "messages.1.tool_calls.0.function.arguments"),
        (called(arguments={}), "messages.1.tool_calls.0.function.arguments"),
        (called(name="a b"), "messages.1.tool_calls.0.function.name"),
        ({"role": "function", "content": "x"}, "messages.1.role"),
    ],
)  # fmt: skip
def test_messages_that_cannot_be_told_are_named(server: Running, message: Any, param: str) -> None:
    messages = [CHAT["messages"][0], message]
    with pytest.raises(BadRequestError) as refused:
        server.openai().chat.completions.create(model=NAME, messages=messages, max_tokens=1)
    assert refused.value.param == param


def test_a_conversation_goes_on_after_calls(calling: Running) -> None:
    client = calling.openai()
    asked = CHAT["messages"][0]
    for messages in (
        [asked, CALLED, RESULT],
        [asked, {**CALLED, "content": "Well."}, {**RESULT, "name": "f"}, asked],
        [{"role": "system", "content": "s"}, asked, called(arguments=""), RESULT],
    ):
        for tools in (None, TOOLS):
            found = client.chat.completions.create(
                model=NAME, messages=messages, max_tokens=2, extra_body={"tools": tools}
            )  # fmt: skip
            assert found.usage is not None
            assert found.usage.completion_tokens > 0


def test_a_drafter_is_held_to_a_call_as_its_target_is() -> None:
    """Reported fault 50, with tools: the target drafts for itself; were its drafts not masked as it
    is, they would be refused.
    """
    model = byte_model("hermes")
    engine = AsyncEngine(model, drafter=DraftModelDrafter(model, model))
    with serving(engine) as server, server.openai() as client:
        answer = client.chat.completions.create(**CHAT, tool_choice=NAMED, temperature=1.0)
        told = (answer.model_extra or {})["metrics"]["speculative_decoding"]
    asyncio.run(engine.close())
    assert answer.choices[0].finish_reason == "tool_calls"
    assert told["num_draft_tokens"] > 20
    assert told["num_accepted_draft_tokens"] >= told["num_draft_tokens"] - 5  # cut by the end
