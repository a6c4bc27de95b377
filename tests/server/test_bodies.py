"""Bodies that no client should send: refused by one line, never a fault, unnoticed by others."""

from __future__ import annotations

import json
import random
import threading
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.server.errors import APIError
from foredraft.server.json_body import parse_body

from .rig import NAME, Running

BODY = {"model": NAME, "prompt": "abc", "max_tokens": 2}
BAD = {
    "not JSON": b"{",
    "empty": b"",
    "no object": b"[1]",
    "a string": b'"a"',
    "not UTF-8": b'{"model": "\xff"}',
    "a byte order mark": b'\xef\xbb\xbf{"model": "tiny"}',
    "a key twice": b'{"model": "tiny", "prompt": "a", "prompt": "b"}',
    "NaN": b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
    "Infinity": b'{"model": "tiny", "prompt": "a", "temperature": Infinity}',
    "overflow": b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
    "many digits": b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "brackets": b"[" * 100_000,
    "nested": b'{"model": "tiny", "prompt": ' + b"[" * 90 + b"]" * 90 + b"}",
    "nested objects": b'{"a":' * 90 + b"1" + b"}" * 90,
    "half a pair": b'{"model": "tiny", "prompt": "\\ud800"}',
    "half a pair as a name": b'{"model": "tiny", "\\udc00": "a"}',
    "a text for a number": b'{"model": "tiny", "prompt": "a", "temperature": "1"}',
    "a negative id": b'{"model": "tiny", "prompt": [-1]}',
    "an unknown id": b'{"model": "tiny", "prompt": [99999999]}',
    "mixed prompts": b'{"model": "tiny", "prompt": ["a", 1]}',
    "no prompts": b'{"model": "tiny", "prompt": []}',
    "an empty prompt": b'{"model": "tiny", "prompt": [[]]}',
    "a null model": b'{"model": null, "prompt": "a"}',
}


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_body_is_the_clients_mistake(server: Running, name: str) -> None:
    with server.http() as client:
        headers = {"content-type": "application/json"}
        answer = client.post("/v1/completions", content=BAD[name], headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]
    assert len(error["message"]) < 1200


@settings(max_examples=60)
@given(st.binary(max_size=60) | st.text(alphabet='[]{}",:0123456789eE.-\\u dnatrlf', max_size=60))
def test_the_reader_gives_a_value_or_one_kind_of_error(data: bytes | str) -> None:
    raw = data if isinstance(data, bytes) else data.encode()
    with suppress(APIError):
        json.dumps(parse_body(raw), allow_nan=False, ensure_ascii=False).encode()


def test_what_is_valid_is_read_as_json_reads_it() -> None:
    value = {"a": [1, 2.5, None, True, "\u00e9\U0001f600"], "b": {"c": {}}}
    assert parse_body(json.dumps(value).encode()) == value
    assert parse_body(json.dumps(value, ensure_ascii=False).encode()) == value


KEYS = ["model", "prompt", "stop", "n", "seed", "logit_bias", "stream", "logprobs", "foo"]


def _mangled(chance: random.Random) -> tuple[str, bytes]:
    body: dict[str, Any] = dict(BODY)
    for _ in range(chance.randrange(1, 4)):
        key = chance.choice(KEYS)
        body[key] = chance.choice(
            [None, -1, 10**30, 1.5, "", "x" * 300, [], {}, [[]], {"": ""}, True, [1, "a"]]
        )
    data = bytearray(json.dumps(body).encode())
    for _ in range(chance.randrange(3)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    path = chance.choice(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
    return path, bytes(data)


def test_malformed_bodies_disturb_nobody(server: Running) -> None:
    """A well-behaved client beside many bad ones loses nothing; nothing stays behind."""
    chance, wrong = random.Random(8), []
    good: list[str] = []
    done = threading.Event()

    def behave() -> None:
        client = server.openai()
        while not done.is_set() or len(good) < 3:
            found = client.completions.create(model=NAME, prompt="abc", temperature=0)
            good.append(found.choices[0].text)

    thread = threading.Thread(target=behave)
    thread.start()
    with server.http() as client:
        for _ in range(120):
            path, data = _mangled(chance)
            answer = client.post(path, content=data, headers={"content-type": "application/json"})
            if answer.status_code not in (200, 400, 404):
                wrong.append((answer.status_code, data))
    done.set()
    thread.join()
    assert wrong == []
    assert len(set(good)) == 1
    server.wait_until_free()
