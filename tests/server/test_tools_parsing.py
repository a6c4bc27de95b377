"""Calls found in answers: all formats, any cut of the text, and what is no call stays as it is."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.server.tools.choice import NO_PARAMETERS, Function, ToolUse
from foredraft.server.tools.formats import (
    GENERIC,
    HERMES,
    LLAMA,
    MISTRAL,
    PHI,
    ToolFormat,
    format_of,
)
from foredraft.server.tools.message import MessageWriter

FORMATS = {form.name: form for form in (GENERIC, HERMES, MISTRAL, LLAMA, PHI)}
FUNCTIONS = [Function(name, None, NO_PARAMETERS, False, at) for at, name in enumerate("fg")]
CALL = '{"name": "f", "arguments": {"a": "}<tool_call>"}}'
F, G = ("f", '{"a": "}<tool_call>"}'), ("g", "{}")


def use_of(form: ToolFormat, must_call: bool = False) -> ToolUse:
    return ToolUse(form, FUNCTIONS, FUNCTIONS, must_call, may_repeat=True)


def read(form: ToolFormat, text: str, must_call: bool = False) -> tuple[Any, list[Any]]:
    return told(MessageWriter(use_of(form, must_call)).message(text))


def told(message: dict[str, Any]) -> tuple[Any, list[Any]]:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return message["content"], [(call["name"], call["arguments"]) for call in calls]


def joined(deltas: list[dict[str, Any]]) -> tuple[Any, list[Any]]:
    """Deltas as a client puts them together: a call's id, type and name come first, and once."""
    content = ""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        content += delta.get("content", "")
        for part in delta.get("tool_calls", []):
            if part["index"] == len(calls):
                assert part["type"] == "function"
                assert part["id"]
                calls.append(dict(part["function"]))
            else:
                assert set(part) == {"index", "function"}
                assert set(part["function"]) == {"arguments"}
                calls[part["index"]]["arguments"] += part["function"]["arguments"]
    return content or (None if calls else ""), [(c["name"], c["arguments"]) for c in calls]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", None, [F]),
        ("hermes", f"Hi \n<tool_call>{CALL}</tool_call>\n bye ", "Hi \n\n bye", [F]),
        ("hermes", f'<tool_call>{CALL}<tool_call>{{"name": "g"}}', None, [F, G]),
        ("hermes", f"<tool_call>[{CALL}, {CALL}]</tool_call>", None, [F, F]),
        ("hermes", f"<tool_call> no <tool_call>{CALL}", "<tool_call> no", [F]),
        ("hermes", '<tool_call>{"name": "g", "arguments": "{\\"a\\": 1}"}', None,
         [("g", '{"a": 1}')]),
        ("hermes", '<tool_call>{"arguments": {}, "id": [1, {"x": "}"}], "name": "g"}', None, [G]),
        ("hermes", f'<tool_call>{{"name": "f}}\n</tool_call><tool_call>{CALL}',
         '<tool_call>{"name": "f}\n</tool_call>', [F]),
        ("mistral", f"[TOOL_CALLS] [{CALL}]", None, [F]),
        ("mistral", '[TOOL_CALLS][{"name": "g", "arguments": {}, "id": "123456789"},\n'
         f"{CALL}]", None, [G, F]),
        ("mistral", f"[TOOL_CALLS][{CALL}, oops", ", oops", [F]),
        ("llama", '{"name": "f", "parameters": {"a": 1}}', None, [("f", '{"a": 1}')]),
        ("llama", '<|python_tag|>{"name": "g", "parameters": {}}; {"name": "g"}\n', None, [G, G]),
        ("llama", '{"name": "g", "parameters": {}} and so', " and so", [G]),
        ("phi", f"<|tool_call|>[{CALL}]<|/tool_call|>", None, [F]),
        ("phi", f"functools[{CALL},{CALL}]", None, [F, F]),
    ],
)  # fmt: skip
def test_calls_are_found(name: str, text: str, content: str | None, calls: list[Any]) -> None:
    assert read(FORMATS[name], text) == (content, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "a < b, <tool_call"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{"}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 3000),
        ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 3000),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 9999 + "]" * 9999 + "}}"),
        ("mistral", "[TOOL_CALLS] f(1)"),
        ("llama", "So: " + '{"name": "f", "parameters": {}}'),
        ("llama", '{"answer": 42}'),
        ("llama", "<|python_tag|>print(1)"),
        ("phi", "functools are fun"),
        ("hermes", ""),
        ("llama", " \n "),
    ],
)
def test_what_is_no_call_is_content_word_for_word(name: str, text: str) -> None:
    assert read(FORMATS[name], text) == (text, [])


