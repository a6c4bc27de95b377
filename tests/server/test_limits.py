"""Who may ask, how much, and how long; and what becomes of answers that nobody reads."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from openai import APIStatusError, InternalServerError, RateLimitError

from foredraft import AsyncEngine
from foredraft.core.errors import ConfigError
from foredraft.models.load import LoadedModel
from foredraft.server.auth import KeyRing
from foredraft.server.errors import APIError
from foredraft.server.settings import ServerSettings

from .rig import NAME, Running, serving, until

BODY: dict[str, Any] = {"model": NAME, "prompt": "abc", "max_tokens": 2, "temperature": 0}
LONG: dict[str, Any] = {**BODY, "max_tokens": 400, "ignore_eos": True}


class Gate:
    """A tap that can hold or break the engine's steps."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()

    def __call__(self, *_: Any) -> None:
        assert self.open.wait(60)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def gated(loaded: LoadedModel, gate: Gate) -> Iterator[AsyncEngine]:
    """One request runs, one waits."""
    engine = AsyncEngine(loaded, max_num_seqs=1, max_queued=1, tap=gate)
    yield engine
    gate.open.set()
    asyncio.run(engine.close())


def test_keys_are_asked_for_everywhere_but_where_health_is(gated: AsyncEngine) -> None:
    with serving(gated, api_keys=("secret", "other")) as server, server.http() as client:
        for path in ("/health", "/ready", "/version"):
            assert client.get(path).status_code == 200
        assert client.get("/ready").json()["speculation"] == {
            "enabled": False, "method": None, "num_speculative_tokens": 0,
            "reason": "plain decoding was configured",
        }  # fmt: skip
        for given in ({}, {"authorization": "Bearer no"}, {"authorization": "Basic secret"}):
            for path in ("/v1/models", "/metrics", "/docs", "/nowhere"):
                answer = client.get(path, headers=given)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        for key in ("secret", "other"):
            answer = client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert answer.json()["data"][0]["id"] == NAME


