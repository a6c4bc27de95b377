"""What no client should send: bodies, framings and manners, drawn by chance.

Knows the protocol's fields and bytes; asks nothing of an answer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .rig import NAME

TEXT = "abc abc "
DEEP = ["[" * 90_000, '{"a":' * 9000 + "1" + "}" * 9000, "{", "1" * 9000, "NaN", "\ud800", "[]"]
CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": TEXT}]}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": NAME, "prompt": TEXT, "max_tokens": 4},
    "/v1/chat/completions": {**CHAT, "max_tokens": 4},
    "/tokenize": {"prompt": TEXT},
    "/detokenize": {"tokens": [3, 4, 5]},
}
MORE: dict[str, Any] = {
    "n": 2, "seed": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "stop": ["b"],
    "logit_bias": {"5": 2.0}, "logprobs": 2, "top_logprobs": 2, "echo": True, "stream": True,
    "stream_options": {"include_usage": True}, "presence_penalty": 0.5, "repetition_penalty": 1.1,
    "frequency_penalty": -0.5, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [7],
    "allowed_token_ids": [3, 4, 5], "banned_token_ids": [6], "prompt_logprobs": 1,
    "return_token_ids": True, "return_token_origins": True, "cache_salt": "a",
    "structured_outputs": {"choice": ["abc", "xyz"]}, "guided_regex": "[a-c]+",
    "response_format": {"type": "json_object"}, "speculation": {"num_speculative_tokens": 2},
    "prediction": {"type": "content", "content": "abc"}, "user": "me", "metadata": {"a": "b"},
    "max_completion_tokens": 3, "add_generation_prompt": False, "request_type": "r",
    "skip_special_tokens": False, "include_stop_str_in_output": True, "suffix": "a",
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": "auto", "parallel_tool_calls": False, "best_of": 2, "prompt": [3, 4, 5],
    "messages": [{"role": "assistant", "content": [{"type": "text", "text": "a"}]}],
}  # fmt: skip
WRONG: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**40, -(10**30), 0.5, -0.0, 1e308, 5e-324, "",
    "x", "\x00", "\u202e\ufeff", "</s><s>", "{{ 7 * 7 }}{% for a in b %}", "../../etc/passwd",
    "x" * 4000, [], {}, [[]], [{}], {"": None}, [None], ["a", 1], [1.5], {"type": "text"},
    {"__class__": "a"}, [[1, 2], [3]], [10**9], ["a"] * 70, list(range(2000)), "tiny ",
]  # fmt: skip
SCHEMAS: list[Any] = [
    {"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"$ref": "http://127.0.0.1:1/x"}, {"type": "nothing"}, {"pattern": "("}, {"enum": []}, False,
    {"type": "string", "pattern": "(a|aa)+$"}, {"minLength": 9, "maxLength": 1}, {"const": 1e400},
    {"properties": {"a" * 5000: {}}}, {"items": 3}, {"anyOf": []}, {"not": {}}, {"type": []},
]  # fmt: skip
GRAMMARS = ["start:", "start: start", "%import a", 'start: "a', "x: /(/"]
PATTERNS = ["(", "[", "a{9999999}", "(?=a)", "\\1", "(a*)*b", "\\p{Foo}", "[z-a]", "a" * 3000, "$"]


@dataclass(frozen=True, slots=True)
class Attack:
    """One request. `declared`: its content-length where that is not the body's."""

    path: str
    body: bytes
    kind: str = "application/json"
    declared: int | None = None
    chunked: bool = False

    def request(self) -> bytes:
        """All bytes of it."""
        length = len(self.body) if self.declared is None else self.declared
        framing, body = f"content-length: {length}", self.body
        if self.chunked:
            framing, parts = "transfer-encoding: chunked", [body[:7], body[7:]]
            body = b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in parts if each)
            body += b"0\r\n\r\n"
        head = f"POST {self.path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
        return f"{head}content-type: {self.kind}\r\n{framing}\r\n\r\n".encode() + body


def attack(chance: random.Random) -> Attack:
    """One of any kind; most are valid requests with a few mistakes."""
    kind = chance.choices(list(_KINDS), weights=[weight for weight, _ in _KINDS.values()])[0]
    return _KINDS[kind][1](chance)


def _mutated(chance: random.Random) -> Attack:
    """Fields added, removed, or given a wrong value."""
    path = chance.choice(list(PATHS))
    return Attack(path, _bytes(_changed(chance, path)), chunked=chance.random() < 0.1)


def _changed(chance: random.Random, path: str) -> dict[str, Any]:
    body: dict[str, Any] = dict(PATHS[path])
    for _ in range(chance.randrange(4)):
        name = chance.choice([*MORE, *body] if "model" in body else list(body) or ["a"])
        if name in body and chance.random() < 0.15:
            del body[name]
        else:
            body[name] = MORE[name] if name in MORE and chance.random() < 0.7 else _wrong(chance)
    return body


