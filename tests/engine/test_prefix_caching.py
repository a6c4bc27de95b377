"""Known prefixes: what is found of them, and that nobody can tell but by the time it takes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from foredraft import LLM, RequestOptions, SamplingParams
from foredraft.cache.tensors import KVCache
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.models.decoder import cache_shape
from foredraft.planning.policy import StaticPolicy
from foredraft.testing.drafters import OracleDrafter, RecordingDrafter, RepeatDrafter
from foredraft.testing.pairs import tiny_noisy_pair

from .conftest import GREEDY, PROMPTS, SEEDED

BOTH = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "coupled"])
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
MESSAGE = [30, 29, 28]
LONG = [(7 * i) % 31 for i in range(33)]


@pytest.fixture(scope="module")
def pair():
    return tiny_noisy_pair(1, noise=0.1, vocab_size=32)


def poison(cache, pages) -> None:
    """Numbers that no computation gives, so that reading them shows."""
    for tensor in (cache.keys, cache.values):
        tensor[:, list(pages)] = 1e4 * torch.rand_like(tensor[:, list(pages)])


@pytest.fixture
def make(pair):
    """An LLM that drafts by n-grams, by a draft model, or not at all. What of its caches is read
    before it is written shows.
    """

    def make(method: str | None = None, width: int = 4, pages: int | None = None, **options) -> LLM:
        configs: dict[str | None, Any] = {
            None: None if "drafter" not in options else {"num_speculative_tokens": width},
            "ngram": NGRAM | {"num_speculative_tokens": width},
            "draft_model": {"model": pair[1], "num_speculative_tokens": width},
        }
        if pages is not None:
            models = pair if method == "draft_model" else pair[:1]
            shapes = [cache_shape(m.config, m.cache_dtype) for m in models]
            a_slot = sum(shape.bytes_per_position for shape in shapes)
            options["kv_cache_gib"] = pages * options.get("page_size", 4) * a_slot / 2**30
        options = {"seed": 5, "page_size": 4, "kv_cache_gib": 0.001} | options
        model = options.pop("model", pair[0])
        llm = LLM(model, speculative_config=configs[method], **options)
        assert pages is None or llm.config.num_pages == pages
        for cache in (llm.engine.cache, llm.engine.draft_cache):
            if cache is not None:
                poison(cache, range(cache.num_pages))
        return llm

    return make


def ids(outputs):
    return [list(o.token_ids) for output in outputs for o in output.outputs]


def two_turns(llm: LLM, params: SamplingParams, prompts=PROMPTS) -> list[list[int]]:
    """The answers to all prompts at once, then to all conversations with a message more."""
    first = ids(llm.generate(prompts, params))
    talks = [[*p, *answer, *MESSAGE] for p, answer in zip(prompts, first, strict=True)]
    return first + ids(llm.generate(talks, params))


def hits(llm: LLM) -> int:
    return llm.engine.scheduler.prefix_hit_tokens


def assert_empty(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    llm.engine.check_integrity()
    assert scheduler.pages_in_use == 0
    assert llm.engine.pool.num_idle == scheduler.num_cached_pages
    llm.engine.reset_prefix_cache()
    llm.engine.check_integrity()
    assert scheduler.num_cached_pages == 0
    assert llm.engine.pool.num_free == llm.engine.pool.num_pages


@BOTH
@pytest.mark.parametrize("method", [None, "ngram", "draft_model"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("chunk", [None, 4])
def test_a_second_turn_says_what_it_says_without_the_cache(make, params, method, page_size, chunk):
    sizes = {"page_size": page_size, "prefill_chunk_size": chunk}
    llm = make(method, **sizes)
    off = make(enable_prefix_caching=False, **sizes)
    assert two_turns(llm, params) == two_turns(off, params)
    assert hits(llm) > 0
    assert (hits(off), off.engine.scheduler.num_cached_pages) == (0, 0)
    assert off.engine.pool.num_free == off.engine.pool.num_pages
    assert_empty(llm)


@pytest.mark.parametrize("method", [None, "ngram", "draft_model"])
@pytest.mark.parametrize("length", range(1, 14))
@pytest.mark.parametrize("page_size", [1, 4])
def test_all_full_pages_are_found_and_a_token_is_left_to_compute(make, method, length, page_size):
    """Reported fault 53: a drafter costs no hit."""
    prompt = LONG[:length]
    llm = make(method, page_size=page_size)
    want = ids(llm.generate([prompt], GREEDY))
    assert hits(llm) == 0
    assert llm.engine.scheduler.prefix_query_tokens == length
    assert ids(llm.generate([prompt], GREEDY)) == want
    assert hits(llm) == (length - 1) // page_size * page_size
    assert llm.engine.scheduler.prefix_query_tokens == 2 * length


@pytest.mark.parametrize("method", [None, "ngram", "draft_model", "repeat"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_an_answer_is_known_but_for_its_last_token(make, method, page_size, max_tokens):
    """The last token of an answer is committed and never computed."""
    if method == "repeat":
        llm = make(None, page_size=page_size, drafter=RepeatDrafter(3))
    else:
        llm = make(method, page_size=page_size)
    off = make(enable_prefix_caching=False)
    params = replace(GREEDY, max_tokens=max_tokens)
    (answer,) = ids(llm.generate([LONG[:10]], params))
    second = [*LONG[:10], *answer, *MESSAGE]
    assert ids(llm.generate([second], GREEDY)) == ids(off.generate([second], GREEDY))
    assert hits(llm) == (10 + max_tokens - 1) // page_size * page_size


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("stop", range(1, 12))
def test_an_answer_cut_inside_accepted_drafts_is_known_as_far_as_it_goes(make, stop, page_size):
    off = make(enable_prefix_caching=False)
    (whole,) = ids(off.generate([LONG[:10]], GREEDY))
    params = replace(GREEDY, stop_token_ids=[whole[stop]])
    (want,) = ids(off.generate([LONG[:10]], params))
    llm = make(None, drafter=OracleDrafter({tuple(LONG[:10]): whole}), page_size=page_size)
    (answer,) = ids(llm.generate([LONG[:10]], params))
    assert answer == want
    second = [*LONG[:10], *answer, *MESSAGE]
    assert ids(llm.generate([second], GREEDY)) == ids(off.generate([second], GREEDY))
    known = 10 + len(answer)
    assert (known - 1) // page_size <= hits(llm) // page_size <= known // page_size


@pytest.mark.parametrize("method", [None, "draft_model"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("steps", range(1, 8))
def test_a_prompt_that_is_being_read_is_known_as_far_as_it_is_read(make, method, page_size, steps):
    llm = make(method, prefill_chunk_size=5, page_size=page_size)
    group = llm._make(LONG, GREEDY)
    llm._add(group)
    for _ in range(steps):
        llm.engine.step()
    other = llm._make([*LONG, 7], GREEDY)
    llm._add(other)
    llm.engine.step()
    assert hits(llm) == min(5 * steps, len(LONG)) // page_size * page_size
    while llm.engine.has_work:
        llm.engine.step()
    want = ids(make(enable_prefix_caching=False).generate([LONG, [*LONG, 7]], GREEDY))
    assert [list(g.requests[0].tokens[g.requests[0].num_prompt :]) for g in (group, other)] == want
    assert_empty(llm)


def test_requests_know_what_those_that_still_run_have_computed(make):
    llm = make()
    stream = llm.stream(LONG, GREEDY)
    next(stream)
    other = llm.stream([*LONG[:20], 3, 3], GREEDY)
    next(other)
    assert hits(llm) == 20
    pages = [request.pages[:5] for request in llm.engine.scheduler.running]
    assert pages[0] == pages[1]
    assert llm.engine.scheduler.pages_in_use == 9 + 6 - 5
    stream.close()
    assert llm.engine.scheduler.pages_in_use == 6
    assert list(other)[-1].finished is not None
    assert_empty(llm)


def test_leaving_early_keeps_what_was_computed(make):
    llm = make()
    for stream in (llm.stream(LONG, GREEDY), llm.stream(PROMPTS[0], GREEDY)):
        next(stream)
        stream.close()
    llm.generate([LONG], GREEDY)
    assert hits(llm) == 32
    assert_empty(llm)


@BOTH
def test_salts_share_nothing(make, params):
    llm = make()
    tenants = [RequestOptions(cache_salt=salt) for salt in ("", "a", "b")]
    want = ids(make(enable_prefix_caching=False).generate([LONG], params))
    for options in tenants:
        assert ids(llm.generate([LONG], params, options)) == want
        assert hits(llm) == 0
    for options in reversed(tenants):
        assert ids(llm.generate([LONG], params, options)) == want
    assert hits(llm) == 3 * 32
    assert_empty(llm)


@BOTH
@pytest.mark.parametrize("method", [None, "ngram", "draft_model"])
def test_completions_of_one_prompt_share_what_they_shared(make, params, method):
    three = replace(params, n=3)
    want = ids(make(enable_prefix_caching=False).generate([LONG[:30], PROMPTS[0]], three))
    llm = make(method)
    for _ in range(2):
        assert ids(llm.generate([LONG[:30], PROMPTS[0]], three)) == want
        llm.engine.check_integrity()
    # Each by the first of three: the others share by being its siblings.
    assert hits(llm) == 28 + 4
    assert_empty(llm)


def test_log_probabilities_of_a_prompt_are_computed_again(make):
    params = replace(GREEDY, prompt_logprobs=2)
    want = make(enable_prefix_caching=False).generate([LONG], params)[0]
    llm = make()
    llm.generate([LONG], GREEDY)
    for _ in range(2):
        got = llm.generate([LONG], params)[0]
        assert got.token_ids == want.token_ids
        assert [e and e.token_id for e in got.prompt_logprobs] == [
            e and e.token_id for e in want.prompt_logprobs
        ]
        assert len(got.prompt_logprobs) == len(LONG)
    assert hits(llm) == 0
    assert llm.engine.scheduler.prefix_query_tokens == len(LONG)  # of the first alone
    assert_empty(llm)


@BOTH
@pytest.mark.parametrize("method", [None, "ngram", "draft_model"])
@pytest.mark.parametrize("pages", [16, 21])
def test_a_cache_too_small_for_all_that_is_known(make, params, method, pages):
    off = make(enable_prefix_caching=False, max_num_seqs=2)
    llm = make(method, pages=pages, max_num_seqs=2)
    for _ in range(2):
        assert two_turns(llm, params) == two_turns(off, params)
        assert llm.engine.scheduler.num_cached_pages <= pages
    assert_empty(llm)


def test_what_was_in_use_longest_ago_is_evicted_first(make):
    """Nine pages: two prompts of three full pages each, and three for a request beside them."""
    short = replace(GREEDY, max_tokens=1)
    llm = make(pages=9)
    first, second, third = ([i] * 3 + LONG[:9] for i in (1, 2, 3))
    llm.generate([first], short)
    llm.generate([second], short)
    llm.generate([first], short)  # 8 tokens found, the third page is computed anew
    assert hits(llm) == 8
    llm.generate([third], short)
    assert llm.engine.scheduler.num_cached_pages == 9
    llm.generate([[4] * 12], short)
    before = hits(llm)
    llm.generate([[*first, 5]], short)
    assert hits(llm) == before + 12
    assert_empty(llm)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("at_once", [1, 6])
@pytest.mark.parametrize("pages", range(34, 73, 6))
def test_slots_for_drafts_cost_no_more_than_a_page_a_request(make, width, at_once, pages):
    """Reported fault 52: three turns of six conversations, in a cache that holds a part of them."""
    params = replace(GREEDY, max_tokens=10)
    found = []
    for drafter in ({}, {"drafter": RepeatDrafter(3)}):
        llm = make(None, width, pages, max_num_seqs=3, **drafter)
        talks = [[i, *LONG[i : i + 15]] for i in range(6)]
        for _ in range(3):
            for first in range(0, 6, at_once):
                answers = ids(llm.generate(talks[first : first + at_once], params))
                for talk, answer in zip(talks[first:], answers, strict=False):
                    talk += [*answer, 30, 29]
        found.append(hits(llm))
    assert found[0] > 0
    assert found[1] >= found[0] - 3 * 6 * 4


class Widths(StaticPolicy):
    """Random widths, the same at each run."""

    def __init__(self) -> None:
        self.count = itertools.count(3)

    def widths(self, load, requests) -> list[int]:
        return [next(self.count) * 7919 % 11 % 7 for _ in requests]


@BOTH
@pytest.mark.parametrize("method", ["oracle", "ngram", "draft_model"])
@pytest.mark.parametrize("pages", [10, 14])
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "not cached"])
def test_sixteen_requests_in_a_pool_for_one_and_a_half(make, params, method, pages, caching):
    """Reported faults 22 and 56: each says what it says alone, and nothing is left."""
    prompts = [[*LONG[: 4 * (i % 3)], *PROMPTS[i % 5][:5]] for i in range(16)]
    want = [ids(make(enable_prefix_caching=False).generate([p], params))[0] for p in prompts]
    options = {"pages": pages, "prefill_chunk_size": 5, "enable_prefix_caching": caching}
    if method == "oracle":
        oracle = OracleDrafter({tuple(p): o for p, o in zip(prompts, want, strict=True)})
        options["drafter"] = oracle
    llm = make(None if method == "oracle" else method, width=6, **options)
    llm.engine.scheduler.policy = Widths()
    for _ in range(2):
        assert ids(llm.generate(prompts, params)) == want
    assert llm.engine.scheduler.num_preemptions > 0
    if method == "draft_model":
        assert not llm.drafter._computed
    assert (hits(llm) > 0) == caching
    assert_empty(llm)


@BOTH
@pytest.mark.parametrize("method", [None, "draft_model"])
def test_a_preempted_request_finds_its_own_pages(make, params, method):
    llm = make(method)
    want = ids(make(enable_prefix_caching=False).generate(PROMPTS[3:], params))
    groups = [llm._make(prompt, params) for prompt in PROMPTS[3:]]
    for group in groups:
        llm._add(group)
    rows: list[int] = []
    for _ in range(5):
        llm.engine.step()
    youngest = llm.engine.scheduler.running[-1]
    computed = youngest.num_computed
    llm.engine.scheduler.preempt(youngest)
    if llm.drafter is not None:
        llm.drafter.release(youngest.id)
    run = llm.engine.model.run

    class Watched:
        config, kernels = llm.engine.model.config, llm.engine.model.kernels

        def run(self, batch, cache):
            rows.append(batch.segments[-1].prefix)
            return run(batch, cache)

    llm.engine.model = Watched()
    while llm.engine.has_work:
        llm.engine.step()
    assert rows[0] == computed // 4 * 4
    assert [request.tokens[request.num_prompt :] for g in groups for request in g.requests] == want
    assert youngest.num_preemptions == llm.engine.scheduler.num_preemptions == 1
    assert llm.engine.scheduler.prefix_query_tokens == sum(map(len, PROMPTS[3:]))
    assert_empty(llm)


@BOTH
@pytest.mark.parametrize("script", [(4,), (0, 0, 0, 3), (0, 5, 0, 0, 2)])
@pytest.mark.parametrize(("chunk", "page_size"), [(None, 4), (3, 4), (None, 1)])
def test_a_drafter_reads_nothing_that_was_not_written(pair, params, script, chunk, page_size):
    """What a drafter says after a hit is what it says without: with all that was never written for
    it, and all that is free, full of numbers that would change it.
    """
    runs = []
    for caching in (True, False):
        drafter = RecordingDrafter(DraftModelDrafter(pair[1], pair[0]))
        llm = LLM(
            pair[0], drafter=drafter, seed=5, page_size=page_size, prefill_chunk_size=chunk,
            max_num_seqs=3, kv_cache_gib=0.001, enable_prefix_caching=caching,
        )  # fmt: skip
        llm.engine.scheduler.policy = OwnScript(script)
        pool = llm.engine.pool
        poison(llm.engine.draft_cache, range(pool.num_pages))
        texts = []
        for turn in range(3):
            texts.append(two_turns(llm, params, PROMPTS[turn : turn + 3]))
            poison(llm.engine.draft_cache, pool._free)
        runs.append((texts, drafts_by_place(drafter)))
        firsts = {request.id: request.num_cached for request in reversed(drafter.requests)}
        if script == (4,):  # else what is found may have been computed by the target alone
            assert any(firsts.values()) == caching
    assert runs[0][0] == runs[1][0]
    with_hits, without = runs[0][1], runs[1][1]
    assert with_hits.keys() == without.keys()
    for place, draft in without.items():
        assert with_hits[place] == draft, place


class OwnScript(StaticPolicy):
    """Widths by how many steps a request has made: the same with a cache and without."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self.script = script

    def widths(self, load, requests) -> list[int]:
        return [self.script[each.counts.num_steps % len(self.script)] for each in requests]


