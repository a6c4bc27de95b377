"""How a server ends: by SIGTERM under load, at its drain's limit, by a second signal, by SIGKILL;
and how it starts after that.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from foredraft import LLM, SamplingParams
from foredraft.cli.main import main

from .test_serve import PATIENCE, served

JSON = {"content-type": "application/json"}
PATH = "/v1/completions"
DONE = b"data: [DONE]\n\n"


def fields(max_tokens: int = 200, **more: Any) -> str:
    common = {"model": "tiny", "prompt": "ab ab ab", "temperature": 0, "ignore_eos": True}
    return json.dumps({**common, "max_tokens": max_tokens, **more})


def connect(said: dict[str, Any]) -> HTTPConnection:
    parts = urlsplit(said["url"])
    return HTTPConnection(str(parts.hostname), parts.port, timeout=PATIENCE)


def ask(said: dict[str, Any], body: str) -> HTTPResponse:
    """An answer on a connection of its own; a stream has begun when this returns."""
    connection = connect(said)
    connection.request("POST", PATH, body, JSON)
    return connection.getresponse()


def events(data: bytes) -> list[Any]:
    """What a stream said; it came to its end."""
    assert data.endswith(DONE)
    lines = data.removesuffix(DONE).decode().split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


@contextmanager
def half_sent(said: dict[str, Any], body: str) -> Iterator[socket.socket]:
    """A request on its way, whose body does not come."""
    parts = urlsplit(said["url"])
    address = (str(parts.hostname), int(parts.port or 0))
    with socket.create_connection(address, timeout=PATIENCE) as sock:
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body[:10].encode())
        # What is asked later is answered later: the request has arrived.
        connection = connect(said)
        connection.request("GET", "/v1/models")
        connection.getresponse().read()
        yield sock


@contextmanager
def unread(said: dict[str, Any]) -> Iterator[socket.socket]:
    """A long answer that nobody reads yet: the drain lasts until it is read."""
    parts = urlsplit(said["url"])
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(PATIENCE)
        sock.connect((str(parts.hostname), int(parts.port or 0)))
        body = fields(240, n=4, stream=True, logprobs=5, return_token_ids=True)
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        sock.sendall((head + body).encode())
        assert sock.recv(12) == b"HTTP/1.1 200"
        yield sock


def read_all(sock: socket.socket) -> bytes:
    parts = []
    while data := sock.recv(1 << 16):
        parts.append(data)
    return b"".join(parts)


def test_under_load_running_answers_finish_and_new_ones_are_refused(tiny: Path) -> None:
    arguments = (tiny, "--served-model-name", "tiny", "--method", "ngram", "--max-num-seqs", "4")
    with (
        served(*arguments) as (process, said),
        half_sent(said, fields(20)) as half,
        unread(said) as long,
    ):
        kept, whole = connect(said), connect(said)
        kept.request("GET", "/ready")
        assert kept.getresponse().read()
        whole.request("POST", PATH, fields(), JSON)
        streams = [ask(said, fields(stream=True)) for _ in range(12)]  # most of them wait
        process.send_signal(signal.SIGTERM)
        # One connection, whose requests are refused one after the other.
        large = json.dumps({"prompt": "x" * 3_000_000})
        refusals = (("POST", PATH, fields(1)), ("POST", PATH, large), ("GET", "/ready", None))
        until_draining(kept)
        for method, path, body in refusals:
            kept.request(method, path, body, JSON)
            answer = kept.getresponse()
            assert (answer.status, answer.getheader("retry-after")) == (503, "5")
            assert json.loads(answer.read())["error"]["code"] == "unavailable"
        kept.request("GET", "/health")
        assert kept.getresponse().status == 200
        told = [events(stream.read()) for stream in streams]
        answer = whole.getresponse()
        assert answer.status == 200
        texts = [json.loads(answer.read())["choices"][0]["text"]]
        texts += ["".join(c["text"] for each in one for c in each["choices"]) for one in told]
        # Nobody waits for what has only begun to arrive; what is read slowly is read to its end.
        assert_refused(read_all(half))
        assert DONE in read_all(long)
        assert process.wait(PATIENCE) == 0
        assert process.stderr is not None
        said_last = process.stderr.read()
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    assert set(texts) == {LLM(tiny).generate("ab ab ab", params)[0].text}
    assert "Traceback" not in said_last
    assert " ERROR " not in said_last


def assert_refused(answer: bytes) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.splitlines()[0] == b"HTTP/1.1 503 Service Unavailable"
    assert b"retry-after: 5" in head.splitlines()
    assert json.loads(body)["error"]["code"] == "unavailable"


def until_draining(connection: HTTPConnection) -> None:
    """Wait until the signal has been taken."""
    status = 200
    while status == 200:
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        answer.read()
        status = answer.status
    assert status == 503


def test_a_body_that_does_not_come_delays_no_drain(tiny: Path) -> None:
    """Nothing else is open: the server has no reason to wait for its client's 30 seconds."""
    with served(tiny, "--no-speculation") as (process, said), half_sent(said, fields()) as sock:
        process.send_signal(signal.SIGTERM)
        assert_refused(read_all(sock))
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize("signals", [1, 2], ids=["the drain's limit", "a second signal"])
def test_what_ends_early_says_so(signals: int, tiny: Path) -> None:
    limit = "0.2" if signals == 1 else "60"
    arguments = (tiny, "--served-model-name", "tiny", "--no-speculation", "--drain-timeout", limit)
    with served(*arguments) as (process, said), half_sent(said, fields()) as sock:
        whole = connect(said)
        streams = [ask(said, fields(240, n=8, stream=True)) for _ in range(30)]
        whole.request("POST", PATH, fields(240, n=8), JSON)
        process.send_signal(signal.SIGTERM)
        if signals == 2:
            until_draining(connect(said))
            process.send_signal(signal.SIGINT)
        ends = [events(stream.read())[-1] for stream in streams]
        answer = whole.getresponse()
        assert answer.status == 503
        assert "error" in json.loads(answer.read())
        assert_refused(read_all(sock))
        assert process.wait(PATIENCE) == 0
        assert process.stderr is not None
        said_last = process.stderr.read()
    errors = [end["error"]["code"] for end in ends if "error" in end]
    assert len(errors) > 1
    assert set(errors) == {"unavailable"}
    assert "are open still and are ended" in said_last
    assert "Traceback" not in said_last


