"""A server's life: from an open socket through signals to its end.

Knows uvicorn and signals; knows no route. The first signal lets running answers finish and refuses
new ones; the second ends everything at once.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from foredraft.core.errors import ConfigError
from foredraft.server.connection import BoundedConnection, connections
from foredraft.server.state import ServerState, logger

CLOSE_SECONDS = 10.0  # for a step that hangs when the server ends
FAREWELL_SECONDS = 1.0  # for answers that are ended to say so
BACKLOG = 2048  # connections that may wait to be taken
IDLE_SECONDS = 30  # that a connection may wait for its next request


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any free one. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Only where the protocol is named does asyncio send at once what is written: else a small
    # answer waits for the client to acknowledge its head, 40 ms as a rule.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)  # from now on nobody else has the port, and who asks early waits
    except (OSError, OverflowError) as error:
        sock.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}") from None
    return sock


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which goes on answering "no" while its last answers finish."""

    def __init__(self, app: FastAPI, *, certfile: Path | None, keyfile: Path | None) -> None:
        """Raises ConfigError for certificates that can't be used."""
        self.state: ServerState = app.state.server
        settings = self.state.settings
        config = uvicorn.Config(
            app,
            http=connections(settings.head_seconds),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            ssl_certfile=None if certfile is None else str(certfile),
            ssl_keyfile=None if keyfile is None else str(keyfile),
        )
        super().__init__(config)
        try:
            config.load()
        except OSError as error:  # ssl's errors are among them
            raise ConfigError(f"cannot use the TLS certificate or key: {error}") from None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; at the second the time to drain is over."""
        if self.state.draining:
            self.state.drain_deadline = time.monotonic()
            return
        self.state.drain()
        logger.info("draining: %d requests are open", self.state.num_http)

    async def on_tick(self, counter: int) -> bool:
        """Whether to end: asked for ten times a second."""
        ends = await super().on_tick(counter)
        deadline = self.state.drain_deadline
        if deadline is None or ends:
            return ends
        for connection in self._connections():
            connection.drain()
        if self.state.num_http and time.monotonic() >= deadline:
            logger.warning("%d requests are open still and are ended", self.state.num_http)
            await self._end_answers()
            self.force_exit = True
        return self.force_exit or self.state.num_http == 0

    async def _end_answers(self) -> None:
        """Abort what is computed, so that each answer says why it ends; then hang up on who has not
        sent all of a request, or takes nothing.
        """
        for connection in self._connections():
            connection.drain(0.0)
        await self.state.engine.close(timeout=CLOSE_SECONDS)
        await self._wait(lambda: self.state.num_http == 0)
        for open_still in list(self.server_state.connections):
            open_still.transport.abort()
        await self._wait(lambda: not self.server_state.tasks)

    def _connections(self) -> list[BoundedConnection]:
        each = list(self.server_state.connections)
        return [one for one in each if isinstance(one, BoundedConnection)]

    async def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + FAREWELL_SECONDS
        while not condition() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


def serve_until_signal(server: DrainingServer, sock: socket.socket) -> None:
    """Serve until a signal; then close the engine."""
    asyncio.run(_serve(server, sock))


async def _serve(server: DrainingServer, sock: socket.socket) -> None:
    state: ServerState = server.state
    try:
        await server.serve(sockets=[sock])
    finally:
        state.close()
        await state.engine.close(timeout=CLOSE_SECONDS)
