"""Many coroutines, one engine: each gets what it would get alone, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from foredraft import AsyncEngine, ConfigError, EngineClosed, InvalidRequest, QueueFull
from foredraft.drafters.ngram import NgramDrafter
from foredraft.engine.engine import Engine
from foredraft.testing.drafters import RepeatDrafter

from .async_rig import Gate, collect, freed, run, until
from .conftest import GREEDY, PROMPTS, SEEDED

MakeEngine = Callable[..., AsyncEngine]
LONG = replace(GREEDY, max_tokens=200)


@pytest.fixture(autouse=True)
def contradictions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In another thread `check_integrity` after a step must not go unseen."""
    found: list[Exception] = []
    check = Engine.check_integrity

    def checked(engine: Engine) -> None:
        try:
            check(engine)
        except Exception as error:
            found.append(error)

    monkeypatch.setattr(Engine, "check_integrity", checked)
    yield
    assert found == []


@pytest.fixture
def make_engine(target) -> MakeEngine:
    def make(drafter: Any = None, width: int = 4, **settings: Any) -> AsyncEngine:
        if drafter is not None:
            settings |= {"drafter": drafter}
            settings.setdefault("speculative_config", {"num_speculative_tokens": width})
        return AsyncEngine(target, **({"seed": 5, "page_size": 4} | settings))

    return make


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("drafter", [None, NgramDrafter, lambda: RepeatDrafter(3)])
def test_each_gets_what_it_would_get_alone(make_engine, plain, params, drafter):
    async def main():
        async with make_engine(drafter and drafter(), max_num_seqs=3) as engine:
            streams = asyncio.gather(*(collect(engine.stream(p, params)) for p in PROMPTS))
            outputs = asyncio.gather(*(engine.generate(p, params) for p in PROMPTS))
            collected, whole = await streams, await outputs
            await freed(engine)
        return collected, whole

    collected, whole = run(main)
    expected = plain(params)
    assert [list(output.token_ids) for output in whole] == expected
    for (deltas, output), want in zip(collected, expected, strict=True):
        assert [token for delta in deltas for token in delta.token_ids] == want
        assert "".join(delta.text for delta in deltas) == output.text
        assert [o for delta in deltas for o in delta.origins] == list(output.origins)
        times = [delta.emitted_at for delta in deltas]
        assert times == sorted(times)
        assert deltas[-1].completion is output.outputs[0]


def test_completions_of_one_prompt_carry_their_index(make_engine, make_llm):
    params = replace(SEEDED, n=3)
    expected = make_llm().generate(PROMPTS[1], params)[0]

    async def main():
        async with make_engine(NgramDrafter()) as engine:
            return await collect(engine.stream(PROMPTS[1], params))

    deltas, output = run(main)
    for index, want in enumerate(expected.outputs):
        own = [delta for delta in deltas if delta.index == index]
        assert [token for delta in own for token in delta.token_ids] == list(want.token_ids)
        assert "".join(delta.text for delta in own) == want.text
        assert [delta.completion is None for delta in own] == [True] * (len(own) - 1) + [False]
        assert own[-1].completion.finish_reason == want.finish_reason
    assert [o.token_ids for o in output.outputs] == [o.token_ids for o in expected.outputs]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_acceptance_is_the_same_offline_served_and_again(make_engine, make_llm, params):
    """Faults 65 and 74: the second and third request speculate as the first, and as offline."""

    async def main():
        async with make_engine(NgramDrafter()) as engine:
            rounds = []
            for _ in range(3):
                outputs = [await engine.generate(prompt, params) for prompt in PROMPTS]
                rounds.append([o.metrics.speculative_decoding for o in outputs])
            return rounds

    llm = make_llm(NgramDrafter(), 4)
    outputs = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
    offline = [output.metrics.speculative_decoding for output in outputs]
    assert run(main) == [offline] * 3
    assert sum(each.num_draft_tokens for each in offline) > 0


def test_a_conversation_goes_through_the_template(make_engine, make_llm):
    messages = [{"role": "user", "content": "hi"}]

    async def main():
        async with make_engine() as engine:
            _, streamed = await collect(engine.stream_chat(messages, GREEDY))
            return streamed, await engine.chat(messages, GREEDY)

    streamed, whole = run(main)
    assert streamed.text == whole.text == make_llm().chat(messages, GREEDY)[0].text