def _wrong(chance: random.Random) -> Any:
    value = chance.choice(WRONG)
    if chance.random() < 0.2:
        return {chance.choice(["type", "content", "json", "regex", "enabled", "text"]): value}
    return [value] if chance.random() < 0.1 else value


def _bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


def _spoilt(chance: random.Random) -> Attack:
    """Single bytes changed, put in or taken out."""
    found = _mutated(chance)
    data = bytearray(found.body)
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(data))
        data[at : at + chance.randrange(2)] = bytes([chance.randrange(256)])
    return Attack(found.path, bytes(data))


def _cut(chance: random.Random) -> Attack:
    found = _mutated(chance)
    return Attack(found.path, found.body[: chance.randrange(len(found.body))])


def _lying(chance: random.Random) -> Attack:
    """Another length than the body's; what is more is no request either."""
    found = _mutated(chance)
    return Attack(found.path, found.body, declared=chance.randrange(len(found.body)))


def _typed(chance: random.Random) -> Attack:
    kind = chance.choice(
        ["text/plain", "", "application/xml", "application/json; charset=utf-16", "application/*",
         "multipart/form-data; boundary=a", "application/x-www-form-urlencoded", "a" * 3000]
    )  # fmt: skip
    return Attack(chance.choice(list(PATHS)), _mutated(chance).body, kind)


def _literal(chance: random.Random) -> Attack:
    """What JSON is not, or what two readers may read differently, as a field's value."""
    value = chance.choice(
        [b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"01", b"+1", b"0x1", b"'a'", b'"\\ud800"',
         b'"\\udfff\\ud800"', b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"a\nb"', b'"\\q"', b"/**/1",
         b"[" * 3000, b"[" * 127 + b"]" * 127, b'{"a":' * 500 + b"1" + b"}" * 500, b"1e-999",
         b'{"a":1,"a":2}', b"tru", b"[1,]", b'"\x00"', b"\xef\xbb\xbf1", b"1" + b"0" * 31]
    )  # fmt: skip
    path = chance.choice(list(PATHS))
    name = chance.choice([*MORE, *PATHS[path]])
    body = _bytes(PATHS[path])
    return Attack(path, body[:-1] + b', "%s": %s}' % (name.encode(), value))


def _large(chance: random.Random) -> Attack:
    """Beyond a limit: of bytes, of tokens, of items."""
    body = chance.choice(
        [b"{" * 400_000, b" " * 300_000, _bytes({"prompt": "a" * 200_000}),
         _bytes({"tokens": [1] * 60_000}), _bytes(CHAT | {"messages": CHAT["messages"] * 2000}),
         _bytes({f"a{i}": i for i in range(9000)}),
         _bytes(CHAT | {"logit_bias": {str(i): 1.0 for i in range(2000)}})]
    )  # fmt: skip
    return Attack(chance.choice(list(PATHS)), body)


def _structured(chance: random.Random) -> Attack:
    """Hostile schemas, expressions and grammars."""
    field, value = chance.choice(
        [("structured_outputs", {"json": chance.choice(SCHEMAS)}),
         ("structured_outputs", {"regex": chance.choice(PATTERNS)}),
         ("structured_outputs", {"grammar": chance.choice(GRAMMARS)}),
         ("guided_choice", ["", "a" * 3000]), ("guided_regex", chance.choice(PATTERNS)),
         ("response_format", {"type": "json_schema", "json_schema": {
             "name": "a", "schema": chance.choice(SCHEMAS)}})]
    )  # fmt: skip
    return Attack("/v1/chat/completions", _bytes(CHAT | {"max_tokens": 3, field: value}))


def _called(chance: random.Random) -> Attack:
    """A conversation with calls of tools whose arguments are hostile."""
    call = {
        "id": chance.choice(["a", "", "b"]),
        "type": "function",
        "function": {"name": "f", "arguments": chance.choice([*DEEP, _wrong(chance)])},
    }
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call] * chance.randrange(1, 3)},
        {"role": "tool", "tool_call_id": "a", "content": chance.choice(["1", "", None])},
    ]
    return Attack("/v1/chat/completions", _bytes(CHAT | {"max_tokens": 3, "messages": messages}))


def _noise(chance: random.Random) -> Attack:
    return Attack(chance.choice(list(PATHS)), chance.randbytes(chance.randrange(300)))


_KINDS: dict[str, tuple[int, Callable[[random.Random], Attack]]] = {
    "mutated": (40, _mutated),
    "spoilt": (20, _spoilt),
    "cut": (8, _cut),
    "lying": (5, _lying),
    "typed": (4, _typed),
    "literal": (14, _literal),
    "large": (1, _large),
    "structured": (3, _structured),
    "called": (2, _called),
    "noise": (5, _noise),
}