def test_all_keys_are_compared_whatever_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of one length, in constant time, all of them."""
    ring, compared = KeyRing(("first", "second", "third")), []
    compare = hmac.compare_digest

    def noted(known: bytes, given: bytes) -> bool:
        compared.append((len(known), len(given)))
        return compare(known, given)

    monkeypatch.setattr(hmac, "compare_digest", noted)
    for key in (b"first", b"third", b"", b"x" * 5000, b"firs", b"\xff"):
        with suppress(APIError):
            ring.check([(b"Authorization", b"Bearer " + key)])
        assert compared == [(32, 32)] * 3
        compared.clear()
    with pytest.raises(APIError):  # which of them counts would be a guess
        ring.check([(b"authorization", b"Bearer no"), (b"authorization", b"Bearer first")])


def test_bodies_are_bounded_in_size_kind_and_time(gated: AsyncEngine) -> None:
    limits = {"max_body_bytes": 2000, "body_seconds": 1.0}
    with serving(gated, **limits) as server, server.http() as client:
        big = client.post("/v1/completions", json=BODY | {"prompt": "a" * 3000})
        assert big.status_code == 413
        chunks = client.post(
            "/v1/completions",
            content=(b"a" * 500 for _ in range(8)),
            headers={"content-type": "application/json"},
        )
        assert chunks.status_code == 413
        plain = client.post(
            "/v1/completions", content=b"{}", headers={"content-type": "text/plain"}
        )
        assert plain.status_code == 415
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
                b"content-length: 100\r\n\r\n{"
            )
            assert b" 408 " in slow.recv(1000)
        assert client.post("/v1/completions", json=BODY).status_code == 200


def test_paths_and_methods_that_are_not_there(server: Running) -> None:
    with server.http() as client:
        for method, path, status in (
            ("GET", "/v1/nothing", 404),
            ("GET", "/../../etc/passwd", 404),
            ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404),
            ("GET", "/v1/completions", 405),
            ("DELETE", "/v1/models", 405),
        ):
            answer = client.request(method, path)
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 501
        assert client.get("/openapi.json").json()["info"]["title"] == "foredraft"
        assert "access-control-allow-origin" not in client.get("/health").headers


def test_a_head_is_a_get_without_its_body(server: Running) -> None:
    with server.http() as client:
        for path in ("/health", "/ready", "/version", "/v1/models", f"/v1/models/{NAME}", "/"):
            head, whole = client.head(path), client.get(path)
            assert head.content == b""
            assert head.status_code == whole.status_code == 200
            assert head.headers["content-length"] == str(len(whole.content))
            assert head.headers["content-type"] == whole.headers["content-type"]
        assert client.head("/metrics").status_code == 200
        assert client.head("/v1/nothing").status_code == 404
        assert client.head("/v1/completions").status_code == 405
        assert client.get("/health").json() == {"status": "ok"}  # on the same connection


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [99_999]}, "prompt"),
        ({"speculation": {"num_speculative_tokens": 99}}, "speculation.num_speculative_tokens"),
        ({"temperature": -1}, "temperature"),
    ],
    ids=str,
)
def test_limits_name_the_field_that_they_are_of(
    fields: dict[str, Any], param: str, server: Running
) -> None:
    with server.http() as client:
        answer = client.post("/v1/completions", json=BODY | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_answer_that_no_pool_could_hold_is_refused_by_its_limit(loaded: LoadedModel) -> None:
    engine = AsyncEngine(loaded, kv_cache_gib=64 * 2**10 / 2**30)
    with serving(engine) as small, small.http() as client:
        answer = client.post("/v1/completions", json=BODY | {"max_tokens": 500})
    asyncio.run(engine.close())
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "max_tokens")
    assert "lower max_tokens" in error["message"]


def test_web_pages_may_ask_only_where_they_are_named(gated: AsyncEngine) -> None:
    with serving(gated, cors_origins=("https://a.example",)) as server, server.http() as client:
        for origin, allowed in (
            ("https://a.example", True), ("https://b.example", False), ("null", False),
            ("https://a.example.org", False), ("http://a.example", False), ("*", False),
            ("https://a.example:8443", False),
        ):  # fmt: skip
            headers = {"origin": origin, "access-control-request-method": "POST"}
            answer = client.options("/v1/completions", headers=headers)
            assert ("access-control-allow-origin" in answer.headers) == allowed
            answer = client.get("/v1/models", headers={"origin": origin})
            told = answer.headers.get("access-control-allow-origin")
            assert told == (origin if allowed else None)
            assert "access-control-allow-credentials" not in answer.headers


def test_a_full_queue_says_when_to_come_again(gated: AsyncEngine, gate: Gate) -> None:
    with serving(gated) as server:
        client = server.openai()
        gate.open.clear()
        streams = [
            client.completions.create(
                model=NAME, prompt="abc", max_tokens=3, temperature=0, stream=True
            )
            for _ in range(2)
        ]
        for stream in (True, False):
            with pytest.raises(RateLimitError) as full:
                client.completions.create(model=NAME, prompt="abc", stream=stream)
            assert 1 <= int(full.value.response.headers["retry-after"]) <= 60
            assert full.value.code == "queue_full"
        gate.open.set()
        assert all(list(stream)[-1].choices[0].finish_reason for stream in streams)
        server.wait_until_free()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(gated: AsyncEngine, gate: Gate, stream: bool) -> None:
    with serving(gated) as server:
        host, port = server.url.removeprefix("http://").split(":")
        request = httpx.Request(
            "POST", f"{server.url}/v1/completions", json=LONG | {"stream": stream}
        )
        gate.open.clear()
        with socket.create_connection((host, int(port))) as client:
            head = "".join(f"{k}: {v}\r\n" for k, v in request.headers.items())
            body = request.read()
            client.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + body)
            until(lambda: gated.engine.has_work)
        until(lambda: server.state.num_http == 0)
        gate.open.set()
        server.wait_until_free()
        generated = gated.metrics.registry.get_sample_value
        assert generated("foredraft:client_disconnects_total", _labels(gated)) == 1


def _labels(engine: AsyncEngine) -> dict[str, str]:
    target, drafter = engine.metrics.labels
    return {"target": target, "drafter": drafter}


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_may_take_only_so_long(gated: AsyncEngine, gate: Gate, stream: bool) -> None:
    with serving(gated, request_seconds=0.3) as server:
        gate.open.clear()
        client = server.openai()
        with pytest.raises(Exception, match=r"longer than the 0\.3 seconds"):
            list(client.completions.create(**{**BODY, "stream": stream}))
        gate.open.set()
        server.wait_until_free()


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_fails_fails_alone(gated: AsyncEngine, stream: bool) -> None:
    with serving(gated) as server:
        client = server.openai()
        wanted = client.completions.create(**BODY).choices[0].text
        scheduler: Any = gated.engine.scheduler
        policy = scheduler.policy
        scheduler.policy = None
        with pytest.raises(Exception, match="the step failed") as failed:
            list(client.completions.create(**BODY, stream=stream))
        assert stream or isinstance(failed.value, InternalServerError)
        scheduler.policy = policy
        assert client.completions.create(**BODY).choices[0].text == wanted
        server.wait_until_free()


def test_draining_refuses_what_is_new_and_finishes_what_runs(
    gated: AsyncEngine, gate: Gate
) -> None:
    with serving(gated) as server, server.http() as other:
        client = server.openai()
        gate.open.clear()
        running = client.completions.create(**{**BODY, "stream": True})
        server.state.drain()
        with pytest.raises(APIStatusError) as refused:
            client.completions.create(**BODY)
        assert refused.value.status_code == 503
        assert other.get("/ready").status_code == 503
        gate.open.set()
        assert list(running)[-1].choices[0].finish_reason == "length"


def test_logs_hold_no_prompts_unless_asked(
    server: Running, gated: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server.openai().completions.create(model=NAME, prompt="confidential", max_tokens=1)
    assert "confidential" not in caplog.text
    until(lambda: "POST /v1/completions 200 in" in caplog.text)
    with serving(gated, log_prompts=True) as open_server:
        open_server.openai().completions.create(model=NAME, prompt="public words", max_tokens=1)
        assert caplog.text.count("prompts: ") == 1


def test_users_text_never_becomes_a_special_token(server: Running, loaded: LoadedModel) -> None:
    with server.http() as client:
        found = client.post("/tokenize", json={"prompt": "a</s>b", "return_token_strs": True})
        ids = found.json()["tokens"]
        assert ids == loaded.tokenizer.encode_prompt("a</s>b")
        assert not set(ids[1:]) & loaded.tokenizer.control_ids
        messages = [{"role": "user", "content": "</s><s>a do it"}]
        found = client.post("/tokenize", json={"messages": messages})
        assert found.json()["tokens"] == loaded.tokenizer.apply_chat_template(messages)
        text = client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        assert (
            client.post("/tokenize", json={"prompt": "a", "messages": messages}).status_code == 400
        )
        assert "a" in text


def test_metrics_tell_of_both_the_engine_and_the_server(server: Running) -> None:
    list(server.openai().completions.create(model=NAME, prompt="ab ab ab", stream=True))
    with server.http() as client:
        text = client.get("/metrics").text
    for name in (
        "foredraft:spec_decode_num_drafts_total",
        "foredraft:inter_token_latency_seconds_count",
        "foredraft:sent_inter_token_latency_seconds_count",
        'path="/v1/completions",status="200"',
    ):
        assert name in text


@pytest.mark.parametrize(
    "wrong",
    [{"model_names": ()}, {"api_keys": ("a b",)}, {"cors_origins": ("a",)}, {"body_seconds": 0},
     {"max_prompts": 0}],
)  # fmt: skip
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerSettings(**{"model_names": ("a",), **wrong})


def test_more_completions_than_are_ever_taken_are_a_mistake(gated: AsyncEngine) -> None:
    with serving(gated) as server, server.http() as client:
        answer = client.post("/v1/completions", json=BODY | {"prompt": ["a", "b", "c"]})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "n"


def test_health_is_told_however_many_ask(gated: AsyncEngine) -> None:
    with serving(gated, max_http_requests=1) as server, server.http() as client:
        server.state.num_http = 1
        assert client.get("/v1/models").status_code == 429
        assert client.get("/health").status_code == 200


def test_a_prediction_is_drafted_and_changes_nothing(loaded: LoadedModel) -> None:
    engine = AsyncEngine(loaded, speculative_config={"method": "prediction"})
    with serving(engine) as server:
        fields = {**LONG, "max_tokens": 40}
        with server.http() as client:
            plain = client.post("/v1/completions", json=fields).json()
            expected = {"type": "content", "content": plain["choices"][0]["text"]}
            found = client.post("/v1/completions", json=fields | {"prediction": expected}).json()
    asyncio.run(engine.close())
    assert found["choices"][0]["text"] == plain["choices"][0]["text"]
    details = found["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > details["rejected_prediction_tokens"]
    assert plain["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0


def test_a_prediction_that_no_drafter_reads_is_refused(server: Running) -> None:
    with server.http() as client:
        expected = {"type": "content", "content": "abc"}
        answer = client.post("/v1/completions", json=BODY | {"prediction": expected})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prediction"
