"""Metrics agree with what the requests themselves counted, whatever befell them (law 9)."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from foredraft import AsyncEngine, ConfigError, RequestOptions
from foredraft.core.counts import AcceptanceCounts
from foredraft.drafters.ngram import NgramDrafter
from foredraft.engine import build
from foredraft.planning.cost import CostCurve
from foredraft.planning.cost_tracking import CostTracker
from foredraft.planning.policy import MAX_TYPES, OTHER_TYPES
from foredraft.testing.drafters import LiarDrafter, RaisingDrafter, RepeatDrafter, TreeDrafter
from foredraft.testing.models import write_tiny_checkpoint

from .async_rig import Gate, freed, run
from .conftest import GREEDY, PROMPTS, SEEDED

PREFIX = "foredraft:"
FOUR = (
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
)


class Witness:
    """Keeps every request that has ended, and every commit."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.emitted: Counter[str] = Counter()
        self.steps = 0

    def committed(self, commits):
        self.emitted.update({c.request.id: c.num_emitted for c in commits})

    def stepped(self, record):
        self.steps += 1

    def ended(self, requests):
        self.requests += requests


def engine_on(target, drafter=None, width=4, **settings):
    config = settings.pop("config", {})
    if drafter is not None:
        config = {"num_speculative_tokens": width, **config}
        settings |= {"drafter": drafter, "speculative_config": config}
    engine = AsyncEngine(target, **({"seed": 5, "page_size": 4} | settings))
    witness = Witness()
    engine.engine.observers.append(witness)
    return engine, witness


def values(engine, name, **labels):
    """Samples of one name, by their labels apart from target and drafter."""
    found = {}
    for family in engine.metrics.registry.collect():
        for sample in family.samples:
            if sample.name != PREFIX + name:
                continue
            assert sample.labels["target"] == engine.loaded.name
            assert sample.labels["drafter"] == (engine.method or "none")
            rest = {k: v for k, v in sample.labels.items() if k not in ("target", "drafter")}
            if all(rest.get(key) == value for key, value in labels.items()):
                found[tuple(v for k, v in rest.items() if k not in labels)] = sample.value
    return found


def total(engine, name, **labels):
    return sum(values(engine, name, **labels).values())


def counts_of(requests):
    merged = AcceptanceCounts()
    for request in requests:
        merged.merge(request.counts)
    return merged


def assert_counted(engine, requests):
    """The metrics of all types together are the sum of these requests' own counts."""
    for kind in {request.request_type for request in requests}:
        own = [request for request in requests if request.request_type == kind]
        counts = counts_of(own)
        expected = {
            "spec_decode_num_drafts_total": counts.num_drafts,
            "spec_decode_num_draft_tokens_total": counts.num_draft_tokens,
            "spec_decode_num_accepted_tokens_total": counts.num_accepted_tokens,
            "generation_tokens_total": sum(request.num_output for request in own),
            "request_steps_total": counts.num_steps,
            "prompt_tokens_total": sum(r.num_prompt for r in own if r.num_output),
            "requests_total": len(own),
            "e2e_request_latency_seconds_count": len(own),
            "tokens_per_burst_sum": counts.num_emitted_tokens,
            "tokens_per_burst_count": counts.num_steps,
            "time_to_first_token_seconds_count": sum(1 for r in own if r.num_output),
            "inter_token_latency_seconds_count": sum(max(0, r.num_output - 1) for r in own),
        }
        for name, number in expected.items():
            assert total(engine, name, request_type=kind) == number, name
        by_position = values(
            engine, "spec_decode_num_accepted_tokens_per_pos_total", request_type=kind
        )
        assert list(by_position.values()) == counts.accepted_per_position
        rates = values(engine, "spec_decode_conditional_acceptance_rate", request_type=kind)
        assert list(rates.values()) == counts.conditional_acceptance_by_position
        length = "spec_decode_mean_acceptance_length"
        assert total(engine, length, request_type=kind) == counts.mean_acceptance_length
        blocks = [request.output(4).metrics.speculative_decoding for request in own]
        assert sum(b.num_draft_tokens for b in blocks) == counts.num_draft_tokens
        assert sum(b.num_accepted_draft_tokens for b in blocks) == counts.num_accepted_tokens


