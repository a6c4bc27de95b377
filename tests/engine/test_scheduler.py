"""The row budget, the order of service and the widths, seen at the passes the target is given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foredraft.engine.request import Request
from foredraft.testing.drafters import RepeatDrafter

from .conftest import GREEDY, PROMPTS

LONG = [[(7 * i + j) % 31 for i in range(40)] for j in range(4)]


@pytest.fixture
def watch():
    """Collects the segments of every pass of an LLM's target."""

    def install(llm):
        passes = []
        model = llm.engine.model

        class Watched:
            config, kernels = model.config, model.kernels

            def run(self, batch, cache):
                passes.append(list(batch.segments))
                return model.run(batch, cache)

        llm.engine.model = Watched()
        return passes

    return install


@pytest.mark.parametrize("budget", [4, 5, 9, 16, 33])
def test_no_pass_has_more_rows_than_the_budget(make_llm, plain, watch, budget):
    llm = make_llm(RepeatDrafter(3), 6, max_num_seqs=4, max_num_batched_tokens=budget)
    passes = watch(llm)
    outputs = llm.generate(LONG, GREEDY)
    rows = [sum(segment.rows for segment in segments) for segments in passes]
    assert max(rows) <= budget
    # The budget is used: prompts fill it, and drafts take what decoding leaves.
    assert rows[0] == min(budget, sum(map(len, LONG)) + 6 * 4)
    assert [list(output.token_ids) for output in outputs] == plain(GREEDY, LONG)


def test_nor_when_a_newcomer_finds_all_but_a_token_computed(make_llm, plain, watch):
    """A row is a row: while others' prompts take the whole budget, it waits for the next pass."""
    llm = make_llm(max_num_seqs=4, max_num_batched_tokens=5)
    known = LONG[0][:9]
    llm.generate([known], replace(GREEDY, max_tokens=1))
    passes = watch(llm)
    outputs = llm.generate([LONG[1], known, known, LONG[2]], GREEDY)
    assert max(sum(segment.rows for segment in segments) for segments in passes) == 5
    expected = plain(GREEDY, [LONG[1], known, known, LONG[2]])
    assert [list(output.token_ids) for output in outputs] == expected


def test_decoding_requests_keep_their_row_while_prompts_are_read(make_llm, watch):
    llm = make_llm(max_num_seqs=4, max_num_batched_tokens=6)
    passes = watch(llm)
    short = [3, 1]
    llm.generate([short, *LONG[:2]], GREEDY)
    first = [segments[0] for segments in passes]
    # The short prompt is read in the first pass and emits in each pass after it until it ends.
    decoding = first[1 : GREEDY.max_tokens]
    assert [segment.prefix for segment in decoding] == list(
        range(len(short), len(short) + len(decoding))
    )


def test_no_more_requests_run_than_allowed(make_llm, plain, watch):
    llm = make_llm(max_num_seqs=2)
    passes = watch(llm)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert max(map(len, passes)) == 2
    assert [list(output.token_ids) for output in outputs] == plain(GREEDY)


def test_the_prompt_chunk_size_bounds_each_request_s_rows(make_llm, watch):
    llm = make_llm(prefill_chunk_size=7)
    passes = watch(llm)
    llm.generate(LONG[:2], GREEDY)
    chains = [segment.chain for segments in passes for segment in segments]
    assert max(chains) == 7
    assert len(passes[0]) == 2


@pytest.mark.parametrize("width", [1, 3, 6])
def test_drafts_are_as_wide_as_asked_and_never_past_the_end(make_llm, watch, width):
    llm = make_llm(RepeatDrafter(3), width)
    passes = watch(llm)
    output = llm.generate([PROMPTS[0]], replace(GREEDY, max_tokens=12))[0]
    emitted = 0
    for segments, step in zip(passes, steps_of(output), strict=True):
        assert len(segments[0].parents) == min(width, 12 - emitted - 1)
        emitted += step


def steps_of(output):
    """How many tokens each step emitted: a step ends with a token that was not accepted."""
    steps, count = [], 0
    for origin in output.origins:
        count += 1
        if origin != "accepted":
            steps.append(count)
            count = 0
    return steps + ([count] if count else [])


def test_requests_are_served_in_the_order_they_came(make_llm, watch):
    llm = make_llm(max_num_seqs=1)
    passes = watch(llm)
    llm.generate(PROMPTS, replace(GREEDY, max_tokens=2))
    starts = [segments[0].chain for segments in passes if segments[0].prefix == 0]
    assert starts == [len(prompt) for prompt in PROMPTS]


def test_ending_requests_that_wait_looks_at_no_others(make_llm, plain, monkeypatch):
    """However many wait, one that leaves costs the same; those that stay keep their order."""
    llm = make_llm(max_num_seqs=1)
    groups = [llm._make(PROMPTS[index % 5], GREEDY) for index in range(200)]
    for group in groups:
        llm._add(group)
    requests = [group.requests[0] for group in groups]
    compared = []
    with monkeypatch.context() as patch:
        patch.setattr(
            Request,
            "__eq__",
            lambda one, other: compared.append(one) or one is other,
            raising=False,
        )
        llm.engine.abort(reversed(requests[100:]))
        for request in requests[99:1:-1]:
            llm.engine.abort([request])
    assert len(compared) <= 200
    assert list(llm.engine.scheduler.waiting) == requests[:2]
    while not requests[1].finished:
        llm.engine.step()
    assert requests[0].last_token_at < requests[1].first_token_at
    outputs = [list(group.output(0).token_ids) for group in groups[:2]]
    assert outputs == plain(GREEDY)[:2]
