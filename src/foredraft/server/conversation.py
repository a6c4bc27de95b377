"""A request's messages as chat templates know them.

Knows OpenAI's messages; knows no template. What a message has and lacks by its role is checked
here, and that a tool's answer belongs to a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foredraft.server.errors import APIError
from foredraft.server.json_body import JSONRefusedError, parse_text
from foredraft.server.schemas import ChatMessage, Text, ToolCall


def conversation(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """OpenAI's "developer" is templates' "system"; arguments of calls become objects. A tool's
    answer has the `name` of its function. Raises APIError that names the field.
    """
    names: dict[str, str] = {}  # of the functions called so far, by the calls' ids
    told = []
    for at, message in enumerate(messages):
        place = f"messages.{at}"
        _check_fields(message, place)
        each: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": "" if message.content is None else joined(message.content),
        }
        if message.tool_calls is not None:
            names |= {call.id: call.function.name for call in message.tool_calls}
            each["tool_calls"] = [
                _call(call, f"{place}.tool_calls.{number}")
                for number, call in enumerate(message.tool_calls)
            ]
        if message.tool_call_id is not None:
            if message.tool_call_id not in names:
                raise APIError(
                    400,
                    f"{place}.tool_call_id: no message before has a call with the id "
                    f"{message.tool_call_id[:60]!a}",
                    param=f"{place}.tool_call_id",
                )
            each["tool_call_id"] = message.tool_call_id
            each["name"] = names[message.tool_call_id]
        told.append(each)
    return told


def joined(text: Text) -> str:
    """The text of all parts."""
    return text if isinstance(text, str) else "".join(part.text for part in text)


def _check_fields(message: ChatMessage, place: str) -> None:
    owners = {"tool_calls": "assistant", "tool_call_id": "tool", "name": "tool"}
    for field, owner in owners.items():
        if getattr(message, field) is not None and message.role != owner:
            raise APIError(
                400,
                f"{place}.{field} is not supported: it belongs to messages of role {owner!r}",
                param=f"{place}.{field}",
                code="unsupported_field",
            )
    missing = "content" if message.content is None and message.tool_calls is None else None
    if message.role == "tool" and message.tool_call_id is None:
        missing = "tool_call_id"
    if missing is not None:
        param = f"{place}.{missing}"
        raise APIError(400, f"{param} is missing", param=param, code="missing_field")


def _call(call: ToolCall, place: str) -> dict[str, Any]:
    field, text = f"{place}.function.arguments", call.function.arguments
    try:
        arguments = parse_text(text) if text.strip() else {}
    except JSONRefusedError as error:
        raise APIError(400, f"{field} {error}", param=field) from None
    if not isinstance(arguments, dict):
        raise APIError(400, f"{field} must be a JSON object, got {text[:60]!a}", param=field)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