def test_a_killed_server_starts_again_on_its_port(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With its measured costs half written, as a machine that stops leaves them."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    config = '{"method": "combined", "policy": "adaptive"}'
    arguments = (tiny, "--served-model-name", "tiny", "--speculative-config", config)
    body = fields(100, temperature=0.8, seed=3)
    with served(*arguments) as (process, said):
        text = json.loads(ask(said, body).read())["choices"][0]["text"]
        port = int(urlsplit(said["url"]).port or 0)
        assert main(["serve", str(tiny), "--port", str(port)]) == 2  # the port is taken
        assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err
        streams = [ask(said, fields(240, stream=True, n=8)) for _ in range(4)]
        os.kill(process.pid, signal.SIGKILL)
        process.wait(PATIENCE)
        for stream in streams:
            with pytest.raises((HTTPException, OSError)):
                stream.read()
    (costs,) = tmp_path.rglob("costs/*.json")
    measured = costs.read_text()
    costs.write_text(measured[: len(measured) // 2])
    (costs.parent / "left.part").write_text(measured[:9])
    with served(*arguments, port=port) as (process, said):
        assert urlsplit(said["url"]).port == port
        assert json.loads(ask(said, body).read())["choices"][0]["text"] == text
        assert set(json.loads(costs.read_text())) == set(json.loads(measured))
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
