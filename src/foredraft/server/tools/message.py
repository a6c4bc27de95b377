"""The assistant's message while it is written: its content, and its calls of tools.

Knows what a parser finds and OpenAI's objects; knows no engine. The deltas of a message, put
together, are the message.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from foredraft.server.tools.choice import ToolUse
from foredraft.server.tools.parsing import (
    Arguments,
    CallBegins,
    Content,
    Found,
    ToolCallParser,
)


class MessageWriter:
    """For one completion: told in parts, or as a whole."""

    def __init__(self, tools: ToolUse | None) -> None:
        self._tools = tools
        self._parser = None
        if tools is not None:
            names = [function.name for function in tools.callable]
            self._parser = ToolCallParser(tools.form, names, tools.is_held)

    @property
    def has_calls(self) -> bool:
        """Whether there are calls, the last one not cut off in its arguments."""
        parser = self._parser
        return parser is not None and parser.num_calls > 0 and not parser.is_open

    def push(self, text: str, ended: bool) -> dict[str, Any]:
        """The delta that `text` adds; `ended`: nothing follows it. Empty where it adds nothing."""
        content, calls = _gathered(self._read(text, ended))
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            delta["tool_calls"] = [{"index": index, **call} for index, call in calls.items()]
        return delta

    def message(self, text: str) -> dict[str, Any]:
        """The whole message of a text."""
        content, calls = _gathered(self._read(text, ended=True))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": list(calls.values())}
        return message

    def _read(self, text: str, ended: bool) -> Sequence[Found]:
        if self._parser is None:
            return [Content(text)]
        return [*self._parser.push(text), *(self._parser.finish() if ended else ())]


def _gathered(found: Sequence[Found]) -> tuple[str, dict[int, dict[str, Any]]]:
    """The content, and what is new of each call by its index."""
    content = ""
    calls: dict[int, dict[str, Any]] = {}
    for each in found:
        if isinstance(each, Content):
            content += each.text
        elif isinstance(each, CallBegins):
            calls[each.index] = {
                "id": new_id(),
                "type": "function",
                "function": {"name": each.name, "arguments": ""},
            }
        elif isinstance(each, Arguments):
            call = calls.setdefault(each.index, {"function": {"arguments": ""}})
            call["function"]["arguments"] += each.text
    return content, calls


def new_id() -> str:
    """A call's name, which its answer repeats."""
    return f"call_{uuid.uuid4().hex[:24]}"