IMPOSSIBLE = replace(GREEDY, allowed_token_ids=[7], stop_token_ids=[7], min_tokens=3, max_tokens=8)


async def lives(engine, stop):
    """Requests that end in every way there is, at once, where pages are short."""

    async def leave(prompt, params, after):
        seen = 0
        async with aclosing(engine.stream(prompt, params)) as stream:
            async for delta in stream:
                seen += len(delta.token_ids)
                if seen >= after:
                    break

    stopped = replace(GREEDY, stop=[stop])
    each = [
        GREEDY,
        SEEDED,
        stopped,
        replace(SEEDED, n=2),
        IMPOSSIBLE,
        replace(GREEDY, max_tokens=1),
    ]
    await asyncio.gather(
        *(engine.generate(prompt, params) for prompt in PROMPTS for params in each),
        *(leave(prompt, replace(SEEDED, max_tokens=60), 5 * i) for i, prompt in enumerate(PROMPTS)),
    )


@pytest.mark.parametrize("kind", ["oracle", "liar", "tree", "crashing", "n-gram", "none"])
def test_counts_are_the_sum_of_the_requests_own(target, oracle, plain, kind):
    known = oracle(GREEDY)
    drafter = {
        "oracle": known,
        "liar": LiarDrafter(known),
        "tree": TreeDrafter(known, RepeatDrafter(3)),
        "crashing": RaisingDrafter(9, known),
        "n-gram": NgramDrafter(),
        "none": None,
    }[kind]
    text = target.tokenizer.decode(plain(GREEDY)[0])

    async def main():
        engine, witness = engine_on(target, drafter, 5, kv_cache_gib=48 / 2**20)
        async with engine:
            await lives(engine, text[5:8])
            await freed(engine)
        return engine, witness

    engine, witness = run(main)
    assert_counted(engine, witness.requests)
    assert {r.stop.finish_reason for r in witness.requests} >= {"length", "stop", "error", "abort"}
    assert sum(witness.emitted.values()) == total(engine, "generation_tokens_total")
    assert total(engine, "steps_total") == witness.steps
    assert sum(r.num_preemptions for r in witness.requests) > 0
    assert total(engine, "num_preemptions_total") >= sum(
        r.num_preemptions for r in witness.requests
    )
    accepted = total(engine, FOUR[2])
    assert (accepted > 20) == (kind in ("oracle", "tree")) or kind in ("crashing", "n-gram")
    assert total(engine, "drafter_enabled") == (kind not in ("crashing", "none"))
    pages = values(engine, "kv_cache_pages")
    assert pages["used",] == 0
    assert sum(pages.values()) == engine.config.num_pages


def test_what_the_gauges_say_in_the_middle(target):
    gate = Gate()

    async def main():
        engine, _ = engine_on(target, max_num_seqs=2, tap=gate)
        async with engine:
            gate.shut()
            tasks = [asyncio.ensure_future(engine.generate(p, GREEDY)) for p in PROMPTS]
            await gate.held()
            await gate.let(3)
            assert total(engine, "num_requests_running") == 2
            assert total(engine, "num_requests_waiting") == 3
            assert values(engine, "kv_cache_pages")["used",] > 0
            gate.open()
            await asyncio.gather(*tasks)
            await freed(engine)
            assert total(engine, "num_requests_running") == 0
            assert total(engine, "num_requests_waiting") == 0

    run(main)