def test_leaving_a_stream_early_frees_its_pages(make_engine):
    async def main():
        async with make_engine(NgramDrafter(), max_num_seqs=2) as engine:
            closed = engine.stream(PROMPTS[0], LONG)
            await anext(closed)
            await closed.aclose()
            await freed(engine)
            async for _ in engine.stream(PROMPTS[0], LONG):
                break
            gc.collect()
            await freed(engine)
            engine.stream(PROMPTS[0], LONG)  # never read: never queued
            never = engine.stream(PROMPTS[0], LONG)
            await never.aclose()
            await freed(engine)

    run(main)


def test_a_cancelled_task_frees_its_pages_wherever_its_request_is(make_engine, plain):
    """Running, queued, or not yet seen by the engine's thread; neighbours notice nothing."""
    gate = Gate()

    async def main():
        async with make_engine(max_num_seqs=2, tap=gate) as engine:
            gate.shut()
            kept = asyncio.ensure_future(engine.generate(PROMPTS[0], GREEDY))
            await gate.held()
            rest = [asyncio.ensure_future(engine.generate(p, LONG)) for p in PROMPTS[1:]]
            await asyncio.sleep(0)
            rest[0].cancel()  # not seen yet: the thread is inside a step
            await asyncio.wait([rest[0]])  # until it has left: only then may the thread look
            await gate.let(2)
            assert len(engine.engine.scheduler.waiting) == 2
            for task in rest[1:]:
                task.cancel()
            gate.open()
            await asyncio.gather(*rest, return_exceptions=True)
            output = await kept
            await freed(engine)
        assert all(task.cancelled() for task in rest)
        assert list(output.token_ids) == plain(GREEDY)[0]

    run(main)


def test_a_slow_reader_gets_all_in_one_delta(make_engine, plain):
    async def main():
        async with make_engine(RepeatDrafter(3)) as engine:
            stream = engine.stream(PROMPTS[0], GREEDY)
            first = await anext(stream)
            await until(lambda: not engine.engine.has_work)
            rest = [delta async for delta in stream]
        assert len(rest) <= 2  # one may have been on its way
        assert [t for d in (first, *rest) for t in d.token_ids] == plain(GREEDY)[0]
        assert "".join(d.text for d in (first, *rest)) == rest[-1].finished.text

    run(main)


def test_a_full_queue_refuses_and_takes_again(make_engine):
    gate = Gate()

    async def main():
        async with make_engine(max_num_seqs=2, max_queued=1, tap=gate) as engine:
            gate.shut()
            tasks = [asyncio.ensure_future(engine.generate(p, GREEDY)) for p in PROMPTS[:3]]
            await gate.held()
            refused = "3 of at most 3 completions are running or queued, no room for 1 more"
            with pytest.raises(QueueFull, match=refused):
                await engine.generate(PROMPTS[3], GREEDY)
            with pytest.raises(InvalidRequest, match="n = 4 completions are more than"):
                await engine.generate(PROMPTS[3], replace(SEEDED, n=4))
            gate.open()
            outputs = await asyncio.gather(*tasks)
            assert {output.finish_reason for output in outputs} == {"length"}
            await freed(engine)
            output = await engine.generate(PROMPTS[3], replace(SEEDED, n=3))
            assert len(output.outputs) == 3

    run(main)


@pytest.mark.parametrize("value", [-1, 1.5, "2", True])
def test_a_queue_has_a_length(make_engine, value):
    with pytest.raises(ConfigError, match="max_queued must be an integer of 0 or more"):
        make_engine(max_queued=value)


def test_what_cannot_be_honoured_is_refused_at_once(make_engine):
    async def main():
        async with make_engine() as engine:
            for prompt, params in (([], GREEDY), ([99], GREEDY), ([1], {"temperature": 0})):
                with pytest.raises(InvalidRequest):
                    engine.stream(prompt, params)
                with pytest.raises(InvalidRequest):
                    await engine.generate(prompt, params)

    run(main)


