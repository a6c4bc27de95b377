"""What grammars of calls let through, and that what they let through is read as those calls."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from foredraft.grammar.compiler import GrammarCompiler
from foredraft.server.errors import APIError
from foredraft.server.schemas import ChatRequest
from foredraft.server.tools.choice import ToolUse, tool_use
from foredraft.server.tools.formats import format_of
from foredraft.server.tools.grammar import answer_grammar, check_grammar
from foredraft.server.tools.message import MessageWriter

from .byte_model import CONTROLS, TEMPLATES, byte_tokenizer

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PARIS, NONE = {"city": 'a {b} "c" é\n<tool_call>'}, {}
FORMS = list(TEMPLATES)
END = 1


@functools.cache
def compiler(form: str) -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer(TEMPLATES[form]), len(CONTROLS) + 256)


def use_of(form: str, strict: bool = False, **fields: Any) -> ToolUse:
    tools = [
        {"name": "weather", "parameters": CITY, "strict": strict},
        {"name": "now"},
    ]
    request = ChatRequest(
        model="m",
        messages=[{"role": "user", "content": "x"}],
        tools=[{"type": "function", "function": each} for each in tools],
        **fields,
    )
    use = tool_use(request, format_of(TEMPLATES[form]))
    assert use is not None
    return use


def written(use: ToolUse, *calls: tuple[str, Any]) -> str:
    """The text of calls, as a model of the format writes it."""
    form = use.form
    texts = [
        f"{form.header(name)}{json.dumps(arguments, ensure_ascii=False)}}}"
        for name, arguments in calls
    ]
    if form.is_list:
        return f"{form.opening}[{', '.join(texts)}]{form.closing}"
    gap = form.gap
    return gap.join(f"{form.opening}{gap}{text}{gap}{form.closing}" for text in texts)


def follows(use: ToolUse, form: str, text: str) -> tuple[bool, bool]:
    """Whether the grammar follows `text`, and whether the answer may end behind it."""
    tokenizer = byte_tokenizer(TEMPLATES[form])
    grammar = compiler(form).compile(answer_grammar(use, tokenizer.control_id))
    matcher = grammar.matcher([END])
    for token in tokenizer.encode_with_special(text):
        if not matcher.mask()[token] or not matcher.accept(token):
            return False, False
    return True, bool(matcher.can_end)


def calls_of(use: ToolUse, text: str) -> tuple[str | None, list[tuple[str, Any]]]:
    message = MessageWriter(use).message(text)
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return message["content"], [(f["name"], json.loads(f["arguments"])) for f in functions]


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_that_must_call_is_calls_and_nothing_else(form: str) -> None:
    use = use_of(form, tool_choice="required")
    for calls in ([("weather", PARIS)], [("now", NONE)], [("weather", PARIS), ("now", NONE)]):
        if form == "llama" and len(calls) > 1:
            continue
        text = written(use, *calls)
        assert follows(use, form, text) == (True, True)
        assert calls_of(use, text) == (None, calls)
    for wrong in (
        f"Well, {written(use, ('now', NONE))}",
        written(use, ("other", NONE)),
        written(use, ("weather", {"city": 1})),
        written(use, ("weather", NONE)),
        written(use, ("now", PARIS)),
        written(use, ("weather", [])),
        f"{written(use, ('now', NONE))} bye",
    ):
        assert follows(use, form, wrong) == (False, False), wrong
    assert follows(use, form, "") == (True, False)


@pytest.mark.parametrize("form", FORMS)
def test_a_named_function_is_called_once(form: str) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    use = use_of(form, tool_choice=choice)
    assert follows(use, form, written(use, ("weather", PARIS))) == (True, True)
    assert follows(use, form, written(use, ("now", NONE))) == (False, False)
    twice = written(use, ("weather", PARIS), ("weather", PARIS))
    assert follows(use, form, twice) == (False, False)


@pytest.mark.parametrize("form", FORMS)
def test_strict_functions_are_held_to_their_schema_once_a_call_opens(form: str) -> None:
    use = use_of(form, strict=True)
    assert use.is_held
    call, before = written(use, ("weather", PARIS)), "" if form == "llama" else "A < b\n[1] {x} "
    for text in ("", "Plain words {}<tool", call, before + call, f"{before}and no call"):
        assert follows(use, form, text) == (True, True), text
    assert calls_of(use, before + call) == (before.rstrip() or None, [("weather", PARIS)])
    # Only what is strict is held to its schema; the others' arguments are an object.
    assert follows(use, form, before + written(use, ("now", PARIS))) == (True, True)
    for arguments in ({"city": 1}, {}):
        assert follows(use, form, before + written(use, ("weather", arguments)))[0] is False
    assert follows(use, form, before + written(use, ("other", NONE)))[0] is False
    if form in ("hermes", "generic"):
        again = f"{call}\nand\n{call} bye"
        assert follows(use, form, again) == (True, True)
        assert calls_of(use, again) == ("\nand\n bye", [("weather", PARIS)] * 2)


@pytest.mark.parametrize("form", FORMS)
def test_without_parallel_calls_the_first_ends_the_answer(form: str) -> None:
    use = use_of(form, parallel_tool_calls=False)
    call = written(use, ("weather", PARIS))
    assert follows(use, form, call) == (True, True)
    assert follows(use, form, "no call") == (True, True)
    for more in (f"{call} and", f"{call}\n{call}", written(use, ("now", NONE), ("now", NONE))):
        assert follows(use, form, more)[0] is False


def test_references_inside_a_schema_are_its_own() -> None:
    parameters = {
        "$defs": {"word": {"enum": ["a", "b"]}},
        "properties": {"x": {"$ref": "#/$defs/word"}},
        "required": ["x"],
    }
    request = ChatRequest(
        model="m",
        messages=[{"role": "user", "content": "x"}],
        tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        tool_choice="required",
    )
    use = tool_use(request, format_of(TEMPLATES["hermes"]))
    assert use is not None
    assert follows(use, "hermes", written(use, ("f", {"x": "a"}))) == (True, True)
    assert follows(use, "hermes", written(use, ("f", {"x": "c"})))[0] is False


@pytest.mark.parametrize(
    "wrong",
    [
        {"properties": {"a": {"type": "string", "pattern": "("}}},
        {"not": {"required": ["a"]}},
        {"properties": {"a": {"$ref": "https://example.org/a"}}, "required": ["a"]},
    ],
)
def test_a_schema_that_cannot_be_held_to_is_told_by_its_place(wrong: dict[str, Any]) -> None:
    request = ChatRequest(
        model="m",
        messages=[{"role": "user", "content": "x"}],
        tools=[
            {"type": "function", "function": {"name": "fine"}},
            {"type": "function", "function": {"name": "f", "parameters": wrong}},
        ],
        tool_choice="required",
    )
    use = tool_use(request, format_of(TEMPLATES["hermes"]))
    assert use is not None
    structured = answer_grammar(use, lambda _: None)
    with pytest.raises(APIError) as refused:
        check_grammar(use, structured, compiler("hermes"))
    assert refused.value.param == "tools.1.function.parameters"
    assert "can't be used" in refused.value.message
