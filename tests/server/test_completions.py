"""Completions by the official client equal the offline engine's, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from foredraft import LLM, SamplingParams
from foredraft.models.load import LoadedModel
from foredraft.server.replies import ChatReply, CompletionReply

from .rig import NAME, Running

PROMPT = "abc abc abc ab"
MESSAGES: list[Any] = [{"role": "user", "content": "one two one two"}]


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return server.openai()


@pytest.fixture(scope="module")
def offline(loaded: LoadedModel) -> LLM:
    return LLM(loaded)


SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "max_tokens": 24}
PENALISED = {
    "temperature": 1.0, "seed": -3, "max_tokens": 24, "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
}  # fmt: skip


@pytest.mark.parametrize("fields", [{"temperature": 0, "max_tokens": 24}, SAMPLED, PENALISED])
def test_completions_are_the_offline_engines(
    client: OpenAI, offline: LLM, fields: dict[str, Any]
) -> None:
    wanted = offline.generate(PROMPT, SamplingParams(**fields))[0]
    found = client.completions.create(
        model=NAME, prompt=PROMPT, extra_body={"return_token_ids": True}, **fields
    )
    CompletionReply.model_validate(found.to_dict())
    choice = found.choices[0]
    assert choice.text == wanted.text
    assert choice.model_extra is not None
    assert choice.model_extra["token_ids"] == list(wanted.token_ids)
    assert choice.finish_reason == wanted.finish_reason
    assert found.usage is not None
    assert found.usage.completion_tokens == len(wanted.token_ids)
    assert found.usage.prompt_tokens == len(wanted.prompt_token_ids)
    streamed = list(client.completions.create(model=NAME, prompt=PROMPT, stream=True, **fields))
    assert "".join(chunk.choices[0].text for chunk in streamed) == wanted.text
    assert streamed[-1].choices[0].finish_reason == wanted.finish_reason


def test_chat_is_the_offline_engines_with_usage_and_statistics(
    client: OpenAI, offline: LLM
) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, n=1)
    wanted = offline.chat(MESSAGES, params)[0]
    request: dict[str, Any] = {
        "model": NAME, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 40,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    found = client.chat.completions.create(**request)
    ChatReply.model_validate(found.to_dict())
    assert found.choices[0].message.content == wanted.text
    assert found.model_extra is not None
    stats = found.model_extra["metrics"]["speculative_decoding"]
    assert stats["num_accepted_draft_tokens"] <= stats["num_draft_tokens"]
    chunks = list(
        client.chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert text == wanted.text
    assert [each.usage is None for each in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].usage is not None
    assert found.usage is not None
    assert chunks[-1].usage.completion_tokens == found.usage.completion_tokens == 40
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["metrics"]["speculative_decoding"]["num_spec_tokens"] > 0
    details = found.usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens is not None


def test_several_prompts_and_choices_are_numbered(client: OpenAI, offline: LLM) -> None:
    prompts = ["abc", "xyz xyz"]
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=6)
    wanted = [each.text for out in offline.generate(prompts, params) for each in out.outputs]
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 5, "n": 3, "max_tokens": 6}
    found = client.completions.create(model=NAME, prompt=prompts, **fields)
    assert [each.text for each in found.choices] == wanted
    assert [each.index for each in found.choices] == list(range(6))
    texts = [""] * 6
    for chunk in client.completions.create(model=NAME, prompt=prompts, stream=True, **fields):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == wanted


def test_a_prompt_may_be_token_ids_and_is_echoed(client: OpenAI, loaded: LoadedModel) -> None:
    ids = loaded.tokenizer.encode_prompt(PROMPT)
    by_text = client.completions.create(model=NAME, prompt=PROMPT, temperature=0, echo=True)
    by_ids = client.completions.create(model=NAME, prompt=[ids], temperature=0, echo=True)
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert by_text.choices[0].text.startswith(PROMPT)
    chunks = client.completions.create(
        model=NAME, prompt=PROMPT, temperature=0, echo=True, stream=True
    )
    assert "".join(each.choices[0].text for each in chunks) == by_text.choices[0].text


def test_stop_strings_cut_where_the_offline_engine_cuts(client: OpenAI, offline: LLM) -> None:
    plain = offline.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24))[0].text
    stop = plain[6:9]
    wanted = offline.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24, stop=stop))[0]
    fields: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "stop": [stop]}
    found = client.completions.create(model=NAME, **fields)
    assert found.choices[0].text == wanted.text
    assert found.choices[0].finish_reason == "stop"
    chunks = list(client.completions.create(model=NAME, stream=True, **fields))
    assert "".join(each.choices[0].text for each in chunks) == wanted.text


def test_speculation_can_be_turned_off_for_a_request(client: OpenAI) -> None:
    found = {}
    for name, speculation in {
        "on": {},
        "off": {"speculation": {"enabled": False}},
        "narrow": {"speculation": {"num_speculative_tokens": 1}},
    }.items():
        found[name] = client.completions.create(
            model=NAME, prompt="ab " * 20, temperature=0, max_tokens=30,
            extra_body={"ignore_eos": True, "request_type": name, **speculation},
        )  # fmt: skip
    assert len({each.choices[0].text for each in found.values()}) == 1
    extra = {name: each.model_extra or {} for name, each in found.items()}
    drafted = {
        name: each["metrics"]["speculative_decoding"]["num_draft_tokens"]
        for name, each in extra.items()
    }
    assert drafted["off"] == 0 < drafted["narrow"] <= drafted["on"]


def test_every_token_can_say_where_it_came_from(client: OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": NAME, "prompt": "ab " * 20, "temperature": 0, "max_tokens": 30,
        "extra_body": {"ignore_eos": True, "return_token_origins": True},
    }  # fmt: skip
    whole = client.completions.create(**fields).choices[0]
    tokens = (whole.model_extra or {})["tokens"]
    assert "".join(each["text"] for each in tokens) == whole.text
    assert {each["origin"] for each in tokens} >= {"accepted"}
    streamed = [each.choices[0] for each in client.completions.create(stream=True, **fields)]
    assert [(each.model_extra or {})["tokens"] for each in streamed if each.text] == [
        [each] for each in tokens if each["text"]
    ]


def test_mistakes_are_told_by_field(client: OpenAI) -> None:
    with pytest.raises(NotFoundError) as unknown:
        client.completions.create(model="another", prompt="a")
    assert unknown.value.code == "model_not_found"
    for field, value in {
        "temperature": -1, "top_p": 2, "suffix": "x", "best_of": 3, "bad_words": ["a"], "foo": 1,
        "max_tokens": 0, "logit_bias": {"x": 1}, "stop": ["a"] * 99, "stream_options": {},
        "seed": 2**70, "n": True,
    }.items():  # fmt: skip
        with pytest.raises(BadRequestError) as refused:
            client.completions.create(model=NAME, prompt="a", extra_body={field: value})
        assert refused.value.param is not None, field
        assert refused.value.param.split(".")[0] == field
        assert field in str(refused.value)
    with pytest.raises(BadRequestError) as long:
        client.completions.create(model=NAME, prompt="a" * 3000)
    assert long.value.code == "context_length_exceeded"


def test_fields_without_effect_are_taken(client: OpenAI) -> None:
    client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=1, user="me", store=True,
        metadata={"a": "b"}, service_tier="auto", modalities=["text"],
        response_format={"type": "text"}, extra_body={"functions": None},
    )  # fmt: skip