def test_an_error_of_one_request_ends_it_alone(make_engine, plain):
    impossible = replace(
        GREEDY, allowed_token_ids=[7], stop_token_ids=[7], min_tokens=3, max_tokens=8
    )

    async def main():
        async with make_engine(RepeatDrafter(3)) as engine:
            each = [GREEDY, impossible, GREEDY]
            outputs = await asyncio.gather(
                *(engine.generate(p, one) for p, one in zip(PROMPTS, each, strict=False))
            )
            await freed(engine)
        assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
        assert "no token is left" in outputs[1].outputs[0].error
        assert [list(outputs[i].token_ids) for i in (0, 2)] == [plain(GREEDY)[i] for i in (0, 2)]

    run(main)


def test_several_event_loops_share_one_engine(make_engine, plain):
    engine = make_engine(NgramDrafter())
    outputs: dict[int, list[int]] = {}

    def serve(index: int) -> None:
        async def main():
            _, output = await collect(engine.stream(PROMPTS[index], GREEDY))
            outputs[index] = list(output.token_ids)

        run(main)

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run(engine.close)
    assert [outputs[i] for i in range(len(PROMPTS))] == plain(GREEDY)


def test_a_closed_event_loop_frees_what_it_asked_for(make_engine, plain):
    engine = make_engine()
    loop = asyncio.new_event_loop()
    stream = engine.stream(PROMPTS[0], replace(LONG, max_tokens=240))
    loop.run_until_complete(anext(stream))
    loop.close()
    run(lambda: freed(engine))
    output = run(lambda: engine.generate(PROMPTS[1], GREEDY))
    assert list(output.token_ids) == plain(GREEDY)[1]
    with pytest.raises(StopIteration):  # closed, though its loop can't do it
        stream.aclose().send(None)
    run(engine.close)


@pytest.mark.parametrize("drain", [False, True])
def test_closing_aborts_or_drains(make_engine, plain, drain):
    gate = Gate()

    async def main():
        engine = make_engine(max_num_seqs=2, tap=gate)
        gate.shut()
        tasks = [asyncio.ensure_future(engine.generate(p, GREEDY)) for p in PROMPTS]
        await gate.held()
        closing = asyncio.ensure_future(engine.close(drain=drain))
        await asyncio.sleep(0)
        with pytest.raises(EngineClosed):
            await engine.generate(PROMPTS[0], GREEDY)
        gate.open()
        outputs = await asyncio.gather(*tasks)
        await closing
        await engine.close()  # again: nothing left to do
        await freed(engine)
        if drain:
            assert [list(output.token_ids) for output in outputs] == plain(GREEDY)
        else:
            assert {output.finish_reason for output in outputs} == {"abort"}
        with pytest.raises(EngineClosed, match="the engine is closed"):
            await engine.generate(PROMPTS[0], GREEDY)

    run(main)


def test_an_engine_that_nobody_uses_ends_its_thread(make_engine):
    engine = make_engine()
    thread = engine._worker._thread
    run(lambda engine=engine: engine.generate(PROMPTS[0], GREEDY))
    del engine
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


UNCLOSED = """
import asyncio
from foredraft import AsyncEngine, SamplingParams
from foredraft.testing.models import tiny_model

async def main():
    global engine, stream
    engine = AsyncEngine(tiny_model(max_positions=4096), seed=1)
    stream = engine.stream([3, 4], SamplingParams(max_tokens=4000, ignore_eos=True))
    await anext(stream)

loop = asyncio.new_event_loop()
loop.run_until_complete(main())
print("left")
"""


def test_the_interpreter_ends_in_the_middle_of_a_stream():
    """Neither a hang nor a crash: a pass is not cut, the rest is not waited for."""
    done = subprocess.run(
        [sys.executable, "-c", UNCLOSED], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "left\n"), done.stderr
    assert "Fatal" not in done.stderr


def test_many_come_and_go(make_engine, plain):
    """Sixty requests, a third of them cancelled at some token, on few pages."""
    expected = plain(GREEDY)

    async def one(engine: AsyncEngine, number: int) -> None:
        prompt, want = PROMPTS[number % 5], expected[number % 5]
        tokens: list[int] = []
        async with aclosing(engine.stream(prompt, GREEDY)) as stream:
            async for delta in stream:
                tokens += delta.token_ids
                if number % 3 == 0 and len(tokens) > number % 17:
                    break
        assert tokens == want[: len(tokens)]
        assert number % 3 == 0 or tokens == want

    async def main():
        async with make_engine(NgramDrafter(), kv_cache_gib=64 / 2**20) as engine:
            await asyncio.gather(*(one(engine, number) for number in range(60)))
            await freed(engine)

    run(main)
