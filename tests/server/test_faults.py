"""Faults inside the server end the request they belong to, and nothing else; what ends inside a
window of drafts is told as plain decoding would.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch

from foredraft import LLM, AsyncEngine, SamplingParams
from foredraft.drafters.interface import Drafter
from foredraft.models.interface import FlatBatch, Model, ModelOutput
from foredraft.models.load import LoadedModel
from foredraft.testing.drafters import LiarDrafter, OracleDrafter, RaisingDrafter

from .rig import NAME, Running, serving

PROMPT, POISON = "abc abc", "z"
BODY: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
MARK = "confidential"


class Poisoned:
    """Rows behind the poison's token are NaN, or the whole pass fails with `error`."""

    def __init__(self, model: Model, token: int, error: Exception | None) -> None:
        self.config, self.kernels = model.config, model.kernels
        self._run, self._token, self._error = model.run, token, error

    def run(self, batch: FlatBatch, cache: Any) -> ModelOutput:
        output = self._run(batch, cache)
        rows = range(len(batch.token_ids)) if batch.logit_rows is None else batch.logit_rows
        bad = [at for at, row in enumerate(rows) if batch.token_ids[row] == self._token]
        if bad and self._error is not None:
            raise self._error
        logits = output.logits.clone()
        logits[bad] = torch.nan
        return replace(output, logits=logits)


@contextmanager
def _served(loaded: LoadedModel, **settings: Any) -> Iterator[Running]:
    engine = AsyncEngine(loaded, page_size=4, **settings)
    with serving(engine) as running:
        yield running
        running.wait_until_free()
    asyncio.run(engine.close())


def _poisoned(loaded: LoadedModel, error: Exception | None = None) -> LoadedModel:
    token = loaded.tokenizer.encode(POISON)[-1]
    model: Any = Poisoned(loaded.model, token, error)
    return replace(loaded, model=model)


def _post(server: Running, **fields: Any) -> httpx.Response:
    with server.http() as client:
        return client.post("/v1/completions", json=BODY | fields)


def test_logits_that_are_no_numbers_end_their_own_answer(loaded: LoadedModel) -> None:
    """Streamed or not, beside answers that share every pass with it."""
    ban = {"banned_token_ids": loaded.tokenizer.encode(POISON)}
    with _served(loaded) as healthy:
        wanted = _post(healthy, **ban).json()["choices"][0]["text"]
    with _served(_poisoned(loaded)) as server, ThreadPoolExecutor(8) as pool:
        asked = [{"prompt": f"ab {POISON}", "stream": at >= 5} if at % 3 == 2 else ban
                 for at in range(9)]  # fmt: skip
        answers = list(pool.map(lambda fields: _post(server, **fields), asked))
    for at, answer in enumerate(answers):
        if at % 3 != 2:
            assert answer.json()["choices"][0]["text"] == wanted
        elif at < 5:
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "internal_error"
        else:
            assert '"code":"internal_error"' in answer.text
            assert answer.text.endswith("data: [DONE]\n\n")


def test_a_pass_without_memory_fails_and_the_next_does_not(loaded: LoadedModel) -> None:
    with _served(_poisoned(loaded, MemoryError())) as server:
        wanted = _post(server, banned_token_ids=loaded.tokenizer.encode(POISON)).json()
        failed = _post(server, prompt=POISON)
        assert failed.status_code == 500
        again = _post(server, banned_token_ids=loaded.tokenizer.encode(POISON)).json()
        assert again["choices"] == wanted["choices"]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("a"), ValueError("b"), KeyError(1)])
