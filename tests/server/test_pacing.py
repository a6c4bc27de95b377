"""Bursts are cut into their tokens and leave evenly, no later than one step after they came."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from foredraft import AsyncEngine, SamplingParams
from foredraft.engine.outputs import StreamDelta
from foredraft.engine.stops import safe_text_length
from foredraft.models.load import LoadedModel
from foredraft.server.cutting import TokenCutter
from foredraft.server.pacing import LONGEST_STEP, Schedule, paced

from .rig import NAME, serving


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(1, 9)), min_size=1, max_size=30))
def test_a_token_waits_less_than_the_step_before_it_took(bursts: list[tuple[float, int]]) -> None:
    schedule, now, last = Schedule(), 0.0, None
    for gap, number in bursts:
        now += gap
        times = schedule.times(now, number)
        step = 0.0 if last is None else now - last
        last = now
        assert len(times) == number
        assert times[0] == now
        assert times == sorted(times)
        assert times[-1] <= now + min(step, LONGEST_STEP) + 1e-9


def test_a_steady_engine_gives_a_steady_stream() -> None:
    schedule = Schedule()
    times = [time for burst in range(10) for time in schedule.times(0.1 * burst, 4)]
    gaps = [after - before for before, after in itertools.pairwise(times[8:])]
    assert max(gaps) < 0.026
    assert min(gaps) > 0.024


def _burst(index: int, number: int) -> StreamDelta:
    return StreamDelta("x" * number, [7] * number, index=index)


def _cut(delta: StreamDelta) -> Sequence[StreamDelta]:
    return [StreamDelta("x", [7], index=delta.index) for _ in delta.token_ids]


def test_what_is_held_leaves_when_more_comes_and_at_the_end() -> None:
    async def source() -> AsyncGenerator[StreamDelta, None]:
        for burst in ((0, 3), (1, 2), (0, 4), (1, 1), (0, 2)):
            yield _burst(*burst)
            await asyncio.sleep(0.01)

    async def main() -> list[int]:
        return [each.index async for each in paced(source(), [_cut, _cut])]

    found = asyncio.run(main())
    assert (found.count(0), found.count(1)) == (9, 3)


def test_leaving_a_paced_stream_closes_its_source() -> None:
    closed = []

    async def source() -> AsyncGenerator[StreamDelta, None]:
        try:
            while True:
                yield _burst(0, 2)
                await asyncio.sleep(0.001)
        finally:
            closed.append(True)

    async def main() -> None:
        stream = paced(source(), [_cut])
        await anext(stream)
        await stream.aclose()
        assert closed == [True]

    asyncio.run(main())


def test_cut_deltas_join_to_what_came(loaded: LoadedModel) -> None:
    """Also where text is held back for a stop string that may come."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, stop=["abcdef", "zq"])

    async def main() -> list[StreamDelta]:
        async with AsyncEngine(loaded, speculative_config={"method": "ngram"}) as engine:
            return [delta async for delta in engine.stream("abc abc abc abc", params)]

    deltas = asyncio.run(main())
    cutter = TokenCutter(loaded.tokenizer, True)
    for delta in deltas:
        parts = cutter.cut(delta)
        assert "".join(part.text for part in parts) == delta.text
        assert [token for part in parts for token in part.token_ids] == list(delta.token_ids)
        assert all(len(part.token_ids) <= 1 for part in parts)
        assert parts[-1].completion is delta.completion


def test_a_tokens_text_is_the_same_however_tokens_were_grouped(loaded: LoadedModel) -> None:
    """Text that may become a stop string comes with the token that shows that it doesn't."""
    stops = ("abq", "bca")
    ids = loaded.tokenizer.encode("abcabcab bcbc aabb")
    single, texts, shown = TokenCutter(loaded.tokenizer, True, stops), [], 0
    for at, token in enumerate(ids):
        text = loaded.tokenizer.decode(ids[: at + 1])
        safe = len(text) if at == len(ids) - 1 else safe_text_length(stops, text)
        texts += [part.text for part in single.cut(StreamDelta(text[shown:safe], [token], []))]
        shown = safe
    whole = TokenCutter(loaded.tokenizer, True, stops)
    parts = whole.cut(StreamDelta(loaded.tokenizer.decode(ids), ids, []))
    assert [part.text for part in parts] == texts
    assert "" in texts  # something was held back


def test_a_paced_server_sends_single_tokens_and_the_same_text(loaded: LoadedModel) -> None:
    fields: dict[str, Any] = {
        "model": NAME, "prompt": "ab " * 20, "temperature": 0, "max_tokens": 24,
        "logprobs": 1, "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }  # fmt: skip
    engine = AsyncEngine(loaded, speculative_config={"method": "ngram"})
    with serving(engine, pace=True) as server:
        client = server.openai()
        whole = client.completions.create(**fields).choices[0]
        chunks = [each.choices[0] for each in client.completions.create(stream=True, **fields)]
    asyncio.run(engine.close())
    assert "".join(each.text for each in chunks) == whole.text
    assert [len((each.model_extra or {})["token_ids"]) for each in chunks] == [1] * 24
    assert all(each.logprobs and len(each.logprobs.tokens or ()) == 1 for each in chunks)
    assert whole.logprobs is not None
    offsets = [(each.logprobs.text_offset or [-1])[0] for each in chunks if each.logprobs]
    assert offsets == whole.logprobs.text_offset