parts = st.sampled_from([
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|tool_call|>", "<|/tool_call|>", "functools",
    "<|python_tag|>", "<tool_", "[", "]", ",", ";", "{", "}", '"', "\\", " ", "\n", "x", "é", CALL,
    '{"name": "g", "parameters": {"b": [1, {}]}}', '{"name": "f", "arguments": ', '"name"', "1",
])  # fmt: skip
answers = st.lists(parts, max_size=9).map("".join)
valid = st.lists(
    st.tuples(
        st.sampled_from("fg"),
        st.dictionaries(st.text(max_size=4), st.text(max_size=6) | st.integers(), max_size=3),
    ),
    min_size=1,
    max_size=3,
)


def cut(text: str, places: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


def streamed(form: ToolFormat, pieces: list[str], must_call: bool) -> tuple[Any, list[Any]]:
    writer = MessageWriter(use_of(form, must_call))
    deltas = [writer.push(piece, ended=False) for piece in pieces]
    return joined([*deltas, writer.push("", ended=True)])


@given(
    text=answers,
    places=st.lists(st.integers(0, 300), max_size=12),
    name=st.sampled_from(sorted(FORMATS)),
)
def test_any_cut_of_any_text_gives_the_same_message(
    text: str, places: list[int], name: str
) -> None:
    form = FORMATS[name]
    whole = read(form, text)
    assert streamed(form, cut(text, places), False) == whole
    assert streamed(form, list(text), False) == whole
    content, calls = whole
    if not calls:
        assert content == text
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


@given(calls=valid, end=st.integers(0, 400), name=st.sampled_from(sorted(FORMATS)))
def test_calls_that_a_grammar_holds_are_told_as_they_are_written(
    calls: list[tuple[str, dict[str, Any]]], end: int, name: str
) -> None:
    """Whole, or cut off anywhere, as a limit of tokens does."""
    form = FORMATS[name]
    calls = calls[:1] if form is LLAMA else calls
    bodies = [json.dumps(arguments, ensure_ascii=False) for _, arguments in calls]
    texts = [f"{form.header(call[0])}{body}}}" for call, body in zip(calls, bodies, strict=True)]
    if form.is_list:
        text = f"{form.opening}[{', '.join(texts)}]{form.closing}"
    else:
        gap = form.gap
        text = gap.join(f"{form.opening}{gap}{each}{gap}{form.closing}" for each in texts)
    expected = [(call[0], body) for call, body in zip(calls, bodies, strict=True)]
    assert streamed(form, list(text), True) == read(form, text, True) == (None, expected)
    assert read(form, text) == (None, expected)
    partly = text[:end]
    content, found = read(form, partly, True)
    assert streamed(form, list(partly), True) == (content, found)
    for at, (function, arguments) in enumerate(found):
        whole = expected[at]
        assert function == whole[0]
        assert arguments == whole[1] or (at == len(found) - 1 and whole[1].startswith(arguments))


def test_arguments_that_a_grammar_holds_come_in_parts() -> None:
    writer = MessageWriter(use_of(HERMES, must_call=True))
    deltas = [writer.push(c, ended=False) for c in f"<tool_call>\n{CALL}\n</tool_call>"]
    told_parts = [delta for delta in deltas if delta]
    first = told_parts[0]["tool_calls"][0]
    assert (first["function"]["name"], first["function"]["arguments"]) == ("f", "")
    assert len(told_parts) == 1 + len(F[1])


def test_a_format_is_known_by_its_template() -> None:
    templates = {
        "{% if tools %}<tools>{% endif %}<tool_call>": HERMES,
        "{% if tools is not none %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]": MISTRAL,
        """{% if tools %}Environment: ipython{% endif %}"parameters": """: LLAMA,
        "{% if 'tools' in message %}<|tool|>{{ message['tools'] }}{% endif %}": PHI,
        "{% for m in messages %}{{ m.content }}{% endfor %}": GENERIC,
        # Calls that are no JSON are asked for in our words.
        "{% if tools %}<tool_call><function=name>{% endif %}": GENERIC,
        "{% if tools %}[TOOL_CALLS]name[ARGS]{% endif %}": GENERIC,
        "{% if tools %}<start_function_call>{% endif %}": GENERIC,
    }
    for template, form in templates.items():
        assert format_of(template) is form, template
    assert format_of(None) is GENERIC
