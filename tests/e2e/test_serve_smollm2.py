"""The real server and model by the official client: what it answers is the offline engine's for the
same seed, streamed or not, with speculation or without.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AuthenticationError, BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel

from foredraft import LLM, RequestOutput, SamplingParams, StructuredOutputs

from .test_serve import client_of, served

NAME = "smollm2-135m"
PROMPT = "One, two, three, four. One, two, three,"
MESSAGES: list[Any] = [{"role": "user", "content": "Name three fruits, then name them again."}]
PLAIN = {"speculation": {"enabled": False}}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "max_tokens": 16}
SAYS = [GREEDY, SAMPLED]
HOW = [{}, PLAIN]


class Fruit(BaseModel):
    name: str
    ripe: bool


@pytest.fixture(scope="module")
def client(smollm2_path: Path) -> Iterator[OpenAI]:
    arguments = (smollm2_path, "--served-model-name", NAME, "--method", "combined")
    with served(*arguments, "--api-key", "secret", threads=2) as (_, said):
        yield client_of(said, api_key="secret")


@pytest.fixture(scope="module")
def offline(smollm2_path: Path) -> LLM:
    """Plain decoding: what speculation must not change."""
    return LLM(smollm2_path)


@pytest.fixture(scope="module")
def wanted(offline: LLM) -> dict[str, list[RequestOutput]]:
    """What the offline engine says, all in one batch."""
    params = [SamplingParams(**says, logprobs=2) for says in SAYS]
    ids = offline.loaded.tokenizer.apply_chat_template(MESSAGES)
    outputs = offline.generate([*[ids] * 2, *[PROMPT] * 2], params * 2)
    return {"chat": outputs[:2], "text": outputs[2:]}


@pytest.mark.parametrize("how", HOW, ids=["speculative", "plain"])
@pytest.mark.parametrize("number", [0, 1], ids=["greedy", "sampled"])
def test_chat_is_the_offline_engines(
    client: OpenAI, wanted: dict[str, list[RequestOutput]], number: int, how: dict[str, Any]
) -> None:
    output = wanted["chat"][number]
    fields: dict[str, Any] = {"model": NAME, "messages": MESSAGES, **SAYS[number]}
    found = client.chat.completions.create(
        **fields, logprobs=True, top_logprobs=2, extra_body={**how, "return_token_ids": True}
    )
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content) == ("assistant", output.text)
    assert choice.finish_reason == output.finish_reason
    assert choice.model_extra is not None
    assert choice.model_extra["token_ids"] == list(output.token_ids)
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(output.prompt_token_ids)
    assert found.usage.completion_tokens == len(output.token_ids)
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert choice.logprobs is not None
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    entries = choice.logprobs.content or []
    assert [each.logprob for each in entries] == pytest.approx([e.logprob for e in logprobs])
    for entry, each in zip(entries, logprobs, strict=True):
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(list(each.top.values()))
    chunks = list(
        client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}, extra_body=how
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == output.text
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == found.usage.completion_tokens


@pytest.mark.parametrize("how", HOW, ids=["speculative", "plain"])
@pytest.mark.parametrize("number", [0, 1], ids=["greedy", "sampled"])
def test_completions_are_the_offline_engines(
    client: OpenAI, wanted: dict[str, list[RequestOutput]], number: int, how: dict[str, Any]
) -> None:
    output = wanted["text"][number]
    fields: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "extra_body": how, **SAYS[number]}
    found = client.completions.create(**fields, echo=True)
    assert found.choices[0].text == PROMPT + output.text
    assert found.choices[0].finish_reason == output.finish_reason
    chunks = list(client.completions.create(**fields, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == output.text


def test_drafts_were_accepted(client: OpenAI) -> None:
    """Or else the tests above compare plain decoding with itself."""
    found = client.completions.create(model=NAME, prompt=PROMPT, **GREEDY)
    assert found.model_extra is not None
    stats = found.model_extra["metrics"]["speculative_decoding"]
    assert stats["num_accepted_draft_tokens"] > 0


def test_several_choices_and_a_stop(client: OpenAI, offline: LLM) -> None:
    fields = {**SAMPLED, "n": 3, "stop": [",", "\n"]}
    output = offline.generate(PROMPT, SamplingParams(**fields))[0]
    found = client.completions.create(model=NAME, prompt=PROMPT, **fields)
    for choice, each in zip(found.choices, output.outputs, strict=True):
        assert choice.index == each.index
        assert (choice.text, choice.finish_reason) == (each.text, each.finish_reason)
        assert choice.model_extra is not None
        assert choice.model_extra["stop_reason"] == each.stop_reason
    assert found.usage is not None
    assert found.usage.completion_tokens == sum(len(each.token_ids) for each in output.outputs)
    texts = ["", "", ""]
    for chunk in client.completions.create(model=NAME, prompt=PROMPT, stream=True, **fields):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [each.text for each in output.outputs]


def test_other_seeds_say_other_things(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": NAME, "prompt": PROMPT, **SAMPLED, "temperature": 1.5}
    texts = [
        client.completions.create(**{**fields, "seed": seed}).choices[0].text for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_a_schema_is_kept_to_and_parsed_by_the_client(client: OpenAI, offline: LLM) -> None:
    ask: list[Any] = [{"role": "user", "content": "Make up a fruit as JSON."}]
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "ripe": {"type": "boolean"}},
        "required": ["name", "ripe"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "fruit", "schema": schema}}
    params = SamplingParams(
        temperature=0, max_tokens=40, structured_outputs=StructuredOutputs(json=schema)
    )
    output = offline.chat(ask, params)[0]
    fields: dict[str, Any] = {"model": NAME, "messages": ask, "temperature": 0, "max_tokens": 40}
    found = client.chat.completions.create(**fields, response_format=form)
    text = found.choices[0].message.content or ""
    assert (text, found.choices[0].finish_reason) == (output.text, "stop")
    assert set(json.loads(text)) == {"name", "ripe"}
    with client.chat.completions.stream(**fields, response_format=form) as stream:
        assert stream.get_final_completion().choices[0].message.content == text
    parsed = client.chat.completions.parse(**fields, response_format=Fruit)
    assert isinstance(parsed.choices[0].message.parsed, Fruit)


def test_mistakes_are_the_clients_exceptions(client: OpenAI) -> None:
    with pytest.raises(NotFoundError) as missing:
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(BadRequestError) as bad:
        client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(BadRequestError) as refused:
        client.completions.create(model=NAME, prompt=PROMPT, extra_body={"use_beam_search": True})
    assert refused.value.param == "use_beam_search"
    with pytest.raises(BadRequestError) as long:
        client.completions.create(model=NAME, prompt=[1] * 9000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(AuthenticationError) as nobody:
        client.with_options(api_key="guess").models.list()
    assert nobody.value.code == "invalid_api_key"
    assert [model.id for model in client.models.list()] == [NAME]
