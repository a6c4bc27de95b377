"""From the thread that runs the steps to the event loop that waits for one prompt's completions.

Knows requests, deltas and one event loop; knows no step. What a slow reader has not taken yet is
one delta a completion, which grows by text and ids: no queue, and no more than `max_tokens`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from foredraft.core.acceptance import Origin
from foredraft.engine.outputs import CompletionOutput, RequestOutput, StreamDelta, TokenLogprobs
from foredraft.engine.request import Request
from foredraft.engine.submission import Group


@dataclass(slots=True)
class _Pending:
    """What a completion has to tell since its reader was last told."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    emitted_at: float = 0.0
    completion: CompletionOutput | None = None

    def delta(self, index: int, finished: RequestOutput | None) -> StreamDelta:
        return StreamDelta(
            "".join(self.texts),
            self.token_ids,
            self.origins,
            finished,
            index=index,
            emitted_at=self.emitted_at,
            completion=self.completion,
            logprobs=self.logprobs,
        )


class Feed:
    """One prompt's completions on their way to the coroutine that asked for them."""

    def __init__(self, group: Group, num_spec_tokens: int, *, deltas: bool) -> None:
        """To be made in the event loop that reads it. Without `deltas` only the end is told."""
        self.group = group
        self._num_spec_tokens = num_spec_tokens
        self._deltas = deltas
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._lock = threading.Lock()
        self._ended: set[int] = set()  # completions whose end was put; the engine's thread's own
        # Under the lock:
        self._pending: dict[int, _Pending] = {}
        self._finished: RequestOutput | None = None
        self._failure: Exception | None = None
        self._told = False  # the loop has been woken and has not looked yet

    @property
    def requests(self) -> list[Request]:
        return self.group.requests

    def put(self, request: Request) -> bool:
        """Take over what `request` has to tell. Called by the engine's thread; False: the event
        loop is closed, so nobody will ever read it.
        """
        if self._loop.is_closed():  # waking would not tell: what was told may never be looked at
            return False
        finished = completion = None
        if request.finished:
            self._ended.add(request.index)
            completion = request.output(self._num_spec_tokens)
        # Not `group.finished`: of completions that one step ended, the others are still to come.
        if len(self._ended) == len(self.requests):
            finished = self.group.output(self._num_spec_tokens)
            completion = finished.outputs[request.index]
        if self._deltas:
            text, token_ids, origins, logprobs = request.drain()
        else:
            text, token_ids, origins, logprobs = "", [], [], []
        if not (text or token_ids or finished or (completion and self._deltas)):
            return True
        with self._lock:
            pending = self._pending.setdefault(request.index, _Pending())
            if text:
                pending.texts.append(text)
            pending.token_ids += token_ids
            pending.origins += origins
            pending.logprobs += logprobs
            pending.emitted_at = request.last_token_at
            pending.completion = completion
            self._finished = finished
        return self._wake()

    def fail(self, failure: Exception) -> None:
        """Nothing more will come: raise `failure` at the reader. Called by the engine's thread."""
        with self._lock:
            self._failure = failure
        self._wake()

    def _wake(self) -> bool:
        with self._lock:
            if self._told:
                return True
            self._told = True
        try:
            self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:
            return False
        return True

    async def read(self) -> AsyncGenerator[StreamDelta, None]:
        """The deltas, until the last completion has ended."""
        ended = False
        while not ended:
            await self._ready.wait()
            self._ready.clear()
            deltas, ended = self._take()
            for delta in deltas:
                yield delta

    def _take(self) -> tuple[list[StreamDelta], bool]:
        """What is pending, the completion that ended last at the end; whether that was all."""
        with self._lock:
            self._told = False
            pending, self._pending = self._pending, {}
            finished, failure = self._finished, self._failure
        if failure is not None:
            raise failure
        last = list(pending)[-1] if pending else None
        deltas = [
            each.delta(index, finished if index == last else None)
            for index, each in pending.items()
        ]
        return deltas, finished is not None
