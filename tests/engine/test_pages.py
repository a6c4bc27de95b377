"""Law 6: whatever way a request ends, its pages come back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foredraft import SamplingParams
from foredraft.core.errors import InvalidRequest
from foredraft.kernels.catalog import native_available
from foredraft.models.decoder import cache_shape
from foredraft.testing.drafters import RaisingDrafter, RepeatDrafter
from foredraft.testing.models import tiny_model

from .conftest import GREEDY, PROMPTS


def assert_empty(llm):
    llm.engine.check_integrity()
    assert llm.engine.pool.num_used == 0
    assert not llm.engine.has_work


@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_return_after_length_and_stop(make_llm, oracle, plain, page_size):
    llm = make_llm(oracle(GREEDY), 5, page_size=page_size)
    llm.generate(PROMPTS, GREEDY)
    assert_empty(llm)
    llm.generate(PROMPTS, replace(GREEDY, stop_token_ids=[plain(GREEDY)[0][3]]))
    assert_empty(llm)


def test_pages_return_when_a_consumer_leaves_early(make_llm, oracle):
    llm = make_llm(oracle(GREEDY), 5)
    for stream in (llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[4], GREEDY)):
        next(stream)
        stream.close()
        assert_empty(llm)
    # A stream that is never started has queued a request; closing it takes that back.
    stream = llm.stream(PROMPTS[0], GREEDY)
    stream.close()
    del stream
    assert_empty(llm)


@pytest.mark.parametrize("call", [1, 2, 4])
def test_an_error_in_a_drafter_leaves_no_trace(make_llm, oracle, plain, call):
    failing = RaisingDrafter(call, oracle(GREEDY))
    llm = make_llm(failing, 3)
    with pytest.raises(RuntimeError, match="as scripted"):
        llm.generate(PROMPTS, GREEDY)
    assert_empty(llm)
    again = [list(output.token_ids) for output in llm.generate(PROMPTS, GREEDY)]
    assert again == plain(GREEDY)
    assert_empty(llm)


def test_a_row_without_an_allowed_token_ends_that_request_alone(make_llm, plain):
    """All ids banned but one that is banned until min_tokens: an error for this request only."""
    impossible = replace(
        GREEDY, allowed_token_ids=[7], stop_token_ids=[7], min_tokens=3, max_tokens=8
    )
    llm = make_llm()
    outputs = llm.generate(PROMPTS[:3], [GREEDY, impossible, GREEDY])
    assert outputs[1].finish_reason == "error"
    assert outputs[1].outputs[0].error
    assert [list(outputs[i].token_ids) for i in (0, 2)] == [plain(GREEDY)[i] for i in (0, 2)]
    assert_empty(llm)


def test_more_requests_than_fit_wait_and_all_finish(make_llm, oracle, plain, target):
    llm = make_llm(oracle(GREEDY), 4, kv_cache_gib=bytes_of_pages(target, 4, 11) / 2**30)
    assert llm.config.num_pages == 11
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [list(output.token_ids) for output in outputs] == plain(GREEDY)
    assert_empty(llm)


def bytes_of_pages(target, page_size, pages):
    return pages * page_size * cache_shape(target.config, target.dtype).bytes_per_position


def test_a_request_that_never_fits_is_refused_with_its_sizes(make_llm, target):
    llm = make_llm(kv_cache_gib=bytes_of_pages(target, 4, 3) / 2**30)
    with pytest.raises(InvalidRequest, match=r"needs 8 pages .* has 3"):
        llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=28))
    assert_empty(llm)
    # One refused prompt takes back the others of its call.
    small = SamplingParams(temperature=0, max_tokens=4)
    with pytest.raises(InvalidRequest):
        llm.generate([PROMPTS[0], PROMPTS[0]], [small, replace(small, max_tokens=28)])
    assert_empty(llm)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([1, 99], "99 is not an id in 0..31"),
        ([1, -1], "-1 is not an id"),
        ([1] * 400, "400 tokens"),
    ],
)
def test_bad_prompts_are_refused(make_llm, prompt, message):
    with pytest.raises(InvalidRequest, match=message):
        make_llm().generate([prompt], GREEDY)


KERNELS = ["reference", *(["native"] if native_available() else [])]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 3}, {}], ids=str)
@pytest.mark.parametrize("kernels", KERNELS)
def test_logits_that_are_no_numbers_end_that_request_alone(make_llm, bad, sampling, kernels):
    """The rows of one request go bad; its batch-mates, and the requests after it, don't notice."""
    model = tiny_model(seed=1, kernels=kernels, dtype="float32")
    llm = make_llm(model=model)
    want = [list(make_llm(model=model).generate([p], GREEDY)[0].token_ids) for p in PROMPTS[:3]]
    run = llm.engine.model.run

    def broken(batch, cache):
        output = run(batch, cache)
        logits = output.logits.clone()
        if len(logits) == 3:  # all three run: the middle row is the middle request's
            logits[1, 4] = bad
        return replace(output, logits=logits)

    params = [GREEDY, replace(GREEDY, **{"temperature": 1.0} | sampling), GREEDY]
    llm.engine.model = Broken(llm.engine.model, broken)
    outputs = llm.generate(PROMPTS[:3], params)
    assert outputs[1].finish_reason == "error"
    assert outputs[1].outputs[0].error
    assert [list(outputs[i].token_ids) for i in (0, 2)] == [want[i] for i in (0, 2)]
    assert_empty(llm)


class Broken:
    """A model whose pass is replaced."""

    def __init__(self, model, run):
        self.config, self.kernels, self.run = model.config, model.kernels, run


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 3}, {}], ids=str)
@pytest.mark.parametrize("kernels", KERNELS)
def test_an_error_inside_a_window_comes_after_the_tokens_before_it(make_llm, sampling, kernels):
    """Plain decoding says four tokens and fails at the fifth row: so does speculation, whatever
    other rows of its window hold.
    """
    model = tiny_model(seed=1, kernels=kernels, dtype="float32")
    run = model.model.run

    def broken(batch, cache):
        output = run(batch, cache)
        logits = output.logits.clone()
        positions = [p for s in batch.segments for p in positions_of(s)]
        for i, row in enumerate(batch.logit_rows):
            if positions[row] >= len(PROMPTS[0]) + 3:
                logits[i] = float("nan")
        return replace(output, logits=logits)

    params = replace(GREEDY, **{"temperature": 1.0} | sampling, allowed_token_ids=[5])
    results = []
    for drafter in (None, RepeatDrafter(5), RepeatDrafter(6)):
        llm = make_llm(drafter, 8, model=model)
        llm.engine.model = Broken(model.model, broken)
        output = llm.generate([PROMPTS[0]], params)[0]
        results.append((list(output.token_ids), output.finish_reason))
        assert_empty(llm)
    assert results == [([5, 5, 5, 5], "error")] * 3


def positions_of(segment):
    chain = range(segment.prefix, segment.prefix + segment.chain)
    return [*chain, *range(chain[-1] + 1, chain[-1] + 1 + len(segment.parents))]
