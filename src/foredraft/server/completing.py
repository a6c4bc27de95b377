"""Runs one request for completions: as a whole or as events, in the time it may take.

Knows generations and forms; knows no route.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from foredraft.core.errors import InvalidRequest
from foredraft.core.sampling import SamplingParams
from foredraft.engine.outputs import StreamDelta
from foredraft.server.errors import APIError, from_exception, timed_out
from foredraft.server.forms import Form
from foredraft.server.generation import Generation, Work
from foredraft.server.schemas import SamplingFields
from foredraft.server.sse import DONE, EventStream, event, unless_disconnected
from foredraft.server.state import ServerState, logger

STRUCTURED = "structured_outputs"
FIELDS = (*SamplingParams.__dataclass_fields__, "messages", "prompt", "prediction", "cache_salt")


def describe(error: BaseException, state: ServerState) -> APIError:
    """What a client is told of `error`."""
    found = from_exception(error, FIELDS, state.retry_after)
    if found.status_code == 500 and not isinstance(error, APIError):
        state.log_fault(error)
    return found


async def complete(
    state: ServerState, http: Request, request: SamplingFields, work: Work, form: Form
) -> Response:
    """The answer. Raises what `Generation` raises, APIError where time is up."""
    if state.settings.log_prompts:
        logger.info("%s prompts: %s", form.id, ascii(list(work.prompts)))
    generation = Generation(state, work)
    if request.stream:
        try:
            await generation.start()
        except BaseException as error:
            await generation.close()
            raise _named(error, request) from None
        events = _events(state, generation, form, len(work.prompts))
        left, patience = state.metrics.disconnected, state.settings.request_seconds
        return EventStream(events, left, patience)
    try:
        reply = await unless_disconnected(http.receive, _whole(state, generation, form))
    except InvalidRequest as error:
        raise _named(error, request) from None
    if reply is None:
        state.metrics.disconnected()
        return Response(status_code=499)
    return reply


def _named(error: BaseException, request: SamplingFields) -> BaseException:
    """`error` by the field that the client gave: a response format is a structured output, and so
    are calls of tools.
    """
    words = str(error)
    if isinstance(error, InvalidRequest) and words.startswith(STRUCTURED):
        for field in ("response_format", "tools"):
            if getattr(request, field, None) is not None:
                return APIError(400, field + words.removeprefix(STRUCTURED), param=field)
        return APIError(400, words, param=STRUCTURED)
    return error


async def _whole(state: ServerState, generation: Generation, form: Form) -> JSONResponse:
    began, seconds = time.monotonic(), state.settings.request_seconds
    try:
        async with asyncio.timeout(seconds):
            await generation.start()
            outputs = await generation.outputs()
    except TimeoutError:
        raise timed_out(seconds) from None
    finally:
        await generation.close()
    state.answered(time.monotonic() - began)
    return JSONResponse(form.reply(outputs))


async def _events(
    state: ServerState, generation: Generation, form: Form, num_prompts: int
) -> AsyncGenerator[bytes, None]:
    """All events of an answer. One that fails ends with an event that says so."""
    began = time.monotonic()
    watch = _Gaps(state)
    try:
        for chunk in form.opening(num_prompts):
            yield event(chunk)
        async with aclosing(_in_time(generation, state.settings.request_seconds)) as deltas:
            async for prompt, delta in deltas:
                chunk_ = form.chunk(prompt, delta)
                if chunk_ is not None:
                    yield event(chunk_)
                watch.sent(prompt, delta)
        for chunk in form.closing():
            yield event(chunk)
        state.answered(time.monotonic() - began)
    except Exception as error:
        yield event(describe(error, state).body())
    finally:
        await generation.close()
    yield DONE


async def _in_time(
    generation: Generation, seconds: float
) -> AsyncGenerator[tuple[int, StreamDelta], None]:
    """The deltas, each of them before the request's time is up. Raises APIError."""
    deadline = time.monotonic() + seconds
    deltas = generation.deltas()
    while True:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                each = await anext(deltas)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise timed_out(seconds) from None
        yield each


class _Gaps:
    """Times between the events of each completion."""

    def __init__(self, state: ServerState) -> None:
        self._metrics = state.metrics
        self._last: dict[tuple[int, int], float] = {}

    def sent(self, prompt: int, delta: StreamDelta) -> None:
        if not delta.token_ids:
            return
        now, key = time.perf_counter(), (prompt, delta.index)
        if key in self._last:
            self._metrics.sent(now - self._last[key], len(delta.token_ids))
        self._last[key] = now
