"""A conversation with tools as a model reads it.

Knows formats, messages and a tokenizer's chat template. Templates that know of tools write them;
for the others we do, as text of messages, which never becomes a special token.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from foredraft.core.errors import InvalidRequest
from foredraft.models.tokenizer import Tokenizer
from foredraft.server.tools.choice import Function
from foredraft.server.tools.formats import LLAMA, MISTRAL, PHI, ToolFormat

Messages = Sequence[dict[str, Any]]
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
# What a model is told that has no words of its own for tools.
PREAMBLE = """You can call functions. Each is described by one line of JSON:
<tools>
{tools}
</tools>
To call one, write nothing but its name and arguments, like this:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>
Write one such block for each call. You will be told the results inside <tool_response> tags.
Where no function helps, answer in plain words."""


def prompt_ids(
    tokenizer: Tokenizer,
    messages: Messages,
    form: ToolFormat,
    functions: Sequence[Function],
    add_generation_prompt: bool,
) -> list[int]:
    """Token ids of `messages` (as `conversation` gives them) and the functions that may be called.

    Raises as `Tokenizer.apply_chat_template`.
    """
    if form.by_template:
        tools = [function.told() for function in functions] or None
        fitted = _fitted(messages, form)
        return tokenizer.apply_chat_template(fitted, add_generation_prompt, tools)
    if form is PHI:
        phi = [_as_text(message, form) for message in _with_tools(messages, functions)]
        return tokenizer.apply_chat_template(phi, add_generation_prompt)
    told = _merged([_as_text(message, form) for message in messages])
    if not functions:
        return tokenizer.apply_chat_template(told, add_generation_prompt)
    lines = "\n".join(json.dumps(each.told(), ensure_ascii=False) for each in functions)
    preamble = PREAMBLE.format(tools=lines)
    try:
        system = _led_by(told, "system", preamble)
        return tokenizer.apply_chat_template(system, add_generation_prompt)
    except InvalidRequest:
        # Some templates know no system message. Where the fault is another, it is told again.
        if told[0]["role"] != "user":
            raise
        first = _led_by(told, "user", preamble)
        return tokenizer.apply_chat_template(first, add_generation_prompt)


def _led_by(messages: Messages, role: str, text: str) -> list[dict[str, Any]]:
    """`messages` with `text` in the first one, which is of `role`; a system's stands first."""
    first, rest = messages[0], list(messages[1:])
    if first["role"] != role:
        return [{"role": role, "content": text}, first, *rest]
    parts = (first["content"], text) if role == "system" else (text, first["content"])
    content = "\n\n".join(part for part in parts if part)
    return [{"role": role, "content": content}, *rest]


def _with_tools(messages: Messages, functions: Sequence[Function]) -> list[dict[str, Any]]:
    """The system message has the tools' text, as Phi-4-mini's template expects it."""
    if not functions:
        return list(messages)
    told = [function.told()["function"] for function in functions]
    led = _led_by(messages, "system", "")
    return [{**led[0], "tools": json.dumps(told, ensure_ascii=False)}, *led[1:]]


def _as_text(message: dict[str, Any], form: ToolFormat) -> dict[str, Any]:
    """Calls and their results as text of the format."""
    if message["role"] == "tool":
        if form is PHI:
            return {"role": "tool_response", "content": message["content"]}
        result = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": result, "result": True}
    if "tool_calls" not in message:
        return message
    calls = [
        f"{form.header(function['name'])}{_json(function['arguments'])}}}"
        for function in (call["function"] for call in message["tool_calls"])
    ]
    if form.is_list:
        text = f"{form.opening}[{', '.join(calls)}]{form.closing}"
    else:
        gap = form.gap
        text = gap.join(f"{form.opening}{gap}{call}{gap}{form.closing}" for call in calls)
    content = "\n".join(part for part in (message["content"], text) if part)
    return {"role": "assistant", "content": content}


def _merged(messages: Messages) -> list[dict[str, Any]]:
    """Results of calls that were made together are one message: some templates want users and
    assistants to take turns.
    """
    merged: list[dict[str, Any]] = []
    follows = False
    for message in messages:
        is_result = "result" in message
        if is_result and follows:
            merged[-1]["content"] += f"\n{message['content']}"
        else:
            merged.append({key: value for key, value in message.items() if key != "result"})
        follows = is_result
    return merged


def _fitted(messages: Messages, form: ToolFormat) -> Messages:
    """Messages as the templates of a format take them."""
    if form is MISTRAL:
        return [_with_short_ids(message) for message in messages]
    if form is LLAMA:  # of one call a message
        return [part for message in messages for part in _by_call(message)]
    return messages


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" in message:
        calls = [{**call, "id": _short_id(call["id"])} for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    if "tool_call_id" in message:
        return {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    return message


def _short_id(identity: str) -> str:
    """Mistral's ids are nine letters and digits; others become such, equal ones equal."""
    if _MISTRAL_ID.fullmatch(identity):
        return identity
    return hashlib.sha256(identity.encode()).hexdigest()[:9]


def _by_call(message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls", [])
    if len(calls) < 2:
        return [message]
    return [
        {**message, "content": "" if at else message["content"], "tool_calls": [call]}
        for at, call in enumerate(calls)
    ]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
