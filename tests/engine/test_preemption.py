"""Too few pages for all: drafts shrink, the youngest are computed anew, and nobody notices."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from foredraft import LLM, SamplingParams
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.models.decoder import cache_shape
from foredraft.planning.policy import StaticPolicy
from foredraft.testing.drafters import RecordingDrafter, RepeatDrafter
from foredraft.testing.pairs import tiny_noisy_pair

from .conftest import GREEDY, PROMPTS, SEEDED

PAGE = 4
BOTH = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "coupled"])


def gib(pages: int, *models) -> float:
    positions = pages * PAGE
    return (
        sum(cache_shape(m.config, m.cache_dtype).bytes_per_position for m in models)
        * positions
        / 2**30
    )


@dataclass
class Widths(StaticPolicy):
    """Widths that change from step to step and request to request."""

    seen: list[int] = field(default_factory=list)

    def widths(self, load, requests) -> list[int]:
        return [(5 * each.counts.num_steps + 3 * load.num_rows) % 7 for each in requests]


def watch_preemptions(llm: LLM) -> list[str]:
    found: list[str] = []
    preempt = llm.engine.scheduler.preempt

    def noted(request) -> None:
        found.append(request.id)
        preempt(request)

    llm.engine.scheduler.preempt = noted
    return found


@BOTH
@pytest.mark.parametrize("pages", [10, 14, 20])
def test_requests_in_a_pool_for_one_and_a_half_equal_their_solo_runs(
    make_llm, plain, oracle, target, params, pages
):
    """A request may need 9 pages of 4; sixteen want to run at once."""
    llm = make_llm(oracle(params), 6, kv_cache_gib=gib(pages, target))
    assert llm.config.num_pages == pages
    llm.engine.scheduler.policy = Widths()
    preempted = watch_preemptions(llm)
    outputs = llm.generate([PROMPTS[i % 5] for i in range(16)], params)
    expected = plain(params)
    assert [list(o.token_ids) for o in outputs] == [expected[i % 5] for i in range(16)]
    assert preempted
    assert llm.engine.pool.num_used == 0


@BOTH
@pytest.mark.parametrize("pages", [10, 16])
def test_a_draft_model_is_preempted_with_its_target(params, pages):
    target, draft = tiny_noisy_pair(1, noise=0.1, vocab_size=32)
    drafter = RecordingDrafter(DraftModelDrafter(draft, target))
    llm = LLM(
        target, drafter=drafter, seed=5, page_size=PAGE, kv_cache_gib=gib(pages, target, draft),
        prefill_chunk_size=5,
    )  # fmt: skip
    assert llm.config.num_pages == pages
    preempted = watch_preemptions(llm)
    outputs = llm.generate(PROMPTS * 2, params)
    alone = LLM(target, seed=5)
    assert [o.token_ids for o in outputs] == [
        alone.generate([p], params)[0].token_ids for p in PROMPTS * 2
    ]
    assert preempted
    # Told of each loss and each end, and nothing is kept.
    assert sorted(drafter.released) == sorted([*preempted, *(o.request_id for o in outputs)])
    assert not drafter.inner._computed
    assert llm.engine.pool.num_used == 0


def test_drafts_shrink_before_anybody_is_preempted(make_llm, plain, target):
    """One request, whose answer fills the pool to the last slot but one."""
    prompt, params = PROMPTS[0], replace(GREEDY, max_tokens=20)
    llm = make_llm(RepeatDrafter(3), 6, kv_cache_gib=gib(6, target))
    preempted = watch_preemptions(llm)
    assert list(llm.generate([prompt], params)[0].token_ids) == plain(params, [prompt])[0]
    assert not preempted
    # Two together: the second gives way to the first, whose drafts shrink.
    outputs = llm.generate([prompt, prompt], params)
    assert [list(o.token_ids) for o in outputs] == plain(params, [prompt, prompt])
    assert set(preempted) <= {outputs[1].request_id}


def test_the_oldest_goes_on_and_the_order_is_kept(make_llm, oracle, target):
    llm = make_llm(oracle(GREEDY), 3, kv_cache_gib=gib(11, target))
    preempted = watch_preemptions(llm)
    ended: list[str] = []
    finish = llm.engine.scheduler.remove

    def noted(request) -> None:
        ended.append(request.id)
        finish(request)

    llm.engine.scheduler.remove = noted
    outputs = llm.generate([PROMPTS[0]] * 6, GREEDY)
    order = list(dict.fromkeys(ended))
    assert order == [o.request_id for o in outputs]
    assert outputs[0].request_id not in preempted


@BOTH
def test_completions_that_share_pages_are_preempted_one_by_one(make_llm, oracle, target, params):
    five = replace(params, n=5, logprobs=1, prompt_logprobs=1)
    roomy = make_llm().generate([PROMPTS[4]], five)[0]
    llm = make_llm(oracle(params), 4, kv_cache_gib=gib(13, target))
    preempted = watch_preemptions(llm)
    tight = llm.generate([PROMPTS[4]], five)[0]
    assert preempted
    assert [o.token_ids for o in tight.outputs] == [o.token_ids for o in roomy.outputs]
    assert [len(o.logprobs) for o in tight.outputs] == [len(o.token_ids) for o in tight.outputs]
    assert len(tight.prompt_logprobs) == len(PROMPTS[4])
    assert llm.engine.pool.num_used == 0


def test_penalties_and_limits_count_what_was_said_before(make_llm, plain, target):
    params = SamplingParams(
        temperature=0.8, seed=4, max_tokens=20, min_tokens=15, ignore_eos=False,
        presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2, stop_token_ids=[5, 9],
    )  # fmt: skip
    llm = make_llm(RepeatDrafter(3), 4, kv_cache_gib=gib(10, target))
    preempted = watch_preemptions(llm)
    outputs = llm.generate(PROMPTS, params)
    assert preempted
    assert [list(o.token_ids) for o in outputs] == plain(params)


def test_a_drafter_that_fails_when_told_leaves_a_sound_engine(make_llm, plain, target):
    class Failing(RepeatDrafter):
        def release(self, request_id: str) -> None:
            raise RuntimeError("as scripted")

    llm = make_llm(Failing(3), 4, kv_cache_gib=gib(10, target))
    with pytest.raises(RuntimeError, match="as scripted"):
        llm.generate(PROMPTS, GREEDY)
    llm.engine.check_integrity()
    assert llm.engine.pool.num_used == 0