def test_bursts_come_at_once_and_waits_are_told(target, oracle):
    """Tokens of one step are 0 seconds apart: a histogram over steps would flatter drafts."""

    async def main():
        engine, _ = engine_on(target, oracle(GREEDY), 4)
        async with engine:
            await engine.generate(PROMPTS[0], GREEDY)
        return engine

    engine = run(main)
    steps, tokens = total(engine, "tokens_per_burst_count"), GREEDY.max_tokens
    at_once = values(engine, "inter_token_latency_seconds_bucket", le="0.0")
    assert list(at_once.values()) == [tokens - steps]
    assert total(engine, "inter_token_latency_seconds_count") == tokens - 1
    assert total(engine, "tokens_per_burst_bucket", le="5.0") == steps
    assert total(engine, "tokens_per_burst_bucket", le="4.0") < steps
    assert 0 < total(engine, "time_to_first_token_seconds_sum") < 60
    queue = total(engine, "request_queue_time_seconds_sum")
    first = total(engine, "time_to_first_token_seconds_sum")
    whole = total(engine, "e2e_request_latency_seconds_sum")
    assert 0 <= queue <= first <= whole
    assert total(engine, "target_passes_per_token") == steps / tokens


def test_a_type_of_ones_own_labels_and_too_many_are_one(target):
    async def main():
        engine, witness = engine_on(target)
        async with engine:
            short = replace(GREEDY, max_tokens=1)
            for number in range(MAX_TYPES + 5):
                options = RequestOptions(request_type=f"kind {number}")
                await engine.generate(PROMPTS[2], short, options)
        return engine, witness

    engine, witness = run(main)
    requests = values(engine, "requests_total", finish_reason="length")
    assert requests["kind 0",] == 1
    assert requests[OTHER_TYPES,] == 5
    assert sum(requests.values()) == len(witness.requests)


CHEAP = CostCurve((1, 8, 32), (1.0, 1.05, 1.5))
DEAR = CostCurve((1, 2, 32), (1.0, 2.0, 32.0))


def reasons(engine):
    found = {}
    for (_, reason), number in values(engine, "draft_width_tokens_count").items():
        found[reason] = found.get(reason, 0) + number
    return found


@pytest.mark.parametrize("curve", [CHEAP, DEAR], ids=["cheap", "dear"])
def test_why_a_width_was_chosen_by_a_policy(target, plain, oracle, monkeypatch, curve):
    monkeypatch.setattr(build, "cost_curve", lambda *_, **__: curve)
    monkeypatch.setattr(CostTracker, "learn", lambda *_: None)
    params = replace(GREEDY, max_tokens=120)
    drafter = oracle(params, PROMPTS[:1]) if curve is CHEAP else RepeatDrafter(31)

    async def main():
        engine, _ = engine_on(target, drafter, 5, config={"policy": "adaptive"})
        async with engine:
            return engine, await engine.generate(PROMPTS[0], params)

    engine, output = run(main)
    assert list(output.token_ids) == plain(params, PROMPTS[:1])[0]
    found = reasons(engine)
    assert sum(found.values()) == total(engine, "request_steps_total")
    if curve is CHEAP:
        assert found["pays"] > found.get("max_tokens", 0)
        assert "loses" not in found
    else:
        assert found["loses"] > 0.9 * sum(found.values())
        assert total(engine, "draft_width_tokens_sum", reason="loses") == 0
    assert total(engine, "mean_step_cost") > 0


def test_what_leaves_a_draft_less_than_was_chosen(target, oracle):
    async def main(params=GREEDY, options=None, prompts=PROMPTS[:1], crash=None, **settings):
        known = oracle(params)
        drafter = known if crash is None else RaisingDrafter(crash, known)
        engine, _ = engine_on(target, drafter, 4, **settings)
        async with engine:
            await asyncio.gather(*(engine.generate(p, params, options) for p in prompts))
            await freed(engine)
        return reasons(engine)

    assert set(run(lambda: main())) <= {"fixed", "max_tokens"}
    assert set(run(lambda: main(replace(GREEDY, max_tokens=3)))) == {"max_tokens"}
    capped = run(lambda: main(options=RequestOptions(num_speculative_tokens=2)))
    assert capped["request"] > capped.get("max_tokens", 0)
    assert set(run(lambda: main(options=RequestOptions(speculate=False)))) == {"request"}
    tight = {"max_num_seqs": 5, "max_num_batched_tokens": 6}
    assert run(lambda: main(prompts=PROMPTS, **tight))["budget"] > 0
    assert run(lambda: main(crash=2))["disabled"] > 0
    few = {"kv_cache_gib": 40 / 2**20, "max_num_seqs": 5, "enable_prefix_caching": False}
    assert run(lambda: main(prompts=PROMPTS * 2, **few))["pages"] > 0
    batches = {"num_speculative_tokens_per_batch_size": [[1, 8, 2]]}
    assert "batch size" in run(lambda: main(config=batches))


