"""From samples to points, comparisons and verdicts; the simulator beside a result; a server's
chunks.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from foredraft.bench.pace import Pace, Reference
from foredraft.bench.serve.arrivals import Job, Prompt
from foredraft.bench.serve.engines import EngineServer, Variant, variants
from foredraft.bench.serve.plot import draw
from foredraft.bench.serve.remote import RemoteServer, TokenCounter
from foredraft.bench.serve.results import comparisons, points
from foredraft.bench.serve.simulated import check_simulator, prompt_row_seconds, served_curve
from foredraft.bench.serve.steps import Counters, StepCounts
from foredraft.bench.serve.sweep import Level, Measured, Sample
from foredraft.bench.serve.traces import Figures
from foredraft.bench.serve.traffic import Chunk
from foredraft.bench.serve.turns import Turns
from foredraft.bench.serve.verdicts import verdicts
from foredraft.core.errors import UserError
from foredraft.engine import build
from foredraft.engine.tally import PlainCosts
from foredraft.planning.allocation import Objective
from foredraft.planning.cost import CostCurve
from foredraft.planning.policy import Judged, Load, StepRecord
from foredraft.testing.models import tiny_model

POLICY = "adaptive, throughput"


def sample(
    rate: float, *, outputs: dict[int, tuple[int, ...]] | None = None, latency: float = 0.01
) -> Sample:
    """One second."""
    judged = [Judged("r", "", 2, 2, 1, False)]
    counts = StepCounts.of([StepRecord(Load(1, 1), judged, 2, 0.0, 0.5)])
    seen = Figures(1.0, round(rate), 3, (0.25,), (0.01, 0.03), (latency,), round(rate / 2))
    counters = Counters({"drafter": 0.1, "target": 0.8, "rest": 0.04}, 2)
    return Sample(seen, counts, counters, outputs or {}, 0)


def measured(rates: dict[str, dict[int, list[float]]]) -> Measured:
    found = Measured()
    for label, levels in rates.items():
        for concurrency, rounds in levels.items():
            for rate in rounds:
                found.add(label, Level(concurrency=concurrency), sample(rate))
    return found


def test_a_point_has_the_documented_form() -> None:
    (point,) = points(measured({"plain": {4: [100.0, 130.0, 110.0]}}))
    assert point["label"] == "plain"
    assert point["concurrency"] == 4
    assert point["tokens_per_second"] == 110.0
    assert point["tokens_per_second_by_round"] == [100.0, 130.0, 110.0]
    assert point["ttft_ms"] == {"p50": 250.0, "p99": 250.0}
    assert point["itl_ms"]["p50"] == pytest.approx(20.0)
    assert point["mean_acceptance_length"] == 2.0
    assert point["width"] == 2.0
    assert point["width_0_share"] == 0.0
    assert point["step_overhead"] == pytest.approx(0.05)
    assert point["preemptions"] == 6
    assert point["outside_steps_share"] == pytest.approx(0.5)
    assert point["identical_to_plain"] is True


def test_answers_are_compared_as_far_as_both_have_come() -> None:
    level = Level(rate=2.0)
    found = Measured()
    found.add("plain", level, sample(1.0, outputs={0: (1, 2, 3), 1: (4,)}))
    found.add("K=2", level, sample(1.0, outputs={0: (1, 2), 1: (4, 5), 2: (6,)}))
    found.add("K=3", level, sample(1.0, outputs={0: (1, 3)}))
    assert [each["identical_to_plain"] for each in points(found)] == [True, True, False]
    assert all(each["rate"] == 2.0 for each in points(found))


def test_ratios_are_taken_round_by_round() -> None:
    """A slow minute halves everything in it, and no ratio."""
    found = measured(
        {"plain": {1: [100.0, 50.0, 90.0]}, "K=2": {1: [150.0, 75.0, 135.0]},
         "K=4": {1: [140.0, 70.0, 126.0]}, POLICY: {1: [147.0, 73.5, 132.3]}}
    )  # fmt: skip
    compared = comparisons(found, ["K=2", "K=4"])
    assert [each["label"] for each in compared] == ["K=2", "K=4", POLICY]
    ratios = compared[2]["tokens_per_second"]
    assert ratios["over_plain"]["p50"] == pytest.approx(1.47, abs=0.01)
    assert ratios["best_fixed"] == ratios["better"] == "K=2"
    assert ratios["over_best_fixed"]["p50"] == pytest.approx(0.98, abs=0.01)
    assert compared[2]["tokens_per_second_per_request"]["over_plain"]["p50"] == 1.0


def test_how_slow_the_machine_was_depends_on_the_rows() -> None:
    """Twice as slow at few rows and as fast at many."""
    slow, fast = Pace((2.0, 2.0, 2.0, 4.0)), Pace((1.0, 1.0, 2.0, 4.0))
    found, level = Measured(), Level(concurrency=1)
    rounds = {"plain": [(60.0, slow, 1), (120.0, fast, 1)], "K=2": [(90.0, fast, 1)] * 2}
    for label, samples in rounds.items():
        for rate, pace, rows in samples:
            found.add(label, level, replace(sample(rate), pace=pace, step_rows=[rows] * 7))
    plain, other = points(found)
    assert plain["slowness_by_round"] == pytest.approx([2.0, 1.0])
    assert other["slowness_by_round"] == pytest.approx([1.0, 1.0])
    crowd = replace(sample(50.0), pace=slow, step_rows=[32])
    assert found.slowness(crowd) == 1.0


def judge(policy: dict[int, float], **more: Any) -> dict[tuple[str, int], bool | None]:
    """By (what, concurrency): whether it holds, where plain does 100 and K=2 150 alone, 90 not."""
    plain = {n: [100.0] for n in policy}
    fixed = {n: [150.0 if n == 1 else 90.0] for n in policy}
    found = measured({"plain": plain, "K=2": fixed, POLICY: {n: [v] for n, v in policy.items()}})
    lines = verdicts(
        points(found), comparisons(found, ["K=2"]), {POLICY: "tokens_per_second"}, **more
    )
    return {(each["what"], each["concurrency"]): each["holds"] for each in lines}


def test_beyond_the_reference_passes_the_pace_is_that_of_the_largest() -> None:
    """8 rows read a fifth too fast would make 192 rows 9% too slow, by a line through both."""
    usual, now = Pace((1.0, 1.2, 1.8, 4.0)), Pace((1.0, 1.2, 1.4, 4.0))
    assert now.slowness(usual, [192]) == now.slowness(usual, [32]) == 1.0
    assert Pace((1.2, 1.44, 2.16, 4.8)).slowness(usual, [192]) == pytest.approx(1.2)


def test_promises_are_judged_where_they_are_made() -> None:
    kept = judge({1: 146.0, 4: 95.0, 32: 98.0})
    assert kept[("of the best fixed width", 1)] is True
    assert kept[("of the better of plain and fixed", 4)] is True
    assert kept[("of plain", 32)] is True
    assert ("of plain", 4) not in kept
    broken = judge({1: 145.0, 4: 94.0, 32: 97.0})
    assert broken[("of the best fixed width", 1)] is False
    assert broken[("of the better of plain and fixed", 1)] is True
    assert broken[("of the better of plain and fixed", 4)] is False
    assert broken[("of plain", 32)] is False


def test_plain_decoding_is_judged_too() -> None:
    kept = judge({1: 100.0, 8: 100.0, 32: 100.0})
    assert kept[("step overhead", 1)] is True  # 5% to the digit
    assert kept[("step overhead", 32)] is True
    assert kept[("tokens a second", 8)] is False
    assert kept[("tokens a second", 32)] is False


def test_where_drafts_cannot_pay_the_policy_must_see_it() -> None:
    found = judge({1: 99.0, 8: 97.0}, hopeless=True)
    assert found[("of plain", 1)] is True
    assert found[("of plain", 8)] is False
    assert found[("steps of width 0", 8)] is False
    assert found[("steps of width 0", 1)] is None  # a fixed width pays there
    assert not any(what == "step overhead" for what, _ in found)


@pytest.mark.parametrize("threshold", [0.0, 0.4])
def test_a_policy_is_seen_behind_a_threshold_too(
    threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "cost_curve", lambda *_, **__: CURVE)
    config = {"method": "ngram", "policy": "adaptive", "draft_confidence_threshold": threshold}
    model = tiny_model()
    server = EngineServer(model, Variant("adaptive", config), 0.0, {}, Reference(model), Turns())
    policy = server.policy
    asyncio.run(server.close())
    assert server.learns
    assert policy is not None
    assert policy.costs.curve == CURVE
    # What plain steps take, in metrics, is by the policy's costs as well.
    behind = server.engine.engine.scheduler.policy
    assert PlainCosts().of(Load(1, 1), behind) == CURVE.of_step(1, 1, 0)


def test_variants_are_plain_then_widths_then_policies() -> None:
    base = {"method": "ngram", "prompt_lookup_max": 3}
    chosen = variants(base, [4, 0, 2], list(Objective))
    assert [each.label for each in chosen] == [
        "plain", "K=2", "K=4", "adaptive, throughput", "adaptive, latency"
    ]  # fmt: skip
    assert chosen[0].config is None
    assert chosen[1].config == {**base, "num_speculative_tokens": 2}
    assert chosen[3].config == {
        **base, "policy": "adaptive", "objective": "throughput", "num_speculative_tokens": 4,
        "recalibrate": True,
    }  # fmt: skip
    assert "recalibrate" not in (chosen[4].config or {})
    (_, policy) = variants({**base, "num_speculative_tokens": 7}, [0], [Objective.LATENCY])
    assert (policy.config or {})["num_speculative_tokens"] == 7


CURVE = CostCurve((1, 2, 4, 8, 64), (10e-3, 11e-3, 13e-3, 20e-3, 160e-3), 1e-4, 1e-6)


def test_the_curve_of_serving_is_that_of_passes_moved() -> None:
    """Twice as slow, a millisecond more a step and half of one a request."""
    steps = [
        {"rows": rows, "requests": requests, "positions": 100 * requests, "steps": 10,
         "seconds": 2 * CURVE.of_step(rows, requests, 100 * requests)
         + 1e-3 + 5e-4 * (requests - 1)}
        for rows, requests in ((1, 1), (2, 1), (4, 1), (4, 4), (8, 4), (8, 8), (16, 8))
    ]  # fmt: skip
    found = served_curve(CURVE.as_json(), steps)
    for step in steps:
        ours = found.of_step(step["rows"], step["requests"], step["positions"])
        assert ours == pytest.approx(step["seconds"])
    one = served_curve(CURVE.as_json(), steps[:1])
    assert one.of_step(1, 1, 100) == pytest.approx(steps[0]["seconds"])


def test_what_prompts_cost_is_what_steps_took_beside_the_rest() -> None:
    steps = [
        {"rows": 2, "requests": 2, "prompt_rows": 300, "steps": 3,
         "seconds": 3 * CURVE.of_step(2, 2, 0) + 300 * 5e-4},
    ]  # fmt: skip
    assert prompt_row_seconds(CURVE, steps) == pytest.approx(5e-4)
    assert prompt_row_seconds(CURVE, []) is None


def result_of(rates: dict[tuple[int, int], float]) -> dict[str, Any]:
    """As `bench serve` writes it: drafts of K tokens are found always, each accepted at 0.5."""
    return {
        "max_tokens": 100,
        "fixed": {"plain": 0, "K=1": 1},
        "costs": {"calibrated": CURVE.as_json()},
        "step_costs": {
            "decoding": [
                {"rows": n, "requests": n, "positions": 0, "seconds": CURVE.of_step(n, n, 0),
                 "steps": 9}
                for n in (1, 2, 4, 8)
            ],
            "reading": [],
        },
        "lengths": [[1, 100], None],
        "prompt_lengths": [1, 1],
        "rounds": 2,
        "window": {"requests": None, "seconds": 8.0},
        "points": [
            {"label": "plain" if not width else f"K={width}", "concurrency": load,
             "tokens_per_second_by_round": [rate, rate], "slowness_by_round": [1.0, 1.0],
             "drafter_seconds_per_step": 0.0,
             "acceptance_by_position": [0.5] * width, "filled_by_position": [1.0] * width}
            for (load, width), rate in rates.items()
        ],
    }  # fmt: skip


def test_the_simulator_agrees_with_closed_forms_and_says_where_it_does_not() -> None:
    def rate(load: int, width: int) -> float:
        step = CURVE.of_step(load * (1 + width), load, load * 51)
        return load * (1.5 if width else 1.0) / step

    true = {(load, width): rate(load, width) for load in (1, 8) for width in (0, 1)}
    found = check_simulator(result_of(true))
    assert [abs(line["error"]) < 0.04 for line in found["points"]] == [True] * 4
    assert [each["measured"] for each in found["best"]] == [1, 0]
    assert found["passed"] is True
    wrong = check_simulator(result_of({**true, (8, 0): true[8, 0] / 2}))
    assert [line["near"] for line in wrong["points"]] == [True, True, False, True]
    assert (wrong["near_share"], wrong["agree_share"]) == (0.75, 0.5)
    assert wrong["passed"] is False


def test_rows_that_start_up_did_not_measure_cost_what_steps_took() -> None:
    """Beyond the last point steps are cheaper than its line; within, a step between two points."""
    short = CostCurve((1, 2, 4), (10e-3, 11e-3, 13e-3), 1e-4)
    steps = [
        {"rows": rows, "requests": 1, "positions": 0, "steps": 900, "seconds": seconds}
        for rows, seconds in ((1, 10e-3), (2, 11e-3), (4, 13e-3), (8, 15e-3), (16, 20e-3))
    ]
    few = {"rows": 64, "requests": 1, "positions": 0, "steps": 2, "seconds": 5e-3}
    found = served_curve(short.as_json(), [*steps, few])
    assert found.rows == (1, 2, 4, 8, 16)
    for step in steps:
        assert found.of_step(step["rows"], 1, 0) == pytest.approx(step["seconds"])


def test_each_round_is_played_with_the_acceptance_of_its_own() -> None:
    """One round's drafts are always right, the other's never."""

    def rate(accepted: float) -> float:
        return (1.0 + accepted) / CURVE.of_step(2, 1, 51)

    result = result_of({(1, 1): 1.0})
    (point,) = result["points"]
    point["tokens_per_second_by_round"] = [rate(1.0), 2.0 * rate(0.0)]
    point["slowness_by_round"] = [1.0, 0.5]
    point |= {"acceptance_by_round": [[1.0], [0.0]], "filled_by_round": [[1.0], [1.0]]}
    (line,) = check_simulator(result)["points"]
    assert line["simulated_by_round"] == pytest.approx(line["measured_by_round"], rel=0.04)
    assert line["near"]


def test_widths_that_no_measurement_tells_apart_are_a_tie() -> None:
    rates = {(8, 0): 1.0, (8, 1): 1.0}

    def judged(plain: list[float], one: list[float]) -> dict[str, Any]:
        result = result_of(rates)
        for point, each in zip(result["points"], (plain, one), strict=True):
            point["tokens_per_second_by_round"] = each
            if point["label"] == "plain":  # the simulator picks it: drafts are never right
                continue
            point["acceptance_by_position"] = [0.0]
        found = check_simulator(result)
        (best,) = found["best"]
        assert (best["measured"], best["simulated"]) == (1, 0)
        assert found["same_share"] == best["same"]
        assert found["agree_share"] == best["agree"]
        assert found["agree_share_at_random"] == len(best["tied"]) / 2
        return best

    clear = judged([95.0, 94.0], [100.0, 100.0])
    assert (clear["same"], clear["agree"], clear["tied"]) == (False, False, [1])
    assert clear["loss_by_round"] == pytest.approx([0.05, 0.06])
    tie = judged([95.0, 102.0], [104.0, 100.0])
    assert (tie["same"], tie["agree"], tie["tied"]) == (False, True, [0, 1])
    equal = judged([99.5, 99.5], [100.0, 100.0])
    assert (equal["same"], equal["agree"]) == (True, True)


@pytest.mark.parametrize("key", ["points", "costs", "step_costs", "lengths"])
def test_a_result_without_what_is_needed_is_refused(key: str) -> None:
    result = result_of({(1, 0): 1.0})
    del result[key]
    with pytest.raises(UserError, match=f"lacks '{key}'"):
        check_simulator(result)


def test_a_measurement_that_was_too_short_is_told_so() -> None:
    with pytest.raises(UserError, match="give more --seconds"):
        check_simulator({**result_of({(1, 0): 1.0}), "lengths": [None, None]})


@pytest.mark.parametrize(("form", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_crossover_is_drawn(form: str, magic: bytes) -> None:
    crowd = {1: [100.0, 90.0], 8: [300.0, 310.0]}
    found = measured({"plain": crowd, "K=2": crowd, POLICY: crowd})
    result = {
        "points": points(found), "comparisons": comparisons(found, ["K=2"]),
        "objectives": {POLICY: "tokens_per_second"}, "fixed": {"plain": 0, "K=2": 2},
    }  # fmt: skip
    assert draw(result, form).startswith(magic)
    outside = Measured()
    outside.add("server", Level(concurrency=2), sample(5.0))
    outside.add("server", Level(rate=2.0), sample(5.0))
    assert draw({"points": points(outside)}, form).startswith(magic)


def test_tokens_are_counted_by_whatever_chunks_say() -> None:
    def counts(*chunks: dict[str, Any]) -> list[int]:
        counter = TokenCounter()
        return [counter.chunk(0.0, chunk).tokens for chunk in chunks]

    ids = [{"choices": [{"token_ids": [1, 2], "delta": {"content": "x"}}]}, {"choices": []}]
    assert counts(*ids) == [2, 0]
    usage = [{"choices": [{"delta": {"content": "x"}}], "usage": {"completion_tokens": n}}
             for n in (3, 3, 7)]  # fmt: skip
    assert counts(*usage) == [3, 0, 4]
    bare = [{"choices": [{"delta": {"role": "assistant"}}]}, {"choices": [{"text": "x"}]}]
    assert counts(*bare) == [0, 1]
    told = {"choices": [], "metrics": {"speculative_decoding": {"mean_acceptance_length": 2.5}}}
    assert TokenCounter().chunk(0.0, told).mean_acceptance_length == 2.5
    told["metrics"] = {"speculative_decoding": {"mean_acceptance_length": "many"}}
    with pytest.raises(ValueError, match="many"):  # in the thread that reads, so one line
        TokenCounter().chunk(0.0, told)
    with pytest.raises(UserError, match="broke off: out of pages"):
        TokenCounter().chunk(0.0, {"error": "out of pages"})


class Server(ThreadingHTTPServer):
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[Any] = []


class Handler(BaseHTTPRequestHandler):
    """Says three tokens, refuses the model `none`, breaks off for `broken`."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert isinstance(self.server, Server)
        self.server.seen.append((self.path, body))
        if body["model"] == "none":
            self.send_error(404, "no such model")
            return
        self.send_response(200)
        self.end_headers()
        for token in range(3):
            chunk = {"choices": [{"delta": {"content": "x"}, "token_ids": [token]}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        last = "data: {oops\n\n" if body["model"] == "broken" else "data: [DONE]\n\n"
        self.wfile.write(last.encode())

    def log_message(self, *_: Any) -> None:
        """Silence."""


@pytest.fixture
def listening() -> Iterator[tuple[str, list[Any]]]:
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", server.seen
    server.shutdown()
    server.server_close()


def answer(url: str, model: str) -> list[Chunk]:
    async def read() -> list[Chunk]:
        job = Job(0, Prompt("p", "chat", "hello"), 3, seed=5)
        async with aclosing(RemoteServer(url, model).stream(job)) as chunks:
            return [chunk async for chunk in chunks]

    return asyncio.run(read())


def test_a_server_is_measured_from_outside(listening: tuple[str, list[Any]]) -> None:
    url, seen = listening
    chunks = answer(f"{url}/v1/", "model")
    assert [list(chunk.token_ids) for chunk in chunks] == [[0], [1], [2]]
    path, body = seen[0]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert (body["max_tokens"], body["seed"], body["stream"]) == (3, 5, True)


def test_a_server_that_fails_is_one_clear_line(listening: tuple[str, list[Any]]) -> None:
    url, _ = listening
    with pytest.raises(UserError, match=r"/v1/chat/completions answered 404: "):
        answer(url, "none")
    with pytest.raises(UserError, match=r"http://127.*JSONDecodeError"):
        answer(url, "broken")
    with pytest.raises(UserError, match="ConnectionRefusedError"):
        answer("http://127.0.0.1:1", "model")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:port"])
def test_an_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="--url must be like"):
        RemoteServer(url, "model")
