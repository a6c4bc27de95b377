"""Clients of all kinds at one engine: patient, slow, gone after a while; in a cache for hardly two.
Each is told what it would be told alone, and nothing is left of any.

`FOREDRAFT_SOAK_MINUTES` plays new scenes for so long.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import aclosing
from typing import Any

import pytest

from foredraft import LLM, AsyncEngine, EngineClosed, QueueFull, RequestOptions, SamplingParams
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.ngram import NgramDrafter
from foredraft.drafters.suffix import SuffixDrafter
from foredraft.models.decoder import cache_shape
from foredraft.testing.drafters import RaisingDrafter, RepeatDrafter
from foredraft.testing.pairs import tiny_noisy_pair

from .async_rig import freed, run

TARGET, DRAFT = tiny_noisy_pair(1, noise=0.1, vocab_size=32)
MINUTES = float(os.environ.get("FOREDRAFT_SOAK_MINUTES", "0"))
COMMON = [(5 * i + i // 7) % 31 for i in range(80)]
STARTS = [[], COMMON, COMMON[:70], COMMON[:6], [3, 1, 4, 1, 5, 9]]
DRAFTERS = {
    "none": lambda draw: None,
    "n-gram": lambda draw: NgramDrafter(),
    "suffix": lambda draw: SuffixDrafter(suffix_decoding_max_cached_tokens=draw.choice([60, 9999])),
    "draft model": lambda draw: DraftModelDrafter(DRAFT, TARGET),
    "failing": lambda draw: RaisingDrafter(draw.randrange(2, 40), RepeatDrafter(3)),
    "failing model": lambda draw: RaisingDrafter(
        draw.randrange(2, 40), DraftModelDrafter(DRAFT, TARGET)
    ),
}


class Scene:
    """One engine and its clients; everything but the threads' timing follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.kind = draw.choice(list(DRAFTERS))
        drafter = DRAFTERS[self.kind](draw)
        self.page_size = draw.choice([1, 3, 4])
        self.solo = LLM(TARGET, seed=5, enable_prefix_caching=False, kv_cache_gib=0.01)
        self.asked = [self.question() for _ in range(draw.randrange(4, 14))]
        alone = [self.solo.generate([p], params)[0] for p, params, _ in self.asked]
        self.want = [[each.token_ids for each in output.outputs] for output in alone]
        self.texts = [[each.text for each in output.outputs] for output in alone]
        self.drafter = drafter
        self.settings = self.make_settings()

    def question(self) -> tuple[list[int], SamplingParams, RequestOptions]:
        draw = self.draw
        prompt = [
            *draw.choice(STARTS),
            *(draw.randrange(2, 31) for _ in range(draw.randrange(1, 9))),
        ]
        params = SamplingParams(
            temperature=draw.choice([0.0, 0.8]), seed=draw.randrange(99), ignore_eos=True,
            max_tokens=draw.randrange(1, 30), n=draw.choice([1, 1, 1, 2, 3]),
            stop=draw.choice([None, None, ["a"]]), logprobs=draw.choice([None, None, 1]),
        )  # fmt: skip
        options = RequestOptions(
            cache_salt=draw.choice(["", "", "a"]), speculate=draw.random() < 0.9
        )
        return prompt, params, options

    def make_settings(self) -> dict[str, Any]:
        """A cache in which the longest request just fits, or little more."""
        draw, models = self.draw, [TARGET, DRAFT] if "model" in self.kind else [TARGET]
        positions = max(len(p) + (params.max_tokens or 0) for p, params, _ in self.asked)
        pages = -(-positions // self.page_size) + draw.choice([0, 2, 30])
        shapes = [cache_shape(model.config, model.cache_dtype) for model in models]
        slot = sum(shape.bytes_per_position for shape in shapes)
        width = draw.choice([1, 3, 6])
        return {
            "kv_cache_gib": (pages + 0.5) * self.page_size * slot / 2**30,
            "page_size": self.page_size, "seed": 5, "max_num_seqs": draw.choice([1, 2, 4, 8]),
            "max_num_batched_tokens": draw.choice([8, 24, 200]),
            "prefill_chunk_size": draw.choice([None, 5]), "drafter": self.drafter,
            "max_queued": draw.choice([None, None, 3]),
            "speculative_config": self.drafter and {"num_speculative_tokens": width},
        }  # fmt: skip

    async def client(self, engine: AsyncEngine, index: int) -> None:
        prompt, params, options = self.asked[index]
        draw = random.Random(index)
        leaves_after = draw.choice([None, None, None, 0, 1, 3])
        slow = draw.choice([0.0, 0.0, 0.004])
        tokens: dict[int, list[int]] = {}
        texts: dict[int, str] = {}
        finished = None
        try:
            async with aclosing(engine.stream(prompt, params, options)) as deltas:
                async for delta in deltas:
                    tokens.setdefault(delta.index, []).extend(delta.token_ids)
                    texts[delta.index] = texts.get(delta.index, "") + delta.text
                    finished = delta.finished
                    if leaves_after is not None and len(tokens.get(0, ())) > leaves_after:
                        break
                    await asyncio.sleep(slow)
        except (QueueFull, EngineClosed):
            return
        for child, got in tokens.items():
            assert got == self.want[index][child][: len(got)]
            assert texts[child] == self.texts[index][child][: len(texts[child])]
        if finished is not None and finished.finish_reason != "abort":
            assert [tokens[child] for child in sorted(tokens)] == self.want[index]
            assert [texts[child] for child in sorted(texts)] == self.texts[index]
            assert [list(each.token_ids) for each in finished.outputs] == self.want[index]

    async def play(self) -> None:
        engine = AsyncEngine(TARGET, **self.settings)
        draw = self.draw
        tasks = []
        for index in range(len(self.asked)):
            tasks.append(asyncio.create_task(self.client(engine, index)))
            await asyncio.sleep(draw.choice([0.0, 0.0, 0.002]))
            if draw.random() < 0.15:
                draw.choice(tasks).cancel()
        if draw.random() < 0.2:
            await engine.close(drain=draw.random() < 0.5)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if not isinstance(result, asyncio.CancelledError | None):
                raise result
        await freed(engine)
        await engine.close()
        self.check_nothing_left(engine)

    def check_nothing_left(self, engine: AsyncEngine) -> None:
        worker, scheduler = engine._worker, engine.engine.scheduler
        assert (worker._in_flight, worker._feeds, worker._arrived) == (0, {}, [])
        assert not scheduler.waiting
        assert not scheduler.running
        engine.engine.reset_prefix_cache()
        assert engine.engine.pool.num_free == engine.engine.pool.num_pages
        if self.kind == "draft model":
            assert not self.drafter._computed
        if self.kind == "suffix":
            assert not self.drafter._states
            self.drafter.check_integrity()


@pytest.mark.parametrize("seed", range(12))
def test_every_client_is_told_what_it_would_be_told_alone(seed: int) -> None:
    begin, round_number = time.monotonic(), 0
    while not round_number or time.monotonic() - begin < 5 * MINUTES:
        run(Scene(seed + 1000 * round_number).play)
        round_number += 1