def test_a_fault_before_the_engine_is_the_requests_own(
    server: Running, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    encode = server.engine.tokenizer.encode_prompt

    def broken(text: str) -> list[int]:
        if MARK in text:
            raise error
        return encode(text)

    monkeypatch.setattr(server.engine.tokenizer, "encode_prompt", broken)
    for stream in (True, False):
        failed = _post(server, prompt=MARK, stream=stream)
        assert failed.status_code == 500
        assert failed.json()["error"]["message"] == "the server failed on this request"
        assert _post(server).status_code == 200
    server.wait_until_free()


def test_a_drafter_that_fails_costs_nobody_an_answer_and_is_told(loaded: LoadedModel) -> None:
    with _served(loaded) as plain:
        wanted = _post(plain).json()["choices"]
    config = {"num_speculative_tokens": 3}
    drafter = RaisingDrafter(2, OracleDrafter(lambda _: [3] * 30))
    with _served(loaded, drafter=drafter, speculative_config=config) as server:
        with server.http() as client:
            assert client.get("/ready").json()["speculation"]["enabled"] is True
            assert _post(server).json()["choices"] == wanted
            found = client.get("/ready").json()["speculation"]
            assert client.get(f"/v1/models/{NAME}").json()["speculation"] == found
        assert found["enabled"] is False
        assert "the drafter failed" in found["reason"]
        assert _post(server).json()["choices"] == wanted


def _library_fault(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a library whose message holds what it was given."""

    def broken(text: str) -> list[int]:
        raise UnicodeEncodeError("utf-8", text, 0, 1, f"no room for {text}")

    monkeypatch.setattr(server.engine.tokenizer, "encode_prompt", broken)


def test_logs_hold_nothing_of_what_was_asked(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it is answered, refused, or breaks something."""
    caplog.set_level(logging.DEBUG)
    fields: list[dict[str, Any]] = [
        {"prompt": MARK}, {"stop": [MARK]}, {"user": MARK}, {MARK: 1}, {"metadata": {MARK: MARK}},
        {"guided_regex": f"({MARK}"}, {"logit_bias": {MARK: 1}}, {"seed": MARK}, {"model": MARK},
        {"structured_outputs": {"json": {"type": MARK}}}, {"prompt": MARK * 200},
        {"structured_outputs": {"choice": [MARK]}, "max_tokens": 30},
    ]  # fmt: skip
    for each in fields:
        assert _post(server, **each).status_code in (200, 400, 404)
    with server.http() as client:
        headers = {"content-type": "application/json"}
        client.post("/v1/completions", content=f'{{"{MARK}": '.encode(), headers=headers)
        client.get("/v1/models", headers={"authorization": MARK})
    _library_fault(server, monkeypatch)
    assert _post(server, prompt=MARK).status_code == 500
    ours = [each for each in caplog.records if not each.name.startswith(("http", "openai"))]
    told = "\n".join(caplog.handler.format(each) for each in ours)
    assert "a request failed: in its answer: UnicodeEncodeError" in told
    assert "encode_prompt" in told  # where it was
    assert MARK not in told


def test_messages_are_no_templates_and_paths_no_files(server: Running, loaded: LoadedModel) -> None:
    hostile = "{{ 7 * 7 }}{% for a in range(9) %}x{% endfor %}{{ messages.__class__ }}"
    with server.http() as client:
        messages = [{"role": "user", "content": hostile}]
        plain = [{"role": "user", "content": "q"}]
        found = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
        around = client.post("/tokenize", json={"messages": plain}).json()["tokens"]
        inside = loaded.tokenizer.encode(hostile)
        at = around.index(loaded.tokenizer.encode("q")[-1])
        assert found == [*around[:at], *inside, *around[at + 1 :]]
        body = {"model": NAME, "messages": plain, "chat_template": "{{ 7 * 7 }}"}
        refused = client.post("/v1/chat/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template")
        for path in (
            "/..%2f..%2fetc/passwd", "/docs/../../etc/passwd", "/%00", "/v1/models/..%2f",
            "/v1/models/../../../etc/passwd", "/static/..%5c..%5c", "//etc/passwd",
        ):  # fmt: skip
            answer = client.get(path)
            assert answer.status_code == 404
            assert "root:" not in answer.text


Drafting = Callable[[OracleDrafter], Drafter]


@pytest.fixture(scope="module", params=[OracleDrafter, LiarDrafter], ids=["right", "wrong"])
def drafted(loaded: LoadedModel, request: pytest.FixtureRequest) -> Iterator[Running]:
    """A server whose drafts of `PROMPT` are all right or all wrong, four a step."""
    prompt = loaded.tokenizer.encode_prompt(PROMPT)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    known = LLM(loaded).generate([prompt], params)[0].token_ids
    oracle = OracleDrafter({tuple(prompt): list(known)})
    drafter = oracle if request.param is OracleDrafter else LiarDrafter(oracle)
    config = {"num_speculative_tokens": 4}
    with _served(loaded, drafter=drafter, speculative_config=config) as running:
        yield running


def _both(server: Running, **fields: Any) -> dict[str, Any]:
    """A choice, which must be plain decoding's, whole and streamed."""
    more = {"return_token_ids": True, "ignore_eos": True, **fields}
    plain = _post(server, speculation={"enabled": False}, **more).json()
    found = _post(server, **more).json()
    assert _rounded(found["choices"]) == _rounded(plain["choices"])
    assert found["usage"]["completion_tokens"] == len(found["choices"][0]["token_ids"])
    choice: dict[str, Any] = found["choices"][0]
    chunks = [
        each.choices[0]
        for each in server.openai().completions.create(
            model=NAME, prompt=PROMPT, stream=True,
            extra_body={k: v for k, v in {**BODY, **more}.items() if k not in ("model", "prompt")},
        )
    ]  # fmt: skip
    assert "".join(each.text for each in chunks) == choice["text"]
    streamed = [t for each in chunks for t in (each.model_extra or {}).get("token_ids", ())]
    assert streamed == choice["token_ids"]
    assert chunks[-1].finish_reason == choice["finish_reason"]
    return choice


def _rounded(value: Any) -> Any:
    """The reference kernels' last digits depend on how many rows a pass has."""
    if isinstance(value, float):
        return round(value, 9)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def test_a_stop_at_every_place_of_a_window_ends_the_answer_there(drafted: Running) -> None:
    """By id and by text, also where the length would end it on the same token."""
    ids = _both(drafted)["token_ids"]
    firsts = [at for at in range(1, 10) if ids[at] not in ids[:at]]
    assert firsts
    for at in firsts:
        for most in (at + 1, 16):
            choice = _both(drafted, stop_token_ids=[ids[at]], max_tokens=most)
            assert choice["token_ids"] == ids[: at + 1]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[at])
    drafted.wait_until_free()


@pytest.mark.parametrize(
    "fields",
    [
        {"banned_token_ids": [5, 6]},
        {"logit_bias": {"7": -100, "3": 4}},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5},
        {"min_tokens": 6, "stop_token_ids": list(range(3, 20))},
        {"logprobs": 5},
        {"logprobs": 0, "echo": False, "temperature": 0.8, "seed": 4},
        {"structured_outputs": {"choice": ["abcabcabc", "abcabd"]}},
        {"structured_outputs": {"regex": "(ab|ba){3,6}c"}},
        {"max_tokens": 3},
    ],
    ids=str,
)
def test_what_a_request_asks_holds_in_every_row_of_a_window(
    drafted: Running, fields: dict[str, Any]
) -> None:
    choice = _both(drafted, **fields)
    if "logprobs" in fields:
        told = choice["logprobs"]["token_logprobs"]
        assert len(told) == len(choice["token_ids"])
        assert all(each < 0 for each in told)
    drafted.wait_until_free()


def test_processors_of_ones_own_are_refused_by_name(server: Running) -> None:
    for field in ("logits_processors", "logits_processor", "custom_logit_processor"):
        refused = _post(server, **{field: ["a.b"]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
