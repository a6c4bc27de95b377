"""Stands before every route: forms of requests, hosts, keys, limits, and an answer whatever breaks
behind it.

Knows ASGI messages; knows no route's fields. It is plain ASGI, so that a client that leaves is seen
by whoever streams to it.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.server.errors import APIError, fault, unavailable
from foredraft.server.page import routes as page
from foredraft.server.state import ServerState, logger

# Whoever watches over the server has no key: these tell nothing about anybody's requests.
OPEN_PATHS = frozenset({"/health", "/ready", "/version", *page.FILES})
LONGEST_PATH = 200
_ABSOLUTE = re.compile(r"https?://(?P<host>[^/]*)(?P<path>/.*)?", re.IGNORECASE | re.DOTALL)


class Gate:
    """Wraps an app. Requests are counted from here until their answer is written."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        began, method = time.perf_counter(), scope["method"]
        scope = _usual_form(scope)
        try:
            await self._pass(scope, receive, answer)
        finally:
            self._note(method, scope, answer, time.perf_counter() - began)

    async def _pass(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        state = self._state
        try:
            state.hosts.check(scope["headers"])
            if scope["path"] in OPEN_PATHS:  # and they are answered however many ask
                await self._app(scope, receive, answer.send)
                return
            state.keys.check(scope["headers"])
            if state.draining and scope["method"] == "POST":
                raise unavailable("the server is shutting down and takes no more requests")
            with state.entered():
                body = _Body(receive, scope, state.settings.max_body_bytes)
                body.deadline = time.monotonic() + state.settings.body_seconds
                await self._app(scope, body.receive, answer.send)
        except APIError as error:
            await answer.refuse(scope, receive, error)
        except Exception as error:
            state.log_fault(error, f"{scope['method']} {_path(scope)}")
            await answer.refuse(scope, receive, fault())

    def _note(self, method: str, scope: Scope, answer: _Answer, seconds: float) -> None:
        # An answer of no route's path is counted together: anybody can ask for any path.
        route = scope.get("route")
        path = getattr(route, "path", "other")
        self._state.metrics.answered(path, answer.status)
        logger.info("%s %s %d in %.3f s", method, _path(scope), answer.status, seconds)


class _Answer:
    """What goes out, and whether it has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 499  # as long as nothing was answered: the client has left

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)

    async def refuse(self, scope: Scope, receive: Receive, error: APIError) -> None:
        """Answer with `error`, unless an answer has begun: then it breaks off, and the connection
        is closed.
        """
        if self.status == 499:
            await error.response()(scope, receive, self.send)


class _Body:
    """What comes in, bounded in size and time."""

    def __init__(self, receive: Receive, scope: Scope, limit: int) -> None:
        """Raises APIError (400, 413) for what can be seen before anything is read."""
        self._receive = receive
        self._limit = limit
        self._read = 0
        self._whole = False
        self.deadline = 0.0
        headers = {name.lower(): value for name, value in scope["headers"]}
        length = headers.get(b"content-length", b"0")
        # More digits than any length has are not even read as a number.
        if len(length) > 19 or (length.isdigit() and int(length) > limit):
            raise self._too_large()
        if b"content-length" in headers and b"transfer-encoding" in headers:
            raise APIError(400, "the body has a content-length and a transfer-encoding: send one")
        self._kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()

    async def receive(self) -> Message:
        """The next message; after the body, whether the client has left.

        Raises APIError (408, 413, 415).
        """
        if self._whole:
            return await self._receive()
        # A web page can send other types without asking the browser's leave first.
        if self._kind != b"application/json":
            raise APIError(
                415, "the body must be sent as content-type application/json", code="media_type"
            )
        try:
            async with asyncio.timeout(max(0.0, self.deadline - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            raise APIError(408, "the request's body took too long to arrive") from None
        self._read += len(message.get("body", b""))
        if self._read > self._limit:
            raise self._too_large()
        self._whole = not message.get("more_body", False)
        return message

    def _too_large(self) -> APIError:
        return APIError(
            413, f"the body is larger than the {self._limit} bytes taken here", code="too_large"
        )


def _usual_form(scope: Scope) -> Scope:
    """A copy as routes know requests. A HEAD is a GET whose body the connection leaves out. A
    target with scheme and host has its path behind them, and says who is asked (RFC 9112, 3.2.2).
    """
    told: dict[str, Any] = dict(scope)
    if told["method"] == "HEAD":
        told["method"] = "GET"
    absolute = _ABSOLUTE.match(told["path"])
    if absolute is not None:
        told["path"] = absolute["path"] or "/"
        raw = _ABSOLUTE.match(told["raw_path"].decode("latin-1"))
        told["raw_path"] = ((raw and raw["path"]) or "/").encode("latin-1")
        headers = [each for each in told["headers"] if each[0].lower() != b"host"]
        told["headers"] = [(b"host", absolute["host"].encode("latin-1", "replace")), *headers]
    return told


def _path(scope: Scope) -> str:
    return ascii(scope["path"][:LONGEST_PATH])[1:-1]
