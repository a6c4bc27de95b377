"""A connection is bounded in time before its request and after its answer, and tells its mistakes
as routes do.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from starlette.responses import Response

from foredraft.server.connection import connections
from foredraft.server.running import open_socket
from foredraft.server.sse import EventStream

from .rig import PATIENCE, Running, until

SECONDS = 0.3
BLOCK = b"a" * (1 << 20)
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"


@contextmanager
def _app(app: Any) -> Iterator[tuple[socket.socket, uvicorn.Server]]:
    """A client of an app, which has little room for what it does not read, and the server."""
    listening = open_socket("127.0.0.1", 0)
    config = uvicorn.Config(
        app, http=connections(SECONDS), ws="none", lifespan="off", log_config=None, access_log=False
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    try:
        until(lambda: server.started)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(PATIENCE)
            client.connect(listening.getsockname())
            yield client, server
    finally:
        server.should_exit = server.force_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


def _read(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    found = b""
    while chunk := client.recv(65536):
        found += chunk
    return found


def _answer(client: socket.socket) -> None:
    """Read one answer of "ok"."""
    found = b""
    while not found.endswith(b"\r\n\r\nok"):
        found += client.recv(1000)
    assert b" 200 OK" in found


def _dribble(client: socket.socket) -> None:
    """A byte now and then. Raises OSError where the server has closed."""
    for _ in range(10_000):
        client.sendall(b"x")
        threading.Event().wait(0.01)


ASKED = b"GET / HTTP/1.1\r\nhost: a\r\n"


@pytest.mark.parametrize("begun", [b"", b"GET / HT", ASKED, ASKED + b"\r\nG"])
def test_a_head_that_does_not_come_is_not_waited_for(begun: bytes) -> None:
    """Also that of a second request; a connection without a request is closed without a word."""
    with _app(Response(b"ok")) as (client, server):
        client.sendall(begun)
        answers = _read(client)
        until(lambda: not server.server_state.connections)
    assert (b"HTTP/1.1 408 Request Timeout" in answers) == bool(begun)
    assert (b"200 OK" in answers) == begun.endswith(b"G")
    if begun:
        error = json.loads(answers.rpartition(b"\r\n\r\n")[2])["error"]
        assert error["message"] == "the request's head took too long to arrive"


def test_time_runs_on_however_often_a_little_comes() -> None:
    with _app(Response(b"ok")) as (client, server), pytest.raises(OSError):
        _dribble(client)
    assert not server.server_state.connections


def test_a_body_that_nobody_reads_has_its_time_too() -> None:
    with _app(Response(b"ok")) as (client, server):
        client.sendall(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9000\r\n\r\n")
        _answer(client)
        with pytest.raises(OSError):
            _dribble(client)
        until(lambda: not server.server_state.connections)


@pytest.mark.parametrize("ending", [b"", b"connection: close\r\n"])
def test_an_answer_that_is_never_taken_is_given_up(ending: bytes) -> None:
    with _app(Response(BLOCK * 12)) as (client, server):
        client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n" + ending + b"\r\n")
        assert client.recv(100)
        until(lambda: not server.server_state.connections)
        assert len(_read(client)) < 12 * len(BLOCK)


def test_a_stream_that_nobody_reads_breaks_off(caplog: pytest.LogCaptureFixture) -> None:
    left: list[bool] = []
    closed: list[bool] = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield BLOCK
        finally:
            closed.append(True)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await EventStream(events(), lambda: left.append(True), SECONDS)(scope, receive, send)

    with _app(app) as (client, server):
        client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        until(lambda: left)
        assert closed == [True]
        until(lambda: not server.server_state.connections)
    assert not [each for each in caplog.records if each.exc_info]


def test_an_idle_connection_is_kept_longer_than_a_head_may_take() -> None:
    with _app(Response(b"ok")) as (client, _):
        for _ in range(3):
            client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            _answer(client)
            threading.Event().wait(2 * SECONDS)


def test_what_is_written_leaves_at_once() -> None:
    """Not when the client has acknowledged what was written before: that takes 40 ms."""
    with _app(Response(b"ok")) as (client, server):
        client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        _answer(client)
        (connection,) = server.server_state.connections
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\x01\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",  # no host
        b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 100_000,
        b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 20_000,
        HEAD + b"content-length: -3\r\n\r\n{}",
        HEAD + b"content-length: 3\r\ncontent-length: 4\r\n\r\n{}",
        HEAD + b"transfer-encoding: gzip\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nZZ\r\n",
        HEAD + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    ],
)
def test_what_is_no_http_is_told_as_other_mistakes(
    server: Running, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(server.address, PATIENCE) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        try:
            answer = _read(client)
        except ConnectionResetError:  # it closed before it had read all
            assert len(sent) > 65536
            return
    if b"\r\n\r\n" in answer:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.split()[1] in (b"400", b"501")
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
