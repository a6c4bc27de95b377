"""The completions of one HTTP request, from its prompts to the last delta.

Knows the engine and its deltas; knows no format. Whoever stops reading frees everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from foredraft.core.sampling import SamplingParams
from foredraft.engine.outputs import RequestOutput, StreamDelta
from foredraft.engine.submission import Prompt, RequestOptions
from foredraft.server.cutting import TokenCutter
from foredraft.server.errors import APIError, failed, too_long, unavailable
from foredraft.server.pacing import paced
from foredraft.server.state import ServerState

FIRST_LOOK = 0.02  # seconds; that a full queue needs at most to say so
Deltas = AsyncGenerator[StreamDelta, None]


@dataclass(frozen=True, slots=True)
class Work:
    """What to generate."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    options: RequestOptions
    by_token: bool = False  # one delta a token


class Generation:
    """`Work` being done: deltas, each with the number of its prompt."""

    def __init__(self, state: ServerState, work: Work) -> None:
        self._state = state
        self._work = work
        self._streams: list[Deltas] = []
        self._merged: AsyncGenerator[tuple[int, StreamDelta], None] | None = None
        self._first: asyncio.Task[tuple[int, StreamDelta]] | None = None

    async def start(self) -> None:
        """Queue it. Raises InvalidRequest, QueueFull, EngineClosed, APIError."""
        work, state = self._work, self._state
        count, most = len(work.prompts) * work.params.n, state.engine.max_in_flight
        if most is not None and count > most:
            raise APIError(
                400, f"{count} completions are more than the {most} taken at once", param="n"
            )
        for prompt in work.prompts:
            stream = await state.in_thread(self._prepare, prompt)
            self._streams.append(self._shaped(stream))
        self._merged = merged(self._streams)
        self._first = asyncio.ensure_future(anext(self._merged))
        # A request is queued when its first delta is asked for: wait long enough to be refused.
        await asyncio.wait({self._first}, timeout=FIRST_LOOK)
        if self._first.done() and self._first.exception() is not None:
            await self._first

    def _prepare(self, prompt: Prompt) -> Deltas:
        """In a thread: text becomes tokens here."""
        state = self._state
        if isinstance(prompt, str):
            state.check_characters(len(prompt))
            prompt = state.engine.tokenizer.encode_prompt(prompt)
        if len(prompt) > state.max_prompt_tokens:
            raise too_long(f"the prompt has {len(prompt)} tokens", state.max_prompt_tokens)
        return state.engine.stream(prompt, self._work.params, self._work.options)

    def _shaped(self, stream: Deltas) -> Deltas:
        params, tokenizer = self._work.params, self._state.engine.tokenizer
        how = (tokenizer, params.skip_special_tokens, params.stop_strings)
        cutters = [TokenCutter(*how) for _ in range(params.n)]
        if self._state.settings.pace:
            return paced(stream, [cutter.cut for cutter in cutters])
        return _cut(stream, cutters) if self._work.by_token else stream

    async def deltas(self) -> AsyncIterator[tuple[int, StreamDelta]]:
        """All deltas with their prompt's number. Raises APIError for completions that failed."""
        assert self._first is not None
        assert self._merged is not None
        yield _checked(await self._first)
        async for each in self._merged:
            yield _checked(each)

    async def outputs(self) -> list[RequestOutput]:
        """Read to the end: what became of each prompt."""
        outputs: dict[int, RequestOutput] = {}
        async for prompt, delta in self.deltas():
            if delta.finished is not None:
                outputs[prompt] = delta.finished
        return [outputs[prompt] for prompt in sorted(outputs)]

    async def close(self) -> None:
        """End what has not ended, and free it."""
        if self._first is not None:
            self._first.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._first
        if self._merged is not None:
            await self._merged.aclose()
        for stream in self._streams:
            await stream.aclose()


async def _cut(stream: Deltas, cutters: Sequence[TokenCutter]) -> Deltas:
    try:
        async for delta in stream:
            for part in cutters[delta.index].cut(delta):
                yield part
    finally:
        await stream.aclose()


async def merged(streams: Sequence[Deltas]) -> AsyncGenerator[tuple[int, StreamDelta], None]:
    """What comes from any of the streams as it comes, with the stream's number."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    waiting = {asyncio.ensure_future(anext(stream)): at for at, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                at = waiting.pop(task)
                try:
                    delta = await task
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(streams[at]))] = at
                yield at, delta
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _checked(each: tuple[int, StreamDelta]) -> tuple[int, StreamDelta]:
    completion = each[1].completion
    if completion is None or completion.finish_reason in ("stop", "length"):
        return each
    if completion.finish_reason == "abort":
        raise unavailable("the server ended this answer: it is shutting down")
    raise failed(completion.error)
