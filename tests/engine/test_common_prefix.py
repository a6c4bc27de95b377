"""Requests that begin alike and come together: one computes what they share, the others wait for
that and for nothing else.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from foredraft import RequestOptions
from foredraft.engine.pages import WORTH_WAITING
from foredraft.models.decoder import cache_shape
from foredraft.testing.drafters import RepeatDrafter

from .conftest import GREEDY, PROMPTS, SEEDED

SHORT = replace(GREEDY, max_tokens=6)
COMMON = [(7 * i + i // 5) % 31 for i in range(100)]
STARTS = [COMMON, COMMON[:72] + [5] * 20, COMMON[:30], []]
ALIKE = [[*COMMON, *prompt] for prompt in PROMPTS]


def ids(outputs):
    return [list(output.token_ids) for output in outputs]


def start(llm, prompts, params=SHORT, options=None):
    """Requests, queued."""
    groups = [llm._make(prompt, params, options) for prompt in prompts]
    for group in groups:
        llm._add(group)
    return [group.requests[0] for group in groups]


def finish(llm):
    while llm.engine.has_work:
        llm.engine.step()


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("chunk", [None, 40])
@pytest.mark.parametrize("width", [0, 3])
def test_what_they_share_is_computed_once(make_llm, plain, params, chunk, width):
    short = replace(params, max_tokens=6)
    drafter = RepeatDrafter(3) if width else None
    llm = make_llm(drafter, width, prefill_chunk_size=chunk, max_num_batched_tokens=64)
    assert ids(llm.generate(ALIKE, short)) == plain(short, ALIKE)
    scheduler = llm.engine.scheduler
    # All but what is not worth a step: the others begin when less than that is left.
    others = len(ALIKE) - 1
    assert scheduler.prefix_hit_tokens > others * (len(COMMON) - WORTH_WAITING - 4)
    if chunk is None:
        assert scheduler.prefix_hit_tokens >= others * 64


def test_nobody_else_waits_and_all_begin_in_their_order(make_llm, plain):
    llm = make_llm(max_num_batched_tokens=40)
    prompts = [ALIKE[0], ALIKE[1], PROMPTS[0], ALIKE[2], PROMPTS[1]]
    requests = start(llm, prompts)
    llm.engine.step()
    assert llm.engine.scheduler.running == [requests[0], requests[2], requests[4]]
    finish(llm)
    begun = [request.admitted_at for request in requests]
    assert begun[1] < begun[3]
    outputs = [request.tokens[request.num_prompt :] for request in requests]
    assert outputs == plain(SHORT, prompts)


def test_who_waits_keeps_its_place(make_llm):
    """Those behind it take no place that it will need, however many come."""
    llm = make_llm(max_num_seqs=2, max_num_batched_tokens=40)
    requests = start(llm, [ALIKE[0], ALIKE[1], *[PROMPTS[0]] * 8])
    llm.engine.step()
    assert llm.engine.scheduler.running == requests[:1]
    while requests[1].num_computed == 0:
        llm.engine.step()
    assert all(request.num_computed == 0 for request in requests[2:])
    finish(llm)


def test_who_waited_for_one_that_left_begins_by_itself(make_llm, plain):
    llm = make_llm(max_num_batched_tokens=40)
    first, second = start(llm, ALIKE[:2])
    llm.engine.step()
    assert second in llm.engine.scheduler.waiting
    llm.engine.abort([first])
    llm.engine.step()
    assert llm.engine.scheduler.running == [second]
    assert second.num_cached_tokens == 40
    finish(llm)
    assert second.tokens[second.num_prompt :] == plain(SHORT, ALIKE[1:2])[0]


@pytest.mark.parametrize("reason", ["salt", "little in common", "no cache", "prompt_logprobs"])
def test_who_would_find_nothing_does_not_wait(make_llm, reason):
    llm = make_llm(enable_prefix_caching=reason != "no cache")
    params = replace(SHORT, prompt_logprobs=1) if reason == "prompt_logprobs" else SHORT
    common = COMMON[: WORTH_WAITING - 1] if reason == "little in common" else COMMON
    first = start(llm, [[*common, 30, 1, 2]])
    options = RequestOptions(cache_salt="other") if reason == "salt" else None
    second = start(llm, [[*common, 29, 3, 4]], params, options)
    llm.engine.step()
    assert llm.engine.scheduler.running == [*first, *second]
    finish(llm)


@pytest.mark.parametrize("seed", range(6))
def test_in_pools_for_less_than_two_all_are_served_as_alone(make_llm, plain, target, seed):
    """Held back, preempted, cancelled, in any order: nobody is forgotten."""
    draw = random.Random(seed)
    page = 4 * cache_shape(target.config, target.cache_dtype).bytes_per_position
    pages = draw.choice([30, 36, 50])
    llm = make_llm(
        RepeatDrafter(3), draw.choice([0, 2, 5]), max_num_seqs=draw.choice([2, 3, 8]),
        kv_cache_gib=pages * page / 2**30,
        prefill_chunk_size=draw.choice([None, 7, 30]), max_num_batched_tokens=draw.choice([16, 70]),
    )  # fmt: skip
    assert llm.config.num_pages == pages
    prompts = [draw.choice(STARTS) + draw.choice(PROMPTS)[:6] for _ in range(12)]
    requests = start(llm, prompts)
    left = {draw.randrange(12) for _ in range(3)}
    for _ in range(5):
        llm.engine.step()
    llm.engine.abort([requests[index] for index in left])
    finish(llm)
    want = plain(SHORT, prompts)
    for index, request in enumerate(requests):
        if index not in left:
            assert request.tokens[request.num_prompt :] == want[index]
    assert llm.engine.scheduler.pages_in_use == 0
