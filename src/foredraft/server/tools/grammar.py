"""The grammar of answers that may, or must, call functions.

Knows formats and JSON schemas, and writes Lark as llguidance reads it; knows no matcher.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from foredraft.core.errors import InvalidRequest
from foredraft.core.structured_outputs import StructuredOutputs
from foredraft.grammar.compiler import BLANKS, GrammarCompiler
from foredraft.server.errors import APIError
from foredraft.server.tools.choice import Function, ToolUse
from foredraft.server.tools.formats import ToolFormat

ControlId = Callable[[str], int | None]
_OBJECT = {"type": "object"}
BLAME_SECONDS = 2.0  # for finding the function whose schema is at fault
# Calls of one answer that must call: small models find no end of them.
MOST_CALLS = 32


def answer_grammar(use: ToolUse, control_id: ControlId) -> StructuredOutputs:
    """What holds an answer to its calls. `control_id`: of control tokens, which a grammar names by
    number.

    Where an answer has to call, it is its calls and nothing else, and arguments fit their schemas.
    Where it may, text is free up to an opening; then a call of one of the functions has to follow,
    with arguments that fit where the function is strict, and are an object elsewhere.

    Raises InvalidRequest for schemas that are too large.
    """
    form = use.form
    calls = [f"call_{number}" for number in range(len(use.callable))]
    lines = [
        f"start: {_start(use, control_id)}",
        f"call: {' | '.join(calls)}",
        *_blocks(form, control_id, use.may_repeat),
    ]
    for number, function in enumerate(use.callable):
        header = json.dumps(form.header(function.name))
        lines.append(f'{calls[number]}: {header} arguments_{number} "}}"')
        schema = held_schema(function) if use.must_call or function.is_strict else _OBJECT
        lines.append(f"arguments_{number}: %json {_inline(schema)}")
    return StructuredOutputs(grammar="\n".join(lines))


def held_schema(function: Function) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object whatever else it says."""
    return {**function.parameters, "type": "object"}


def check_grammar(use: ToolUse, structured: StructuredOutputs, compiler: GrammarCompiler) -> None:
    """Raise APIError where `structured`, the grammar of `use`, can't be compiled: it names the
    function at fault.
    """
    try:
        compiler.compile(structured)
    except InvalidRequest as error:
        deadline = time.monotonic() + BLAME_SECONDS
        for function in use.callable:
            if time.monotonic() < deadline:
                _check_function(function, compiler)
        reason = str(error).removeprefix("structured_outputs.grammar ")
        raise APIError(400, f"tools: together they {reason}", param="tools") from None


def _check_function(function: Function, compiler: GrammarCompiler) -> None:
    field = f"tools.{function.place}.function.parameters"
    try:
        compiler.compile(StructuredOutputs(json=held_schema(function)))
    except InvalidRequest as error:
        reason = str(error).removeprefix("structured_outputs.json ")
        raise APIError(400, f"{field} {reason}", param=field) from None


def _start(use: ToolUse, control_id: ControlId) -> str:
    form = use.form
    if use.must_call:
        again = f" ({_text(form.gap)} block){{0,{MOST_CALLS - 1}}}"
        return f"block{again}" if use.may_repeat and form.opening and not form.is_list else "block"
    if not form.opening:
        return "block | text |"
    if use.may_repeat and not form.is_list:
        return (
            "(opened rest)* text?" if control_id(form.opening) is None else "(text? block)* text?"
        )
    return "opened rest | text |" if control_id(form.opening) is None else "text? block | text |"


def _blocks(form: ToolFormat, control_id: ControlId, may_repeat: bool) -> list[str]:
    """Rules: a whole block of calls, one behind an opening in free text, and free text."""
    if not form.opening:
        return ["block: call", r"text: /[ \t\r\n]*[^ \t\r\n{](?s:.*)/"]
    gap = f"{_text(form.gap)} " if form.gap else ""
    inner = f"{gap}call {gap}"
    if form.is_list:
        more = f'(", " call){{0,{MOST_CALLS - 1}}} ' if may_repeat else ""
        inner = f'" "? "[" call {more}"]" '
    rest = f"{inner}{_token(form.closing, control_id)}".rstrip()
    opening = _token(form.opening, control_id)
    rules = [f"rest: {rest}", f"block: {opening} rest"]
    if control_id(form.opening) is not None:
        return [*rules, "text: /(?s:.+)/"]
    spelled = _expression(form.opening)
    without = f"/(?s:.+)/ & ~/(?s:.*){spelled}(?s:.*)/"
    return [*rules, f"opened[lazy]: /(?s:.*){spelled}/", "text: TEXT", f"TEXT: {without}"]


def _token(text: str, control_id: ControlId) -> str:
    """A text that may be a control token."""
    token = control_id(text)
    return _text(text) if token is None else f"<[{token}]>"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _expression(text: str) -> str:
    """A regular expression of `text` between slashes."""
    return "".join(c if c.isalnum() or c in "<>_" else f"\\{c}" for c in text)


def _inline(schema: Mapping[str, Any]) -> str:
    """On one line, with JSON's blanks bounded as elsewhere."""
    text = StructuredOutputs(json={**schema, "x-guidance": {"whitespace_pattern": BLANKS}}).json
    return str(text)
