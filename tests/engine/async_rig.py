"""What the tests of `AsyncEngine` share: a clock that no test hangs on, and a gate in the steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from foredraft import AsyncEngine, RequestOutput, StreamDelta

Result = TypeVar("Result")
PATIENCE = 60.0  # seconds; what takes longer hangs


def run(main: Callable[[], Awaitable[Result]]) -> Result:
    """`asyncio.run`, which fails where it would hang."""

    async def bounded() -> Result:
        return await asyncio.wait_for(main(), PATIENCE)

    return asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


async def freed(engine: AsyncEngine) -> None:
    """Wait until nothing is in flight; then nothing may be held."""
    await until(lambda: not engine.engine.has_work)
    engine.engine.check_integrity()
    assert engine.engine.scheduler.pages_in_use == 0


async def collect(stream: AsyncIterator[StreamDelta]) -> tuple[list[StreamDelta], RequestOutput]:
    """All deltas, and the output that came with the last."""
    deltas = [delta async for delta in stream]
    assert [delta.finished is None for delta in deltas[:-1]] == [True] * (len(deltas) - 1)
    finished = deltas[-1].finished
    assert finished is not None
    return deltas, finished


class Gate:
    """A tap that holds the engine's thread at every committed token, while it is shut."""

    def __init__(self) -> None:
        self._shut = False
        self._passes = threading.Semaphore(0)
        self.num_held = 0  # tokens so far

    def __call__(self, *_: Any) -> None:
        if self._shut:
            self.num_held += 1
            assert self._passes.acquire(timeout=PATIENCE)

    def shut(self) -> None:
        self._shut = True

    def open(self) -> None:
        self._shut = False
        self._passes.release()

    async def held(self) -> None:
        """Wait for the first token at the gate."""
        await until(lambda: self.num_held > 0)

    async def let(self, num_tokens: int) -> None:
        """Let so many pass, and wait for the next."""
        seen = self.num_held
        for _ in range(num_tokens):
            self._passes.release()
        await until(lambda: self.num_held >= seen + num_tokens)
