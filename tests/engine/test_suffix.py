"""The suffix drafter in the engine: it changes nothing, finds what was said, and forgets what it
should.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from foredraft import LLM, RequestOptions, SamplingParams
from foredraft.drafters.suffix import SuffixDrafter
from foredraft.testing.models import tiny_model

from .conftest import GREEDY, PROMPTS, SEEDED
from .test_law import LENGTH, VOCAB, chi_square, enumerate_law, sampled
from .test_preemption import gib, watch_preemptions

BOTH = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "coupled"])
SHAPES = pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
# Drafts as often and as long as can be, so that much is rejected.
EAGER = {"suffix_decoding_min_token_prob": 0.0, "suffix_decoding_max_spec_factor": 50}


class CheckedSuffix(SuffixDrafter):
    """Checks itself after every step, and keeps what it was told of every request."""

    def observe(self, results) -> None:
        super().observe(results)
        self.check_integrity()

    def release(self, request_id) -> None:
        super().release(request_id)
        self.check_integrity()


def ids(outputs):
    return [list(output.token_ids) for output in outputs]


def held(drafter: SuffixDrafter) -> list[list[int]]:
    """The texts of all past responses, in order of last use."""
    cache = drafter.responses
    return [cache._indexes[salt].text(text) for salt, text in cache._responses]


@BOTH
@SHAPES
@pytest.mark.parametrize("width", [1, 3, 8])
def test_suffix_changes_nothing(make_llm, plain, params, tree, width):
    drafter = CheckedSuffix(suffix_decoding_tree=tree, **EAGER)
    llm = make_llm(drafter, width)
    for _ in range(2):  # the second time from past responses
        assert ids(llm.generate(PROMPTS, params)) == plain(params)
    assert not drafter._states


@BOTH
@SHAPES
def test_a_small_pool_and_mixed_steps_change_nothing(make_llm, plain, target, params, tree):
    drafter = CheckedSuffix(suffix_decoding_tree=tree, **EAGER)
    llm = make_llm(drafter, 6, kv_cache_gib=gib(14, target), prefill_chunk_size=3)
    preempted = watch_preemptions(llm)
    assert ids(llm.generate(PROMPTS * 3, params)) == plain(params) * 3
    assert preempted
    assert not drafter._states
    assert drafter.responses.num_responses == 15, "a preempted response was entered twice"
    assert_only_committed(drafter, plain(params) * 3)


def assert_only_committed(drafter, outputs) -> None:
    """Every text is the end of its prompt and the response as it was given, nothing rejected."""
    wanted = sorted([*p, *out] for p, out in zip(PROMPTS * 3, outputs, strict=True))
    for text, whole in zip(sorted(held(drafter)), wanted, strict=True):
        # What is said after a preemption without the drafter's being asked again, it isn't told.
        assert text == whole[: len(text)]
        assert len(whole) - len(text) <= 7


@SHAPES
def test_penalties_and_stops_change_nothing(make_llm, plain, tree):
    params = SamplingParams(
        temperature=0.8, seed=4, max_tokens=24, min_tokens=6, ignore_eos=False,
        presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.2, stop_token_ids=[5, 9],
        logit_bias={3: 2.0}, top_p=0.9,
    )  # fmt: skip
    drafter = CheckedSuffix(suffix_decoding_tree=tree, **EAGER)
    llm = make_llm(drafter, 5)
    for _ in range(2):
        assert ids(llm.generate(PROMPTS, params)) == plain(params)


@BOTH
@SHAPES
def test_completions_of_one_prompt_learn_from_each_other_and_change_nothing(make_llm, params, tree):
    three = replace(params, n=3)
    want = make_llm().generate(PROMPTS, three)
    llm = make_llm(CheckedSuffix(suffix_decoding_tree=tree, **EAGER), 5)
    got = llm.generate(PROMPTS, three)
    assert [[o.token_ids for o in each.outputs] for each in got] == [
        [o.token_ids for o in each.outputs] for each in want
    ]


@pytest.mark.parametrize(
    ("rule", "tree"), [("standard", False), ("standard", True), ("block", False)]
)
def test_sampled_sequences_follow_the_enumerated_law(rule, tree):
    """Rejection with drafts that other requests' samples made."""
    small = tiny_model(seed=3, vocab_size=VOCAB)
    drafter = SuffixDrafter(suffix_decoding_tree=tree, **EAGER)
    config = {"num_speculative_tokens": 2, "rejection_sample_method": rule}
    sizes = {"max_num_seqs": 128, "max_num_batched_tokens": 512, "page_size": 8}
    llm = LLM(small, drafter=drafter, speculative_config=config, seed=2024, **sizes)
    params = SamplingParams(temperature=0.8, max_tokens=LENGTH, ignore_eos=True)
    observed, drafted = sampled(llm, 2500, params)
    assert drafted > 2500
    assert chi_square(observed, enumerate_law(small, 0.8)) >= 1e-3


def test_a_request_seen_before_is_answered_from_the_response(make_llm, plain):
    drafter = SuffixDrafter()
    llm = make_llm(drafter, 8)
    first, again = (llm.generate([PROMPTS[4]], GREEDY)[0].metrics for _ in range(2))
    assert again.num_steps < first.num_steps
    assert again.speculative_decoding.draft_acceptance_rate == 1.0
    assert again.num_steps <= 5  # 23 tokens, up to 9 a step; the first drafts are short


def test_without_past_responses_nothing_is_kept(make_llm):
    llm = make_llm(SuffixDrafter(suffix_decoding_max_cached_requests=0), 8)
    first, again = (llm.generate([PROMPTS[4]], GREEDY)[0].metrics for _ in range(2))
    assert again.num_steps == first.num_steps
    assert llm.engine.drafter.responses is None


def test_tenants_are_not_mixed(make_llm):
    """A salt's request never sees what another salt's was told."""
    llm = make_llm(SuffixDrafter(), 8)

    def steps(salt: str) -> int:
        options = RequestOptions(cache_salt=salt)
        return llm.generate([PROMPTS[4]], GREEDY, options=options)[0].metrics.num_steps

    alone = steps("a")
    assert steps("b") == alone
    assert steps("") == alone
    assert steps("a") < alone
    assert steps("b") < alone


def test_an_aborted_request_leaves_what_it_said_and_no_state(make_llm, plain):
    drafter = CheckedSuffix(**EAGER)
    llm = make_llm(drafter, 3)
    stream = llm.stream(PROMPTS[0], GREEDY)
    for _ in range(4):
        next(stream)
    stream.close()
    assert not drafter._states
    (text,) = held(drafter)
    whole = [*PROMPTS[0], *plain(GREEDY, [PROMPTS[0]])[0]]
    assert text == whole[: len(text)]
    assert len(text) > len(PROMPTS[0])


def test_bounds_hold_while_requests_run(make_llm, plain):
    """So few tokens that running requests push one another out."""
    for most in (1, 30, 70):
        drafter = CheckedSuffix(suffix_decoding_max_cached_tokens=most, **EAGER)
        llm = make_llm(drafter, 4)
        options = [RequestOptions(cache_salt=salt) for salt in "abcab"]
        assert ids(llm.generate(PROMPTS, GREEDY, options=options)) == plain(GREEDY)
        assert drafter.responses.num_tokens <= most
