"""What a conversation is, as chat templates know it: checked, plain, and no more than that.

Knows messages, tool calls and their fields; knows no template and no token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from foredraft.core.errors import InvalidRequest

Message = Mapping[str, Any]
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
# What a message may have beside role and content. A system message's `tools` is their text, for
# templates that look for it there.
_MORE = {"assistant": ("tool_calls",), "tool": ("name", "tool_call_id"), "system": ("tools",)}


def checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as plain dictionaries: `role`, `content` (text; parts are joined), and where they
    are given `tool_calls` (of the assistant, arguments as objects), `tool_call_id` and `name` (of a
    tool's answer) and `tools` (of the system).

    Raises InvalidRequest that names the message and what is wrong with it.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequest(
            "messages must be a list of at least one message, each with role and content; got "
            f"{_short(messages)}"
        )
    return [_checked(message, index) for index, message in enumerate(messages)]


def check_text(text: str, name: str) -> None:
    """Raise InvalidRequest for half of a surrogate pair: it has no UTF-8, and so no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name} holds {text[error.start]!r} at character {error.start}, half of a surrogate "
            "pair: no text that can be encoded"
        ) from error


def _checked(message: Message, index: int) -> dict[str, Any]:
    name = f"message {index}"
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{name} is a {type(message).__name__}, expected role and content")
    role, content = message.get("role"), message.get("content")
    more = _MORE.get(role, ()) if isinstance(role, str) else ()
    unknown = sorted(repr(key) for key in set(message) - {"role", "content", *more})
    if unknown:
        known = ", ".join(repr(key) for key in ("role", "content", *more))
        raise InvalidRequest(f"{name} has {unknown[0]}; supported are {known}")
    # The role goes through the template unmarked: hence only letters, digits, '_' and '-'.
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidRequest(f"{name} has role {role!r}; expected a word such as 'user'")
    checked: dict[str, Any] = {"role": role}
    if "tool_calls" in message:
        checked["tool_calls"] = _tool_calls(message["tool_calls"], name)
        content = "" if content is None else content
    if isinstance(content, list):
        content = "".join(_text_part(part, name) for part in content)
    texts = {"content": content, **{key: message[key] for key in more if key in message}}
    texts.pop("tool_calls", None)
    for key, text in texts.items():
        if not isinstance(text, str):
            raise InvalidRequest(f"{name} has {key} of type {type(text).__name__}; expected text")
        check_text(text, f"{name}'s {key}")
    return checked | texts


def _tool_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes) or not calls:
        raise InvalidRequest(f"{name} has tool_calls {_short(calls)}; expected a list of calls")
    return [_tool_call(call, f"{name}'s tool_calls[{at}]") for at, call in enumerate(calls)]


def _tool_call(call: Any, name: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{name} is {_short(call)}; expected a function with its name")
    arguments = function.get("arguments")
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"{name} has arguments {_short(arguments)}; expected an object")
    checked = {"name": function["name"], "arguments": dict(arguments)}
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    for text in texts_in([checked, identity]):
        check_text(text, name)
    return {**identity, "type": "function", "function": checked}


def texts_in(value: Any) -> list[str]:
    """All texts in a value of lists and objects, keys included."""
    found: list[str] = []
    rest = [value]
    while rest:
        each = rest.pop()
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, Mapping):
            rest += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            rest += each
    return found


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _text_part(part: Any, name: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise InvalidRequest(f"{name} has a content part {kind!r}; supported is 'text'")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} has a text part whose text is a {type(text).__name__}")
    return text