def drafts_by_place(drafter: RecordingDrafter) -> dict[Any, Any]:
    """What was drafted after each context, as often as it was asked."""
    found: dict[Any, Any] = {}
    for request, draft in zip(drafter.requests, drafter.drafts, strict=True):
        if request.max_nodes:
            key = tuple(request.tokens), request.num_prompt_tokens, request.max_nodes
            assert found.setdefault(key, tuple(draft.tokens)) == tuple(draft.tokens)
    return found


def recorded(make, draft, target, script=(3,), **options):
    """An LLM whose drafter's questions and answers are kept."""
    drafter = RecordingDrafter(DraftModelDrafter(draft, target))
    llm = make(drafter=drafter, **options)
    llm.engine.scheduler.policy = OwnScript(script)
    return llm, drafter


def check_drafts(drafter: RecordingDrafter, draft, target) -> None:
    """Each draft is that of a fresh drafter."""
    for request, given in zip(drafter.requests, drafter.drafts, strict=True):
        cache = KVCache(draft_shape(draft), 100, request.cache.page_size, "cpu")
        asked = request._replace(cache=cache, pages=range(100), num_cached=0)
        (want,) = DraftModelDrafter(draft, target).propose([asked])
        assert tuple(given.tokens) == tuple(want.tokens)


