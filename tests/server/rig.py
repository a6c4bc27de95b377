"""What the tests of the server share: a real server on a free port, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from asyncio import all_tasks
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from foredraft import AsyncEngine
from foredraft.server.app import create_app
from foredraft.server.running import DrainingServer, open_socket
from foredraft.server.settings import ServerSettings
from foredraft.server.state import ServerState

PATIENCE = 60.0  # seconds; what takes longer hangs
NAME = "tiny"


class Running:
    """A server that answers at `url`, and the engine behind it."""

    def __init__(self, engine: AsyncEngine, url: str, server: DrainingServer) -> None:
        self.engine = engine
        self.url = url
        self.state: ServerState = server.state
        self._server = server

    @property
    def address(self) -> tuple[str, int]:
        """For a socket."""
        host, port = self.url.partition("://")[2].rsplit(":", 1)
        return host, int(port)

    @property
    def connections(self) -> set[Any]:
        """That are open now."""
        return self._server.server_state.connections

    def tasks(self) -> list[str]:
        """What runs in the server's event loop."""
        loop, found = self._server.servers[0].get_loop(), Future[list[str]]()
        loop.call_soon_threadsafe(
            lambda: found.set_result(sorted(str(each.get_coro()) for each in all_tasks(loop)))
        )
        return found.result(PATIENCE)

    def openai(self, **more: Any) -> OpenAI:
        """A client as users have it, which does not try again."""
        options = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE, **more}
        return OpenAI(base_url=f"{self.url}/v1", **options)

    def http(self, **more: Any) -> httpx.Client:
        """A client for what no well-behaved one sends."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE, **more)

    def wait_until_free(self) -> None:
        """Wait until nothing is in flight; then nothing may be held."""
        until(lambda: not self.engine.engine.has_work)
        self.engine.engine.check_integrity()
        assert self.engine.engine.scheduler.pages_in_use == 0


def until(condition: Any) -> None:
    """Wait for what another thread does."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@contextmanager
def serving(
    engine: AsyncEngine, certificate: tuple[Path, Path | None] | None = None, **settings: Any
) -> Iterator[Running]:
    """A server over `engine`, which it does not close."""
    certfile, keyfile = certificate or (None, None)
    scheme = "http" if certfile is None else "https"
    app = create_app(engine, ServerSettings(**{"model_names": (NAME,), **settings}))
    server = DrainingServer(app, certfile=certfile, keyfile=keyfile)
    sock = open_socket("127.0.0.1", 0)
    port = sock.getsockname()[1]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
    thread.start()
    try:
        until(lambda: server.started)
        yield Running(engine, f"{scheme}://127.0.0.1:{port}", server)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(PATIENCE)
        server.state.close()
        assert not thread.is_alive()
