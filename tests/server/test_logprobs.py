"""Log-probabilities in both forms, exact to the byte where a token is part of a character."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from foredraft import LLM, AsyncEngine, SamplingParams
from foredraft.engine.outputs import TokenLogprobs
from foredraft.models.load import LoadedModel
from foredraft.server.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs

from .rig import NAME, Running

PROMPT = "abc abc abc"


@pytest.fixture(scope="module")
def wanted(loaded: LoadedModel) -> list[TokenLogprobs]:
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
    found = LLM(loaded).generate(PROMPT, params)[0].logprobs
    assert found is not None
    return list(found)


def test_chat_logprobs_are_the_same_streamed_or_not(server: Running) -> None:
    fields: dict[str, Any] = {
        "model": NAME, "messages": [{"role": "user", "content": PROMPT}], "temperature": 0,
        "max_tokens": 12, "logprobs": True, "top_logprobs": 3, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    client = server.openai()
    whole = client.chat.completions.create(**fields).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert len(whole.content) == 12
    for each in whole.content:
        assert bytes(each.bytes or []).decode() == each.token
        assert len(each.top_logprobs) == 3
        assert each.logprob == pytest.approx(each.top_logprobs[0].logprob)
    streamed = []
    for chunk in client.chat.completions.create(stream=True, **fields):
        found = chunk.choices[0].logprobs
        streamed += (found.content or []) if found is not None else []
    # The reference kernels' last bits depend on what is computed beside.
    assert [each.token for each in streamed] == [each.token for each in whole.content]
    assert [each.logprob for each in streamed] == pytest.approx(
        [each.logprob for each in whole.content]
    )


def test_completion_logprobs_are_the_engines(server: Running, wanted: Any) -> None:
    fields: dict[str, Any] = {
        "model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "logprobs": 2,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    client = server.openai()
    choice = client.completions.create(**fields).choices[0]
    found = choice.logprobs
    assert found is not None
    assert found.token_logprobs == pytest.approx([each.logprob for each in wanted])
    assert found.tokens is not None
    shown = [t for t in found.tokens if t not in ("<s>", "</s>")]
    assert "".join(shown) == choice.text
    parts: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": []}
    for chunk in client.completions.create(stream=True, **fields):
        each = chunk.choices[0].logprobs
        for name in parts:
            parts[name] += getattr(each, name)
    assert parts.pop("token_logprobs") == pytest.approx(found.token_logprobs)
    assert parts == {name: getattr(found, name) for name in parts}


def test_an_echoed_prompt_has_its_own(server: Running, loaded: LoadedModel) -> None:
    client = server.openai()
    choice = client.completions.create(
        model=NAME, prompt=PROMPT, temperature=0, max_tokens=2, logprobs=1, echo=True
    ).choices[0]
    found = choice.logprobs
    assert found is not None
    assert found.token_logprobs is not None
    num_prompt = len(loaded.tokenizer.encode_prompt(PROMPT))
    assert len(found.token_logprobs) == num_prompt + 2
    assert found.token_logprobs[0] is None
    assert None not in found.token_logprobs[1:]
    assert found.text_offset is not None
    assert found.text_offset[-1] <= len(choice.text)


class Bytes:
    """A byte-level tokenizer of three tokens: an e with an accent in two halves, and an a."""

    is_byte_level = True
    _spellings = (b"\xc3", b"\xa9", b"a")

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        return self._spellings[token_id]

    def token_text(self, token_id: int) -> str:
        return self._spellings[token_id].decode("utf-8", "replace")


def _known(token: int, top: dict[int, float]) -> TokenLogprobs:
    return TokenLogprobs(token, -math.inf, 4, top)


def test_tokens_that_split_a_character_keep_their_bytes() -> None:
    tokenizer: Any = Bytes()
    chat = chat_logprobs(tokenizer, [_known(0, {1: -0.5}), _known(1, {})])
    assert [each["bytes"] for each in chat["content"]] == [[0xC3], [0xA9]]
    assert chat["content"][0]["top_logprobs"][0]["bytes"] == [0xA9]
    assert chat["content"][0]["logprob"] == -9999.0
    form = CompletionLogprobs(tokenizer, True)
    found = form.of([2, 0, 1, 2], [None, *[_known(each, {2: -1.0}) for each in (0, 1, 2)]])
    assert found["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "a"]
    assert found["text_offset"] == [0, 1, 1, 2]
    assert found["top_logprobs"][1] == {"a": -1.0, "bytes:\\xc3": -9999.0}
    ranks = prompt_logprobs(tokenizer, [None, _known(0, {1: -0.5})])[1]
    assert ranks is not None
    assert {key: each["rank"] for key, each in ranks.items()} == {"1": 1, "0": 4}


def test_prompt_logprobs_are_told_whole_and_refused_in_a_stream(server: Running) -> None:
    with server.http() as client:
        body = {"model": NAME, "prompt": PROMPT, "prompt_logprobs": 1, "max_tokens": 1}
        found = client.post("/v1/completions", json=body).json()["prompt_logprobs"][0]
        assert found[0] is None
        assert all(len(each) in (1, 2) for each in found[1:])
        refused = client.post("/v1/completions", json=body | {"stream": True})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt_logprobs"


def test_a_stream_of_the_engine_brings_them_with_their_tokens(
    loaded: LoadedModel, wanted: Any
) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)

    async def main() -> list[TokenLogprobs]:
        async with AsyncEngine(loaded, speculative_config={"method": "ngram"}) as engine:
            found: list[TokenLogprobs] = []
            async for delta in engine.stream(PROMPT, params):
                assert len(delta.logprobs) == len(delta.token_ids)
                found += delta.logprobs
            return found

    assert [each.token_id for each in asyncio.run(main())] == [each.token_id for each in wanted]
    offline = LLM(loaded).stream(PROMPT, params)
    ids = [each.token_id for delta in offline for each in delta.logprobs]
    assert ids == [each.token_id for each in wanted]