def draft_shape(draft):
    return cache_shape(draft.config, draft.cache_dtype)


class NotTheFirst(StaticPolicy):
    """Drafts for all completions of a prompt but the first."""

    def widths(self, load, requests) -> list[int]:
        return [0 if each.id.endswith("-0") else 3 for each in requests]


@pytest.mark.parametrize("policy", [OwnScript((3,)), OwnScript((0, 3)), NotTheFirst()])
@pytest.mark.parametrize("length", [9, 12, 13])
def test_siblings_are_drafted_for_as_alone(make, pair, policy, length):
    target, draft = pair
    llm, drafter = recorded(make, draft, target, prefill_chunk_size=4)
    llm.engine.scheduler.policy = policy
    params = replace(GREEDY, n=3, max_tokens=12)
    for _ in range(2):
        llm.generate([LONG[:length]], params)
    assert sum(len(given.tokens) for given in drafter.drafts) > 0
    check_drafts(drafter, draft, target)
    assert_empty(llm)


def test_a_context_too_long_for_the_drafter_fills_none_of_its_cache(make):
    target, draft = tiny_noisy_pair(1, noise=0.1, vocab_size=32, draft_max_positions=12)
    llm, drafter = recorded(make, draft, target, model=target)
    short = replace(GREEDY, max_tokens=4)
    llm.generate([LONG[:20]], short)
    llm.generate([[*LONG[:8], 3]], short)
    assert hits(llm) == 8
    assert sum(len(given.tokens) for given in drafter.drafts) > 0
    check_drafts(drafter, draft, target)


def test_a_request_that_failed_makes_nothing_known_of_its_last_step(make):
    impossible = replace(GREEDY, allowed_token_ids=[7], stop_token_ids=[7], min_tokens=3)
    llm = make()
    assert llm.generate([LONG], impossible)[0].finish_reason == "error"
    assert llm.engine.scheduler.num_cached_pages == 0
    assert_empty(llm)
