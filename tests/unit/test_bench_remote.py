"""Servers that know no more than OpenAI's protocol: their keys, and the fields they refuse."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from foredraft.bench.serve.arrivals import Job, Prompt
from foredraft.bench.serve.remote import EXTENSIONS, RemoteServer
from foredraft.bench.serve.traffic import Chunk
from foredraft.core.errors import UserError

KEY = "a-key"
USAGE = {"choices": [], "usage": {"completion_tokens": 5}}


class Strict(ThreadingHTTPServer):
    """Asks for a key and refuses some fields, by name or without saying which."""

    def __init__(self, refused: Sequence[str], status: int, named: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.refused, self.status, self.named = refused, status, named
        self.asked: list[dict[str, Any]] = []


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Strict)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.asked.append(body)
        unknown = sorted(set(server.refused) & {*body, *body["stream_options"]})
        if self.headers["Authorization"] != f"Bearer {KEY}":
            self._say(401, b"no")
        elif unknown:
            self._say(server.status, (unknown[0] if server.named else "bad request").encode())
        else:
            chunks = [{"choices": [{"delta": {"content": text}}]} for text in ("", "ab", "c")]
            lines = [f"data: {json.dumps(each)}\n\n" for each in (*chunks, USAGE)]
            self._say(200, ("".join(lines) + "data: [DONE]\n\n").encode())

    def _say(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Silence."""


@contextmanager
def strict(
    refused: Sequence[str], status: int = 400, named: bool = True
) -> Iterator[tuple[str, Strict]]:
    server = Strict(refused, status, named)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server
    finally:
        server.shutdown()
        server.server_close()


def answers(server: RemoteServer, number: int = 1) -> list[Chunk]:
    async def read() -> list[Chunk]:
        found = []
        for _ in range(number):
            job = Job(0, Prompt("p", "chat", "hello"), 5, seed=1)
            async with aclosing(server.stream(job)) as chunks:
                found += [chunk async for chunk in chunks]
        return found

    return asyncio.run(read())


@pytest.mark.parametrize("status", [400, 422])
@pytest.mark.parametrize("named", [True, False])
def test_a_refused_extension_is_left_out_from_then_on(status: int, named: bool) -> None:
    with strict(sorted(EXTENSIONS), status, named) as (url, server):
        chunks = answers(RemoteServer(url, "m", api_key=KEY), number=2)
    assert [chunk.tokens for chunk in chunks[:4]] == [0, 1, 1, 3]  # 5 in all, as the usage says
    assert len(server.asked) == 2 + (2 if named else 1)
    assert not EXTENSIONS & {*server.asked[-1], *server.asked[-1]["stream_options"]}
    assert server.asked[-1]["stream_options"] == {"include_usage": True}


def test_only_what_is_refused_is_left_out() -> None:
    with strict(["continuous_usage_stats"]) as (url, server):
        answers(RemoteServer(url, "m", api_key=KEY))
    assert server.asked[-1]["return_token_ids"] is True


def test_other_refusals_are_told() -> None:
    with strict([]) as (url, server), pytest.raises(UserError, match="answered 401: no"):
        answers(RemoteServer(url, "m"))
    assert len(server.asked) == 1
    with strict(["seed"]) as (url, server), pytest.raises(UserError, match="answered 400: seed"):
        answers(RemoteServer(url, "m", api_key=KEY))
    assert len(server.asked) == 2  # once with and once without what it may not know
