"""Streamed text, whatever the stops, the bytes of a token and the pace of the reader."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft import LLM, AsyncEngine, SamplingParams
from foredraft.drafters.ngram import NgramDrafter
from foredraft.testing.drafters import RepeatDrafter
from foredraft.testing.models import tiny_model

from .async_rig import run, until

# Every third token is part of a character of two, three or four bytes.
SPELLINGS = [
    *(b"a", b"b", b"ab", b"\xc3", b"\xa9", b"\xc3\xa9", b"\xe6\x97", b"\xa5", b"\xe6", b"\x97\xa5"),
    *(b"\xf0\x9f\x98", b"\x80", b"\xf0\x9f", b"\x98\x80", b" ", b"c\xc3", b"\xa9c", b"abc"),
]
PROMPTS = ([3, 1, 4, 1, 5], [9], [5, 6, 7, 5, 6, 7, 5, 6])
CONFIG = {"num_speculative_tokens": 4}


class PartsOfCharacters:
    """A byte-level tokenizer whose tokens begin and end anywhere in a character."""

    is_byte_level = True

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def token_bytes(self, token_id, skip_special_tokens=True):
        return SPELLINGS[token_id % len(SPELLINGS)]

    def decode(self, ids, skip_special_tokens=True):
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


TARGET = tiny_model(seed=1, vocab_size=32)
TARGET = replace(TARGET, tokenizer=PartsOfCharacters(TARGET.tokenizer))
OFFLINE = LLM(TARGET, seed=5)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[AsyncEngine]]:
    """One for all examples: drafts that are right now and then, and drafts from the prompt."""
    drafters = (RepeatDrafter(7), NgramDrafter())
    made = [AsyncEngine(TARGET, drafter=d, speculative_config=CONFIG, seed=5) for d in drafters]
    yield made
    for engine in made:
        run(engine.close)


@st.composite
def requests(draw):
    """A prompt, parameters whose stop strings often occur, and where the reader falls asleep."""
    prompt = draw(st.sampled_from(PROMPTS))
    params = SamplingParams(
        max_tokens=draw(st.integers(1, 40)),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 7)),
        ignore_eos=True,
        include_stop_str_in_output=draw(st.booleans()),
    )
    text = OFFLINE.generate([prompt], params)[0].text
    stops = []
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, max(0, len(text) - 1)))
        found = text[start : start + draw(st.integers(1, 6))]
        stops.append(found + draw(st.sampled_from(["", "", "é", "a"])))
    stops = [stop for stop in stops if stop]
    pauses = draw(st.sets(st.integers(0, 6)))
    return prompt, replace(params, stop=stops or None), pauses


@settings(max_examples=120)
@given(request=requests(), which=st.integers(0, 1))
def test_deltas_are_the_offline_text_and_never_show_a_stop_string(engines, request, which):
    prompt, params, pauses = request
    engine = engines[which]
    expected = OFFLINE.generate([prompt], params)[0]

    async def main():
        deltas = []
        async for delta in engine.stream(prompt, params):
            deltas.append(delta)
            if len(deltas) in pauses:
                await until(lambda: not engine.engine.has_work)
            await asyncio.sleep(0)
        return deltas

    deltas = run(main)
    shown, token_ids = "", []
    for delta in deltas:
        shown += delta.text
        token_ids += delta.token_ids
        if not params.include_stop_str_in_output:
            assert not any(stop in shown for stop in params.stop_strings)
    assert shown == deltas[-1].finished.text == expected.text
    assert token_ids == list(expected.token_ids)
    assert deltas[-1].finished.finish_reason == expected.finish_reason
    assert deltas[-1].finished.outputs[0].stop_reason == expected.outputs[0].stop_reason
    if expected.finish_reason == "length":
        assert shown == TARGET.tokenizer.decode(token_ids)
    elif params.include_stop_str_in_output:
        assert shown.endswith(params.stop_strings)
