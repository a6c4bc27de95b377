"""One connection: bounds on how long it may take to bring a request and to take an answer away.

Knows uvicorn's protocol and h11's states; knows no route. Between its answer's begin and end a
request is bounded by `gate` and `completing`; what is before and after that is bounded here.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from foredraft.server.errors import APIError, unavailable

JSON = b"application/json"
STALLED_SECONDS = 1.0  # without a byte: a body that is on its way is not cut off


def connections(patience: float) -> type[H11Protocol]:
    """The protocol of a server whose clients have `patience` seconds for a request's head, and to
    take what is left of an answer once it is written.
    """

    class Bounded(BoundedConnection):
        seconds = patience

    return Bounded


class BoundedConnection(H11Protocol):
    """uvicorn's connection, which does not wait for ever."""

    seconds: float
    _timer: asyncio.TimerHandle | None = None
    _heard_at = 0.0  # by the loop's clock

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._served, self.app = self.app, self._serve

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        """The app; where its answer broke off, the connection closes next and has its time."""
        try:
            await self._served(scope, receive, send)
        finally:
            self.loop.call_soon(self._watch)

    def connection_made(self, transport: Any) -> None:
        """From here on the first request's head may take `seconds`."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Time runs on however often a little comes."""
        self._heard_at = self.loop.time()
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """The rest of an unread body, or of an unread answer, has its time too."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing to wait for."""
        super().connection_lost(exc)
        self._forget()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is told as every other mistake, unless an answer has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(APIError(400, "the request is not HTTP/1.1", code="invalid_http"))
        self.transport.close()
        self._watch()

    def drain(self, stalled: float = STALLED_SECONDS) -> None:
        """Refuse a request whose body has `stalled` for so many seconds, and close: it would keep
        others waiting. To close on one that still comes would reset it and lose the refusal.
        """
        cycle = self.cycle
        if cycle is None or not cycle.more_body or self.transport.is_closing():
            return
        if self.loop.time() - self._heard_at < stalled:
            return
        if self.conn.our_state is h11.SEND_RESPONSE and not cycle.response_started:
            self._refuse(unavailable("the server is shutting down and waits for no body"))
        self.transport.close()
        self._watch()

    def _watch(self) -> None:
        """Let time run where this connection keeps the server waiting, stop it where not."""
        if not self._keeps_waiting():
            self._forget()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self._expire)

    def _keeps_waiting(self) -> bool:
        if self.transport.is_closing():
            return True  # for what is written to be taken
        if self.cycle is None:
            return True
        if not self.cycle.response_complete:
            return False  # the server has the request
        begun = self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])
        return begun or self.transport.get_write_buffer_size() > 0

    def _expire(self) -> None:
        self._timer = None
        if not self._keeps_waiting():
            return  # what was written has left meanwhile
        stuck = self.transport.is_closing() or self.transport.get_write_buffer_size() > 0
        if stuck:
            self.transport.abort()
            return
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(APIError(408, "the request's head took too long to arrive"))
        self.transport.close()
        self._watch()

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, error: APIError) -> None:
        body = json.dumps(error.body()).encode()
        length = str(len(body)).encode()
        headers = [(b"content-type", JSON), (b"content-length", length), (b"connection", b"close")]
        for name, value in (error.headers or {}).items():
            headers.append((name.lower().encode(), value.encode()))
        reason = HTTPStatus(error.status_code).phrase.encode()
        start = h11.Response(status_code=error.status_code, headers=headers, reason=reason)
        for event in (start, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
