"""Between the engine's thread and an event loop: what is told when, whoever is faster."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest

from foredraft import AsyncEngine, EngineClosed
from foredraft.engine.feed import Feed

from .async_rig import run
from .conftest import GREEDY, PROMPTS, SEEDED


@pytest.mark.parametrize("deltas", [True, False])
def test_a_reader_between_two_completions_of_one_step_misses_neither(make_llm, deltas):
    llm = make_llm()
    group = llm._make(PROMPTS[0], replace(SEEDED, n=3))
    llm._add(group)
    while llm.engine.has_work:
        llm.engine.step()

    async def main():
        feed = Feed(group, 0, deltas=deltas)
        told = []

        async def read():
            told.extend([delta async for delta in feed.read()])

        reader = asyncio.create_task(read())
        for request in group.requests:
            assert feed.put(request)
            await asyncio.sleep(0.01)
        await reader
        return told

    told = run(main)
    output = group.output(0)
    assert told[-1].finished == output
    if deltas:
        assert [delta.completion for delta in told] == output.outputs
        assert [delta.text for delta in told] == [each.text for each in output.outputs]
        assert [delta.finished for delta in told[:-1]] == [None] * 2


@pytest.mark.parametrize("deltas", [True, False], ids=["told and not looked at", "not told yet"])
def test_a_closed_event_loop_is_noticed_whatever_it_was_told(make_llm, deltas):
    llm = make_llm()
    group = llm._make(PROMPTS[0], GREEDY)
    llm._add(group)
    loop = asyncio.new_event_loop()

    async def make():
        return Feed(group, 0, deltas=deltas)

    feed = loop.run_until_complete(make())
    llm.engine.step()
    assert feed.put(*group.requests)
    loop.close()
    llm.engine.step()
    assert not feed.put(*group.requests)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_told_that_nothing_runs_there(target, plain):
    engine = AsyncEngine(target, seed=5, page_size=4)
    child = os.fork()
    if not child:
        try:
            with pytest.raises(EngineClosed, match="forked"):
                asyncio.run(asyncio.wait_for(engine.generate(PROMPTS[0], GREEDY), 5))
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    output = run(lambda: engine.generate(PROMPTS[0], GREEDY))
    assert list(output.token_ids) == plain(GREEDY)[0]
    run(engine.close)
