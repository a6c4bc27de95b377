"""The serving interface: many coroutines, one engine, which runs in a thread of its own.

Knows prompts as text or ids and how to wait for them; knows nothing of what happens in a step.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from foredraft.core.errors import ConfigError
from foredraft.core.sampling import SamplingParams
from foredraft.engine.build import EngineFront
from foredraft.engine.feed import Feed
from foredraft.engine.metrics import EngineMetrics
from foredraft.engine.outputs import RequestOutput, StreamDelta
from foredraft.engine.submission import Group, Prompt, RequestOptions, check_params
from foredraft.engine.worker import Worker
from foredraft.models.chat_messages import Message
from foredraft.models.load import LoadedModel

CLOSE_SECONDS = 30.0  # that `close` waits for a step that does not come back


class AsyncEngine(EngineFront):
    """A model that serves many requests at once; each gets what it would get alone.

    Coroutines of several event loops, in several threads, may use one engine. A drafter that fails
    is given up with a warning in the log ("foredraft"), and serving goes on without it.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        max_queued: int | None = None,
        price_per_hour: float | None = None,
        **settings: Any,
    ) -> None:
        """Build the engine and start its thread.

        Args:
            max_queued: completions that may wait beside the `max_num_seqs` that run; None: any
                number. Further ones are refused with QueueFull.
            price_per_hour: of the machine, in any currency, for the metrics' cost of a token.
            settings: the keywords of `LLM`.

        Raises:
            ModelError, ConfigError: with the offending value and what would be valid.
        """
        if max_queued is not None and (type(max_queued) is not int or max_queued < 0):
            raise ConfigError(f"max_queued must be an integer of 0 or more, got {max_queued!r}")
        super().__init__(model, **settings)
        self.metrics = EngineMetrics(
            self.engine,
            target=self.loaded.name,
            drafter=self.method or "none",
            num_speculative_tokens=self.num_speculative_tokens,
            price_per_hour=price_per_hour,
        )
        self.engine.observers.append(self.metrics)
        most = None if max_queued is None else self.config.max_num_seqs + max_queued
        self.max_in_flight = most  # completions, running and queued; None: any number
        self._worker = Worker(self.engine, most)
        self._worker.start()
        # An engine that nobody has closed ends with its last user.
        weakref.finalize(self, self._worker.stop).atexit = False

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs: False once it is closed, or has died."""
        return self._worker.alive

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncGenerator[StreamDelta, None]:
        """Generate, yielding what was added since the last delta; it is queued when first read.

        With `n > 1` deltas carry the `index` of their completion. Leaving early (`aclose`, a
        cancelled task) ends the request and frees everything. A reader that is slow gets fewer,
        larger deltas.

        Raises:
            InvalidRequest: at once, for a prompt or parameters that can't be honoured.
            QueueFull, EngineClosed: from the first read.
        """
        return self._read(self._prepare(prompt, params, options), deltas=True)

    async def prepare(self, params: SamplingParams) -> None:
        """Compile the grammar of `params.structured_outputs` without holding up the event loop: a
        new one takes milliseconds, a large one seconds. `stream` then finds it ready.

        Raises InvalidRequest, as `stream` would.
        """
        if check_params(params).structured_outputs is not None:
            await asyncio.to_thread(self._requests.prepare, params)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> RequestOutput:
        """Generate to the end. Cancelling frees everything.

        Raises InvalidRequest, QueueFull, EngineClosed.
        """
        finished = None
        if params is not None:
            await self.prepare(params)
        group = self._prepare(prompt, params, options)
        async with aclosing(self._read(group, deltas=False)) as deltas:
            async for delta in deltas:
                finished = delta.finished
        assert finished is not None  # the last delta has it
        return finished

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncGenerator[StreamDelta, None]:
        """`stream` for a conversation, through the model's chat template."""
        return self.stream(self._template(messages), params, options)

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> RequestOutput:
        """`generate` for a conversation, through the model's chat template."""
        return await self.generate(self._template(messages), params, options)

    async def close(self, *, drain: bool = False, timeout: float | None = CLOSE_SECONDS) -> None:
        """Take no more requests and end the thread: those in flight are aborted, or `drain`: run
        to their end first.

        A step (its drafter, most likely) that does not come back for `timeout` seconds is given up:
        streams end with EngineClosed, and memory stays taken while it hangs. None: wait for it.

        Raises ConfigError for a `timeout` below 0.
        """
        if timeout is not None and not timeout >= 0:
            raise ConfigError(f"timeout must be a number of seconds of 0 or more, got {timeout!r}")
        self._worker.stop(drain)
        await asyncio.to_thread(self._worker.finish, timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _prepare(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions | None
    ) -> Group:
        params = check_params(SamplingParams() if params is None else params)
        return self._make(prompt, params, options)

    async def _read(self, group: Group, *, deltas: bool) -> AsyncGenerator[StreamDelta, None]:
        feed = Feed(group, self.num_speculative_tokens, deltas=deltas)
        self._worker.submit(feed)
        try:
            async with aclosing(feed.read()) as pending:
                async for delta in pending:
                    yield delta
        finally:
            self._worker.leave(feed)
