"""Options beside sampling: each is honoured or refused, and none changes a text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foredraft import LLM, InvalidRequest, RequestOptions
from foredraft.drafters.ngram import NgramDrafter
from foredraft.drafters.prediction import PredictionDrafter
from foredraft.models.decoder import cache_shape
from foredraft.testing.drafters import RecordingDrafter, RepeatDrafter
from foredraft.testing.pairs import tiny_noisy_pair

from .conftest import GREEDY, PROMPTS, SEEDED

PLAIN = RequestOptions(speculate=False)


def tokens_of(outputs):
    return [list(output.token_ids) for output in outputs]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_request_may_do_without_drafts(make_llm, plain, oracle, params):
    """Per request: its neighbours are drafted for, and no text changes (fault 71)."""
    drafter = RecordingDrafter(oracle(params))
    llm = make_llm(drafter, 4)
    each = [RequestOptions(), PLAIN, RequestOptions(), PLAIN, RequestOptions()]
    outputs = llm.generate(PROMPTS, params, each)
    assert tokens_of(outputs) == plain(params)
    drafted = [o.metrics.speculative_decoding.num_draft_tokens > 0 for o in outputs]
    assert drafted == [True, False, True, False, True]
    asked = {request.id for request in drafter.requests}
    assert len(asked) == 3


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_request_may_have_shorter_drafts(make_llm, plain, oracle, most):
    drafter = RecordingDrafter(oracle(GREEDY))
    llm = make_llm(drafter, 4)
    outputs = llm.generate(PROMPTS, GREEDY, RequestOptions(num_speculative_tokens=most))
    assert tokens_of(outputs) == plain(GREEDY)
    assert max((request.max_nodes for request in drafter.requests), default=0) == most
    for output in outputs:
        assert len(output.metrics.speculative_decoding.acceptance_histogram) in (0, most + 1)


def test_streams_and_conversations_take_options_too(make_llm):
    drafter = RecordingDrafter(RepeatDrafter(3))
    llm = make_llm(drafter, 4)
    messages = [{"role": "user", "content": "hi"}]
    list(llm.stream(PROMPTS[0], GREEDY, PLAIN))
    list(llm.stream_chat(messages, GREEDY, PLAIN))
    llm.chat(messages, GREEDY, PLAIN)
    assert drafter.requests == []
    llm.chat(messages, GREEDY)
    assert drafter.requests != []


def test_a_draft_model_reads_no_prompt_of_a_request_without_drafts():
    target, draft = tiny_noisy_pair(1, noise=0.1, vocab_size=32)
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    llm = LLM(target, speculative_config=config, seed=5, page_size=4, prefill_chunk_size=2)
    drafter = llm.engine.drafter = RecordingDrafter(llm.engine.drafter)
    expected = tokens_of(LLM(target, seed=5).generate(PROMPTS, GREEDY))
    assert tokens_of(llm.generate(PROMPTS, GREEDY, PLAIN)) == expected
    assert drafter.requests == []
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected


class Spy:
    """A policy that notes what it is told."""

    def __init__(self, inner):
        self.inner, self.types = inner, set()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def widths(self, load, requests):
        self.types.update(request.request_type for request in requests)
        return self.inner.widths(load, requests)

    def observe(self, record):
        self.types.update(judged.request_type for judged in record.requests)


def test_a_type_of_ones_own_is_what_a_policy_sees(make_llm):
    llm = make_llm(NgramDrafter(), 4)
    spy = llm.engine.scheduler.policy = Spy(llm.engine.scheduler.policy)
    llm.generate(PROMPTS[0], GREEDY, RequestOptions(request_type="code"))
    assert spy.types == {"code"}
    llm.generate(PROMPTS[0], GREEDY)
    assert spy.types == {"code", "greedy"}


def test_a_salt_keeps_prefixes_apart(make_llm, plain):
    llm = make_llm()
    hits = []
    for salt in ("a", "a", "b", ""):
        output = llm.generate(PROMPTS[4], GREEDY, RequestOptions(cache_salt=salt))[0]
        assert list(output.token_ids) == plain(GREEDY)[4]
        hits.append(llm.engine.scheduler.prefix_hit_tokens)
    assert hits[0] == 0
    assert hits[1] > 0
    assert hits[1] == hits[2] == hits[3]


def test_without_prefix_caching_nothing_is_kept(make_llm):
    llm = make_llm(enable_prefix_caching=False)
    for _ in range(2):
        llm.generate(PROMPTS[4], GREEDY)
    assert llm.engine.scheduler.prefix_hit_tokens == 0
    assert llm.engine.scheduler.num_cached_pages == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_type": 3}, "request_type must be text of 256 characters at most, got 3"),
        ({"cache_salt": "x" * 257}, "cache_salt must be text of 256 characters at most, got 'xxx"),
        ({"speculate": 1}, "speculate must be true or false, got 1"),
        ({"num_speculative_tokens": -1}, "must be an integer of 0 or more, got -1"),
        ({"num_speculative_tokens": 2.0}, "must be an integer of 0 or more, got 2.0"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(fields, message):
    with pytest.raises(InvalidRequest, match=message):
        RequestOptions(**fields)


def test_options_that_the_engine_cannot_honour_are_refused(make_llm):
    llm = make_llm(NgramDrafter(), 4)
    with pytest.raises(InvalidRequest, match="num_speculative_tokens 5 of a request is more than"):
        llm.generate(PROMPTS[0], GREEDY, RequestOptions(num_speculative_tokens=5))
    with pytest.raises(InvalidRequest, match="must be RequestOptions, got"):
        llm.generate(PROMPTS[0], GREEDY, {"speculate": False})
    with pytest.raises(InvalidRequest, match="5 prompts with 2 request options"):
        llm.generate(PROMPTS, GREEDY, [PLAIN, PLAIN])


def test_completions_share_their_options(make_llm):
    params = replace(SEEDED, n=2)
    drafter = RecordingDrafter(RepeatDrafter(3))
    make_llm(drafter, 4).generate(PROMPTS[0], params, PLAIN)
    assert drafter.requests == []


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_prediction_is_drafted_and_changes_nothing(make_llm, plain, params):
    """Right, cut, changed in the middle, wrong and none, side by side."""
    want = plain(params)
    changed = [*want[2][:9], 1, 2, *want[2][10:]]
    each = [want[0], want[1][:7], changed, [3] * 24, None]
    options = [RequestOptions(prediction=prediction) for prediction in each]
    llm = make_llm(PredictionDrafter(prediction_fallback="none"), 5)
    outputs = llm.generate(PROMPTS, params, options)
    assert tokens_of(outputs) == want
    accepted = [o.metrics.speculative_decoding.num_accepted_draft_tokens for o in outputs]
    assert accepted[0] == 20  # 24 tokens in 4 steps
    assert accepted[2] > 12
    assert outputs[4].metrics.speculative_decoding.num_draft_tokens == 0


def test_a_predicted_text_is_read_as_the_answer_is(make_llm, plain, target):
    text = target.tokenizer.decode(plain(GREEDY)[0])
    llm = make_llm(PredictionDrafter(), 5)
    (output,) = llm.generate([PROMPTS[0]], GREEDY, RequestOptions(prediction=text))
    assert tokens_of([output]) == plain(GREEDY)[:1]
    again = llm.generate([PROMPTS[0]], GREEDY, RequestOptions(prediction=[]))
    assert tokens_of(again) == tokens_of([output])


def test_a_prediction_survives_a_preemption(make_llm, plain, target):
    shape = cache_shape(target.config, target.cache_dtype)
    few = 12 * 4 * shape.bytes_per_position / 2**30
    llm = make_llm(PredictionDrafter(), 5, kv_cache_gib=few)
    options = [RequestOptions(prediction=each) for each in plain(GREEDY)]
    assert tokens_of(llm.generate(PROMPTS, GREEDY, options)) == plain(GREEDY)
    assert llm.engine.scheduler.num_preemptions > 0


def test_a_prediction_that_nobody_reads_is_refused(make_llm):
    options = RequestOptions(prediction="x")
    for llm in (make_llm(), make_llm(RepeatDrafter(3))):
        with pytest.raises(InvalidRequest, match="read by the speculative method 'prediction'"):
            llm.generate([PROMPTS[0]], GREEDY, options)
    reader = make_llm(PredictionDrafter())
    with pytest.raises(InvalidRequest, match=r"prediction token 99 is not an id in 0\.\.31"):
        reader.generate([PROMPTS[0]], GREEDY, RequestOptions(prediction=[1, 99]))
    for bad in (7, [1.5], {1, 2}, b"x"):
        with pytest.raises(InvalidRequest, match="a prediction must be text or a list of token"):
            RequestOptions(prediction=bad)