def test_the_cost_of_a_step_and_of_a_token(target):
    """Money is seconds in steps at a price."""

    async def main():
        engine, _ = engine_on(target, price_per_hour=3600.0)
        async with engine:
            await engine.generate(PROMPTS[0], GREEDY)
        return engine

    engine = run(main)
    assert total(engine, "mean_step_cost") > 0
    seconds = total(engine, "step_seconds_total")
    assert total(engine, "cost_per_token") == pytest.approx(seconds / GREEDY.max_tokens)


@pytest.mark.parametrize("price", [-1, "2", float("nan"), float("inf"), True])
def test_a_price_is_a_number(target, price):
    with pytest.raises(ConfigError, match="price_per_hour must be 0 or more"):
        AsyncEngine(target, price_per_hour=price)


def test_lossy_tokens_are_marked(target):
    async def main(rule):
        config = {"rejection_sample_method": rule}
        engine, _ = engine_on(target, RepeatDrafter(3), 3, config=config)
        async with engine:
            await engine.generate(PROMPTS[0], SEEDED)
            await engine.generate(PROMPTS[0], GREEDY)
        return total(engine, "lossy_generation_tokens_total")

    assert run(lambda: main("typical")) == SEEDED.max_tokens  # greedy stays exact
    assert run(lambda: main("standard")) == 0


def test_prefixes_that_were_found_are_counted(target):
    async def main():
        engine, _ = engine_on(target)
        async with engine:
            for salt in ("", "", "other"):
                await engine.generate(PROMPTS[4], GREEDY, RequestOptions(cache_salt=salt))
        return engine

    engine = run(main)
    assert total(engine, "prefix_cache_queries_total") == 3 * len(PROMPTS[4])
    assert total(engine, "prefix_cache_hits_total") == len(PROMPTS[4]) // 4 * 4


def test_the_exposition_is_readable_and_has_the_names(target):
    async def main():
        engine, _ = engine_on(target, RepeatDrafter(3))
        async with engine:
            await engine.generate(PROMPTS[0], GREEDY)
        return generate_latest(engine.metrics.registry).decode()

    text = run(main)
    for name in FOUR:
        assert f"\n{PREFIX}{name}{{" in text
    assert 'request_type="greedy"' in text
    assert 'drafter="RepeatDrafter"' in text


def test_the_page_lists_every_name_and_runs(target, tmp_path, capsys):
    page = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| (counter|gauge|histogram)", page, flags=re.MULTILINE)
    listed = {
        (PREFIX + name, kind) for names, kind in rows for name in re.findall(r"`(\w+)`", names)
    }

    async def main():
        engine, _ = engine_on(target, RepeatDrafter(3), price_per_hour=1.0)
        async with engine:
            await engine.generate(PROMPTS[0], GREEDY)
            await engine.generate(PROMPTS[0], GREEDY, RequestOptions(speculate=False))
        return {(family.name, family.type) for family in engine.metrics.registry.collect()}

    assert run(main) == listed
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    model = write_tiny_checkpoint(tmp_path, max_positions=256)
    code = code.replace('"smollm2-135m"', repr(str(model))).replace(', "policy": "adaptive"', "")
    exec(code, {})
    assert "\n" in capsys.readouterr().out
