"""The client of the load benchmark: what it takes for lost, and its figures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from foredraft.bench.load import figures
from foredraft.bench.load.crowd import Crowd, Habits
from foredraft.bench.load.page import load_section
from foredraft.bench.load.process import Vitals
from foredraft.bench.load.run import pages_by_state, speculation, watched
from foredraft.bench.load.stream import Ask, Seen, stream
from foredraft.bench.serve.traces import Emission, Window

OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunk(*ids: int, text: str = "x", reason: str | None = None) -> bytes:
    choice = {"delta": {"content": text}, "token_ids": list(ids), "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


def usage(tokens: int) -> bytes:
    data = {"choices": [], "usage": {"completion_tokens": tokens}}
    return f"data: {json.dumps(data)}\n\n".encode()


WHOLE = [OK, chunk(1, 2), chunk(3, reason="length"), usage(3), DONE]
ASK = Ask("hello", 3, 0.0, 1)


def answered(parts: Sequence[bytes], asks: Sequence[Ask] = (ASK,)) -> tuple[list[Seen], list[bool]]:
    """What becomes of `asks` at a server that says `parts` and closes; which of its clients left
    before that."""
    left: list[bool] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        gone = False
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.002)
            gone |= reader.at_eof()
        left.append(gone)
        writer.close()

    async def run() -> list[Seen]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        async with server:
            found = [await stream(host, port, "m", each) for each in asks]
            while len(left) < len(asks):
                await asyncio.sleep(0.001)
        return found

    return asyncio.run(run()), left


def test_a_whole_answer_is_finished_and_a_client_that_leaves_has_left() -> None:
    leaving = [Ask("hello", 3, 0.0, 1, after) for after in (0, 1)]
    (whole, *early), gone = answered(WHOLE, [ASK, *leaving])
    assert (whole.finished, whole.left, whole.fault) == (True, False, None)
    assert (whole.tokens, whole.text, whole.finish_reason) == (3, "xx", "length")
    assert [(each.finished, each.left, each.fault) for each in early] == [(False, True, None)] * 2
    assert [each.tokens for each in early] == [0, 2]
    assert gone == [False, True, True]


LOST = {
    "refused": ([b"HTTP/1.1 429 Too Many\r\n\r\n", b'{"error": 1}'], "429"),
    "broken off": ([OK, chunk(1)], "broke off"),
    "no end": (WHOLE[:-1], "broke off"),
    "an error": ([OK, b'data: {"error": "pages"}\n\n', DONE], "pages"),
    "no usage": ([OK, chunk(1, 2, 3, reason="length"), DONE], "no usage"),
    "a token missing": ([OK, chunk(1, 2, reason="stop"), usage(3), DONE], "3 tokens were told, 2"),
    "too many": ([OK, chunk(1, 2, 3, 4, reason="length"), usage(4), DONE], "at most 3"),
    "cut short": ([OK, chunk(1, reason="length"), usage(1), DONE], "at most 3"),
    "no reason": ([OK, chunk(1), usage(1), DONE], "reason is None"),
    "after the end": ([OK, chunk(1, reason="stop"), chunk(2), usage(2), DONE], "after the finish"),
    "after it all": ([*WHOLE, chunk(1)], "after [DONE]"),
    "no JSON": ([OK, b"data: {\n\n"], "JSONDecodeError"),
    "another form": ([OK, b'data: {"choices": [{}]}\n\n'], "KeyError"),
}


@pytest.mark.parametrize("name", LOST)
def test_whatever_is_not_whole_is_lost(name: str) -> None:
    parts, words = LOST[name]
    ((seen,), _) = answered(parts)
    assert not seen.finished
    assert not seen.left
    assert words in str(seen.fault)


def test_nobody_there_is_lost_too() -> None:
    seen = asyncio.run(stream("127.0.0.1", 1, "m", ASK))
    assert "ConnectionRefusedError" in str(seen.fault)


def test_a_seed_gives_the_same_crowd() -> None:
    crowd = Crowd("h", 1, "m", ["a", "b", "c"], Habits(longest=20, abort_share=0.5))
    first, again = (
        [crowd.next_ask(chance) for _ in range(200)] for chance in (Random(1), Random(1))
    )
    assert first == again
    leaves = [each for each in first if each.leave_after is not None]
    assert 60 < len(leaves) < 140
    assert all((each.leave_after or 0) < each.max_tokens <= 20 for each in leaves)
    assert {each.prompt for each in first} == {"a", "b", "c"}


def seen(*emissions: tuple[float, int], sent: float = 0.0, **more: Any) -> Seen:
    return Seen(ASK, sent, [Emission(*each) for each in emissions], **more)


def test_what_is_in_no_count_is_lost() -> None:
    all_seen = [seen(finished=True), seen(left=True), seen(fault="oops")]
    found = figures.requests(all_seen, sent=4)
    assert found == {"sent": 4, "finished": 1, "aborted": 1, "lost": 2, "faults": ["oops"]}


def test_latencies_are_of_the_window_by_event_and_by_token() -> None:
    early = seen((0.5, 1), (1.5, 1), sent=0.1)
    late = seen((1.25, 1), (2.25, 4), (9.0, 1), sent=1.0)
    found = figures.latencies([early, late], Window(1.0, 5.0))
    assert found["tokens"] == 6
    assert found["tokens_per_second"] == 1.5
    assert found["tokens_per_event"] == 2.0
    assert found["ttft_ms"] == {"p50": None, "p99": None}  # sent at the edge, not in it
    assert found["between_events_ms"]["p50"] == 1000.0
    assert found["between_tokens_ms"]["p50"] == 250.0  # four of a quarter, one of a second


def vitals(at: float, rss: float) -> Vitals:
    return Vitals(at, rss, 10, 4, at * 1.5)


def test_memory_is_judged_from_when_all_pages_were_written() -> None:
    grows = [vitals(float(s), 100.0 + 10.0 * s) for s in range(20)]
    flat = [vitals(float(s), 300.0 + (50.0 if s == 60 else 0.0)) for s in range(20, 120)]
    window = Window(-1.0, 200.0)
    found = figures.resources([*grows, *flat], window, 20.0, client_seconds=20.1)
    assert (found["rss_growth_mib"], found["rss_slope_mib_per_minute"]) == (0.0, 0.0)
    assert found["rss_settled"] is True
    assert (found["server_cores"], found["client_cores"]) == (1.5, 0.1)
    leaking = [vitals(float(s), 300.0 + 0.1 * s) for s in range(20, 620)]
    found = figures.resources(leaking, Window(0.0, 700.0), 20.0, 0.0)
    assert found["rss_slope_mib_per_minute"] == pytest.approx(6.0)
    assert figures.resources(grows, window, None, 0.0)["rss_settled"] is False
    assert figures.slope(grows[:1]) == 0.0


def test_nobody_asks_a_server_that_is_gone() -> None:
    async def asking() -> float:
        await asyncio.sleep(3600.0)
        return 0.0

    async def watching() -> None:
        raise FileNotFoundError("/proc")

    with pytest.raises(FileNotFoundError):
        asyncio.run(watched(asking(), watching()))


def test_metrics_are_read_from_their_text() -> None:
    text = "\n".join(
        [
            'foredraft:kv_cache_pages{drafter="n",state="used",target="m"} 3.0',
            'foredraft:kv_cache_pages{drafter="n",state="free",target="m"} 7.0',
            'foredraft:spec_decode_num_drafts_total{request_type="greedy"} 4.0',
            'foredraft:spec_decode_num_drafts_total{request_type="0.8"} 6.0',
            'foredraft:spec_decode_num_accepted_tokens_total{request_type="0.8"} 5.0',
            'foredraft:spec_decode_num_draft_tokens_total{request_type="0.8"} 20.0',
        ]
    )
    assert pages_by_state(text) == {"used": 3.0, "free": 7.0}
    assert speculation(text) == {
        "drafted_steps_of_requests": 10,
        "mean_acceptance_length": 1.5,
        "acceptance_rate": 0.25,
        "preemptions": 0,
    }


def run_of(**more: Any) -> dict[str, Any]:
    two = {"p50": 1.4, "p99": None}
    return {
        "label": "plain",
        "requests": {"sent": 9, "finished": 7, "aborted": 2, "lost": 0},
        "asked_again": {"asked": 5, "identical": 5},
        "pages_in_use_at_end": 0,
        "exit_status": 0,
        "tokens_per_second": 99.6,
        "ttft_ms": two,
        "between_events_ms": two,
        "between_tokens_ms": two,
        "mean_acceptance_length": None,
        "rss_mib": {"first": 99.0, "last": 100.0},
        "rss_growth_mib": 1.0,
        "rss_settled": True,
        "rss_seconds": 540.0,
        "server_cores": 1.9,
        "client_cores": 0.02,
        **more,
    }


def test_a_run_with_any_trouble_is_not_sound_and_the_page_shows_each() -> None:
    again = {"asked": 5, "identical": 4}
    lost = {"sent": 9, "finished": 6, "aborted": 2, "lost": 1}
    troubles = ({"asked_again": again}, {"requests": lost}, {"exit_status": -9})
    assert figures.sound(run_of())
    assert not any(figures.sound(run_of(**each)) for each in troubles)
    assert not figures.sound(run_of(pages_in_use_at_end=1))
    result = {
        "model": "m", "streams": 64, "minutes": 10.0, "max_tokens": 128, "abort_share": 0.25,
        "machine": {"cpu": "c", "cores": 2}, "versions": {}, "revision": "r", "date": "2026-01-01T",
        "arguments": ["load.py"], "runs": [run_of(), run_of(rss_settled=False)],
    }  # fmt: skip
    shown = load_section(result)
    assert (
        "| plain | 7, 2, 0 | 5 of 5 | 100 | 1, - | 1, - | 1, - | - | 100, +1.0 in 9 min |" in shown
    )
    assert "pages not all written" in shown
