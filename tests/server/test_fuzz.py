"""Thousands of malformed requests, slow clients and early leavers beside a well-behaved one, who
is told what it would be told alone; afterwards nothing is held.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from foredraft import AsyncEngine
from foredraft.server.state import WORKERS
from foredraft.testing.models import tiny_model

from .hostile import Attack, attack
from .rig import NAME, PATIENCE, Running, serving, until

BODIES = int(os.environ.get("FOREDRAFT_FUZZ_BODIES", "500"))
SENDERS = 3
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n"
)
LONG = {"model": NAME, "prompt": "abc ab", "max_tokens": 80, "ignore_eos": True, "stream": True}
COSTLY = {"model": NAME, "prompt": "a", "max_tokens": 2, "guided_regex": "a{9999999}"}
TOLD = {200, 400, 404, 408, 413, 415, 429}
MOST_GROWTH = 64 << 20  # bytes of memory


@pytest.fixture(scope="module")
def open_server() -> Iterator[Running]:
    loaded = tiny_model(3, sharpness=4.0, max_positions=96, num_threads=1)
    # Pages of the cache are memory from the first time that they are written: few, so that all are.
    engine = AsyncEngine(
        loaded, speculative_config={"method": "ngram"}, max_queued=200, kv_cache_gib=0.01
    )
    limits = {"max_body_bytes": 250_000, "head_seconds": 2.5, "body_seconds": 2.5}
    with serving(engine, **limits) as running:
        yield running
    asyncio.run(engine.close())


def test_nothing_that_is_sent_disturbs_others(
    open_server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    server = open_server
    _warm_up(server)
    server.wait_until_free()
    alone = _asked(server)
    before = _held(server)
    with _beside(lambda: _asked(server)) as told, _manners(server) as manners:
        found = _sent(server, BODIES, 8)
    assert set(found) <= TOLD, found
    assert found[200] > 0 < found[400]
    assert len(told) >= 2
    assert all(each == alone for each in told)
    assert min(manners.values()) > 0
    server.wait_until_free()
    until(lambda: server.state.num_http == 0)
    after = _held(server)
    assert after.pop("memory") - before.pop("memory") < MOST_GROWTH
    assert after == before
    assert [each for each in caplog.records if each.levelname in ("ERROR", "CRITICAL")] == []


def _warm_up(server: Running) -> None:
    """Until threads, caches and allocators have what they keep: each thread of the pool has memory
    of its own, as much as the costliest grammar needs, and a fifth of the attacks goes before.
    """
    costly = Attack("/v1/completions", json.dumps(COSTLY).encode())
    for _ in range(3):
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(lambda each: _answered(server, each), [costly] * WORKERS))
    _sent(server, max(90, BODIES // 5), 0)


def _sent(server: Running, number: int, seed: int) -> Counter[int]:
    """The statuses of so many attacks, by several senders."""
    found: list[int] = []
    wrong: list[Any] = []

    def send(sender: int) -> None:
        chance = random.Random(1000 * seed + sender)
        for _ in range(number // SENDERS):
            each = attack(chance)
            try:
                found.append(_answered(server, each))
            except (AssertionError, OSError, HTTPException, ValueError) as error:
                wrong.append((each, error))

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(SENDERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    return Counter(found)


def _answered(server: Running, each: Attack) -> int:
    """The status; the answer must be whole and in its form."""
    with socket.create_connection(server.address, PATIENCE) as client:
        # A server that knows enough answers before it has read all, and closes.
        with suppress(ConnectionError):
            client.sendall(each.request())
        reply = HTTPResponse(client)
        try:
            reply.begin()
            body = reply.read()
        except ConnectionResetError:
            assert len(each.body) > server.state.settings.max_body_bytes
            return 413
    kind = reply.headers["content-type"]
    if kind.startswith("text/event-stream"):
        assert body.endswith(b"data: [DONE]\n\n")
    elif reply.status == 200:
        json.loads(body)
    else:
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "\n" not in error["message"]
    return reply.status


def _asked(server: Running) -> list[str]:
    """What a well-behaved client is told: greedy, drawn, streamed, and held to a choice."""
    texts: dict[str, Any] = {"model": NAME, "prompt": "abc abc ab", "max_tokens": 16, "seed": 5}
    with server.openai() as client:
        drawn = client.completions.create(temperature=0.8, logprobs=1, **texts).choices[0]
        chunks = client.completions.create(temperature=0, stream=True, **texts)
        chat = client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "ab ab"}], max_tokens=8, seed=3,
            extra_body={"structured_outputs": {"choice": ["abc", "abd"]}},
        ).choices[0]  # fmt: skip
        greedy = "".join(each.choices[0].text for each in chunks)
    assert drawn.logprobs is not None
    # The reference kernels' last digits depend on who shares a pass, its tokens do not.
    logprobs = [round(each or 0.0, 9) for each in drawn.logprobs.token_logprobs or ()]
    return [drawn.text, str(logprobs), greedy, chat.message.content or ""]


@contextmanager
def _beside(ask: Callable[[], list[str]]) -> Iterator[list[list[str]]]:
    """Ask again and again as long as this lasts."""
    told: list[list[str]] = []
    done = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            while not done.is_set() or len(told) < 2:
                told.append(ask())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield told
    finally:
        done.set()
        thread.join()
    assert failed == [], repr(failed)


def _slow_head(client: socket.socket) -> None:
    for byte in b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 60:
        client.sendall(bytes([byte]))
        time.sleep(0.05)


def _silent(client: socket.socket) -> None:
    assert client.recv(1) == b""


def _slow_body(client: socket.socket) -> None:
    client.sendall(HEAD % 1000)
    for _ in range(80):
        client.sendall(b" ")
        time.sleep(0.05)


def _leaves_in_the_head(client: socket.socket) -> None:
    client.sendall(HEAD[:40])


def _leaves_in_the_body(client: socket.socket) -> None:
    client.sendall(HEAD % 1000 + b'{"model":')


def _leaves_in_the_stream(client: socket.socket) -> None:
    body = json.dumps(LONG).encode()
    client.sendall(HEAD % len(body) + body)
    client.recv(400)


def _leaves_before_the_answer(client: socket.socket) -> None:
    body = json.dumps({**LONG, "stream": False}).encode()
    client.sendall(HEAD % len(body) + body)


def _reads_nothing(client: socket.socket) -> None:
    body = json.dumps(LONG | {"logprobs": 20, "return_token_ids": True}).encode()
    client.sendall(HEAD % len(body) + body)
    time.sleep(0.5)


def _asks_on_without_reading(client: socket.socket) -> None:
    body = json.dumps({**LONG, "max_tokens": 2}).encode()
    client.sendall((HEAD % len(body) + body) * 5)


MANNERS = [
    _slow_head, _silent, _slow_body, _leaves_in_the_head, _leaves_in_the_body,
    _leaves_in_the_stream, _leaves_before_the_answer, _reads_nothing, _asks_on_without_reading,
]  # fmt: skip


@contextmanager
def _manners(server: Running) -> Iterator[Counter[str]]:
    """Clients of every bad manner as long as this lasts; how many there were of each."""
    done, times = threading.Event(), Counter[str]()

    def run(manner: Callable[[socket.socket], None]) -> None:
        while not done.is_set() or not times[manner.__name__]:
            with suppress(OSError), socket.create_connection(server.address, PATIENCE) as client:
                manner(client)
            times[manner.__name__] += 1
            time.sleep(0.05)

    threads = [threading.Thread(target=run, args=(manner,)) for manner in MANNERS]
    for thread in threads:
        thread.start()
    try:
        yield times
    finally:
        done.set()
        for thread in threads:
            thread.join()


def _held(server: Running) -> dict[str, Any]:
    """What must be again as it was."""
    until(lambda: not server.connections)
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # what is free but kept by one of glibc's arenas is no loss
        trim(0)
    names = [each.name for each in threading.enumerate()]  # the pool's, which are few, aside
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "tasks": server.tasks(),
        "threads": sorted(name for name in names if not name.startswith("foredraft-server_")),
        "files": len(list(Path("/proc/self/fd").iterdir())),
    }
