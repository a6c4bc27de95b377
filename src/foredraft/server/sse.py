"""Server-sent events, and what to do when their reader leaves.

Knows ASGI and JSON; knows no request. Who leaves ends the work at once: closing what is read frees
what it holds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """One event. JSON has no line ends in it, so it is one line."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


class EventStream(Response):
    """Sends events as they come. `left` is called when the client leaves before the end; one that
    takes no event for `patience` seconds has left too.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], left: Callable[[], None], patience: float
    ) -> None:
        self.background = None
        self.status_code = 200
        self._events = events
        self._left = left
        self._patience = patience
        # Proxies are asked to pass each event on as it comes.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    def init_headers(self, headers: Any = None) -> None:
        """Headers of an answer whose length is not known."""
        given = {"content-type": f"{self.media_type}; charset=utf-8", **(headers or {})}
        self.raw_headers = [(name.encode(), value.encode()) for name, value in given.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            finished = await unless_disconnected(receive, self._send(send))
        except TimeoutError:  # it reads nothing: the answer breaks off
            finished = None
        if finished is None:
            self._left()

    async def _send(self, send: Send) -> bool:
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            async for each in self._events:
                async with asyncio.timeout(self._patience):
                    await send({"type": "http.response.body", "body": each, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()
        return True


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None if the client left first: then it has been cancelled."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for each in (watcher, task):
            each.cancel()
        await asyncio.wait({watcher, task})
        for each in (watcher, task):  # seen; awaiting it again would lose where it was raised
            each.cancelled() or each.exception()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
