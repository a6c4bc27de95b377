"""Messages with tool calls, before any template: what is taken, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.core.errors import InvalidRequest
from foredraft.models.chat_messages import checked_messages, texts_in

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": [1, "é"]}}}


def test_a_conversation_with_calls_and_results_is_taken() -> None:
    messages = [
        {"role": "system", "content": "s", "tools": "[]"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": [{"type": "text", "text": "1"}], "tool_call_id": "a",
         "name": "f"},
    ]  # fmt: skip
    checked = checked_messages(messages)
    assert checked[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert checked[2] == {"role": "tool", "content": "1", "tool_call_id": "a", "name": "f"}
    assert checked[0] == messages[0]


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "user", "content": "", "tool_calls": [CALL]}, "'tool_calls'"),
        ({"role": "assistant", "content": "", "tool_call_id": "a"}, "'tool_call_id'"),
        ({"role": "assistant", "tool_calls": []}, "expected a list of calls"),
        ({"role": "assistant", "tool_calls": "f()"}, "expected a list of calls"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [CALL, {"function": {"name": "f"}}]}, "tool_calls[1]"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            "expected an object",
        ),
        (
            {"role": "assistant", "tool_calls": [
                {"function": {"name": "f", "arguments": {"\ud800": 1}}}]},
            "surrogate",
        ),
        ({"role": "tool", "content": "1", "tool_call_id": 7}, "tool_call_id of type int"),
        ({"role": "system", "content": "s", "tools": []}, "tools of type list"),
    ],
)  # fmt: skip
def test_what_is_no_call_or_result_is_named(message: Any, complaint: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked_messages([message])
    assert "message 0" in str(caught.value)
    assert complaint in str(caught.value)


def test_all_texts_of_a_value_are_found() -> None:
    value = {"a": ["b", {"c": "d"}, 1, None, ("e",)], "f": {}}
    assert sorted(texts_in(value)) == list("abcdef")
