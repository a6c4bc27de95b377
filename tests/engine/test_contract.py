"""Drafters and taps are foreign code: what they break is named, and leaves no trace in requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from foredraft import LLM, ConfigError, InvalidRequest, SamplingParams
from foredraft.drafters.interface import Capabilities, Draft
from foredraft.engine.drafting import DrafterError, TokenView
from foredraft.testing.drafters import EmptyDrafter, FixedDrafter, RaisingDrafter, RepeatDrafter

from .conftest import GREEDY, PROMPTS, SEEDED

PROBS = torch.full((1, 32), 1 / 32, dtype=torch.float64)


def fixed(draft, **capabilities):
    drafter = FixedDrafter(draft)
    drafter.capabilities = Capabilities(**({"deterministic": False, "tree": True} | capabilities))
    return drafter


def spoilt(row):
    probs = PROBS.clone()
    probs[0] = torch.tensor(row, dtype=torch.float64)
    return probs


SAMPLED = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
ONE_HOT = [1.0] + [0.0] * 31


class Unreadable(Sequence):
    """Says how many it holds, and fails when they are asked for."""

    def __len__(self):
        return 1

    def __getitem__(self, at):
        raise OSError("as scripted")


BROKEN = {
    "outside the vocabulary": Draft((40,), (-1,)),
    "1 parents": Draft((1, 2), (-1,)),
    "no tree": Draft((1, 2), (1, -1)),
    "9 nodes, 3 were asked for": Draft(tuple(range(9)), tuple(range(-1, 8))),
    "tokens must be integers, got .1.5": Draft((1.5,), (-1,)),
    "tokens must be integers, got 7": Draft(7, (-1,)),
    "parents must be integers": Draft((1,), (None,)),
    "no Draft": [1, 2],
    "shape .1, 32., got shape .2, 32.": Draft((1,), (-1,), PROBS.repeat(2, 1)),
    r"shape .1, 32., got \[": Draft((1,), (-1,), [0.5]),
    "no law: rows": Draft((1,), (-1,), PROBS * 3),
    "no law": Draft((1,), (-1,), spoilt([float("nan")] * 32)),
    "no law: rows must be 0 or more": Draft((1,), (-1,), spoilt([2.0, -1.0] + [0.0] * 30)),
    "probability 0": Draft((1,), (-1,), spoilt(ONE_HOT)),
    "can't be read: OSError: as scripted": Draft(Unreadable(), (-1,)),
    "can't be read: RuntimeError": Draft((1,), (-1,), PROBS.to("meta")),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_draft_that_breaks_the_contract_is_named_and_leaves_no_trace(make_llm, plain, message):
    llm = make_llm(fixed(BROKEN[message]), 3)
    with pytest.raises(DrafterError, match=message):
        llm.generate([PROMPTS[0]], SAMPLED)
    assert_empty(llm)


def test_drafts_that_cannot_be_read_are_named(make_llm):
    drafter = EmptyDrafter()
    drafter.propose = lambda requests: Unreadable()
    with pytest.raises(DrafterError, match="can't be read: OSError: as scripted"):
        make_llm(drafter, 3).generate([PROMPTS[0]], GREEDY)


@pytest.mark.parametrize(
    "drafts",
    [None, [], 5, (Draft() for _ in range(1))],
    ids=["nothing", "too few", "a number", "a generator"],
)
def test_a_drafter_must_give_one_draft_a_request(make_llm, drafts):
    drafter = EmptyDrafter()
    drafter.propose = lambda requests: drafts
    with pytest.raises(DrafterError, match="for 1 requests"):
        make_llm(drafter, 3).generate([PROMPTS[0]], GREEDY)


def test_capabilities_bind_the_drafter(make_llm):
    siblings = Draft((1, 2), (-1, -1))
    with pytest.raises(DrafterError, match="tree=False"):
        make_llm(fixed(siblings, tree=False), 3).generate([PROMPTS[0]], GREEDY)
    sampled = Draft((1,), (-1,), PROBS)
    with pytest.raises(DrafterError, match="deterministic"):
        make_llm(fixed(sampled, deterministic=True), 3).generate([PROMPTS[0]], GREEDY)
    silent = fixed(Draft(), num_speculative_tokens=0)
    assert LLM(make_llm().loaded, drafter=silent).num_speculative_tokens == 0


def test_integers_of_any_kind_are_ids(make_llm, plain):
    for tokens in (np.array([5, 6]), torch.tensor([5, 6]), [np.int64(5), 6]):

        class Array(EmptyDrafter):
            def draft(self, request, tokens=tokens):
                count = min(request.max_nodes, 2)
                return Draft(tokens[:count], np.array([-1, 0])[:count])

        llm = make_llm(Array(), 3)
        output = llm.generate([PROMPTS[0]], replace(GREEDY, max_tokens=12))[0]
        assert list(output.token_ids) == plain(GREEDY)[0][:12]
        assert all(type(token) is int for token in output.token_ids)


def test_a_drafter_cannot_change_the_tokens_it_is_shown(make_llm, plain):
    class Meddler(EmptyDrafter):
        def draft(self, request):
            with pytest.raises((TypeError, AttributeError)):
                request.tokens[0] = 7
            with pytest.raises(AttributeError):
                request.tokens.append(7)
            return Draft()

    outputs = make_llm(Meddler(), 3).generate(PROMPTS, GREEDY)
    assert [list(output.token_ids) for output in outputs] == plain(GREEDY)


def test_a_view_keeps_its_length_and_reads_as_a_sequence():
    tokens = [1, 2, 3]
    view = TokenView(tokens, len(tokens))
    tokens.append(4)
    assert list(view) == view[:] == [1, 2, 3]
    assert (view[-1], view[0], view[1:9], view[-2:], len(view)) == (3, 1, [2, 3], [2, 3], 3)
    for at in (3, -4):
        with pytest.raises(IndexError):
            view[at]


@pytest.mark.parametrize("call", [1, 3, 6])
def test_a_failure_in_observe_or_a_tap_comes_after_a_whole_commit(make_llm, plain, call):
    """The step that was told of is complete: going on gives what plain decoding gives."""

    class Failing(RepeatDrafter):
        calls = 0

        def observe(self, results):
            self.calls += 1
            if self.calls == call:
                raise RuntimeError("as scripted")

    taps = []

    def tap(*_):
        taps.append(None)
        if len(taps) == call:
            raise RuntimeError("as scripted")

    for llm in (make_llm(Failing(7), 3), make_llm(RepeatDrafter(7), 3, tap=tap)):
        groups = [llm._make(prompt, GREEDY) for prompt in PROMPTS]
        for group in groups:
            llm._add(group)
        failures = 0
        while not all(group.finished for group in groups):
            try:
                llm.engine.step()
            except RuntimeError:
                failures += 1
                llm.engine.check_integrity()
        assert failures == 1
        assert [list(g.output(3).token_ids) for g in groups] == plain(GREEDY)
        assert_empty(llm)


def test_a_failure_in_release_keeps_no_page(make_llm, plain):
    class Failing(EmptyDrafter):
        def release(self, request_id):
            raise RuntimeError("as scripted")

    llm = make_llm(Failing(), 3)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="as scripted"):
            llm.generate(PROMPTS, GREEDY)
        assert_empty(llm)
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    with pytest.raises(RuntimeError, match="as scripted"):
        stream.close()
    assert_empty(llm)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_completions_share_their_prompt_even_if_the_drafter_fails_in_between(make_llm, call):
    three = replace(SEEDED, n=3)
    want = [list(o.token_ids) for o in make_llm().generate([PROMPTS[1]], three)[0].outputs]
    llm = make_llm(RaisingDrafter(call, EmptyDrafter()), 3)
    group = llm._make(PROMPTS[1], three)
    llm._add(group)
    while not group.finished:
        try:
            llm.engine.step()
        except RuntimeError:
            continue
    assert [list(o.token_ids) for o in group.output(3).outputs] == want


def test_a_request_of_many_completions_does_not_hold_up_others(make_llm):
    llm = make_llm(prefill_chunk_size=1)
    many = llm._make(PROMPTS[4], replace(SEEDED, n=2))
    short = llm._make([3], replace(GREEDY, max_tokens=2))
    for group in (many, short):
        llm._add(group)
    for _ in range(2):
        llm.engine.step()
    assert short.finished


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"bogus": 1}},
        {"speculative_config": {"method": "ngram"}},
        {"drafter": 5},
        {"tap": 5},
        {"seed": "x"},
        {"seed": 1.5},
        {"kv_cache_gib": "2"},
        {"kv_cache_gib": 1, "memory": 1},
        {"kv_cache_gib": float("inf")},
        {"kv_dtype": "int4"},
        {"dtype": "float16"},
        {"num_threads": 3},
        {"kv_dtype": 5},
        {"drafter": None, "speculative_config": {"method": "ngram", "prompt_lookup_max": 20_000}},
        {"page_size": 0},
        {"max_model_len": 10_000},
        {"max_num_batched_tokens": 3, "max_num_seqs": 4},
    ],
    ids=str,
)
def test_settings_are_honoured_or_refused(target, options):
    with pytest.raises(ConfigError):
        LLM(target, **({"drafter": EmptyDrafter()} | options))


def test_memory_without_end_is_no_more_than_can_be_used(target):
    config = LLM(target, kv_cache_gib=1e300).config
    assert config.num_pages == config.max_num_seqs * config.pages_for(config.max_model_len)


@pytest.mark.parametrize(
    "prompts",
    [
        None,
        5,
        [1.0],
        [["a"]],
        [None],
        [[1, None]],
        {"prompt": "hi"},
        [{"prompt": "hi"}],
        {"a"},
        b"hi",
        [{3, 4}],
    ],
    ids=str,
)
def test_prompts_of_the_wrong_type_are_refused(make_llm, prompts):
    with pytest.raises(InvalidRequest):
        make_llm().generate(prompts, GREEDY)


@pytest.mark.parametrize("text", ["\ud800x", "a\udfff"], ids=ascii)
def test_half_a_surrogate_pair_is_no_text(make_llm, text):
    llm = make_llm()
    for call in (
        lambda: llm.generate(text, GREEDY),
        lambda: llm.stream(text, GREEDY),
        lambda: llm.chat([{"role": "user", "content": text}], GREEDY),
    ):
        with pytest.raises(InvalidRequest, match="half of a surrogate pair") as caught:
            call()
        assert "\n" not in str(caught.value)
        str(caught.value).encode()


USER = {"role": "user", "content": "hi"}


NO_MESSAGES = [
    None, 3, "hi", {}, USER, {3}, iter([USER]), [3], ["hi"], [None], [[]], [[USER], USER],
    [USER, [USER]], [USER, None], [{"role": "user"}], [{1: 2, "z": 3} | USER],
]  # fmt: skip


@pytest.mark.parametrize("messages", NO_MESSAGES, ids=range(len(NO_MESSAGES)))
def test_messages_of_the_wrong_type_are_refused(make_llm, messages):
    with pytest.raises(InvalidRequest) as caught:
        make_llm().chat(messages, GREEDY)
    assert "\n" not in str(caught.value)


def test_one_conversation_or_many(make_llm):
    llm = make_llm()
    single = llm.chat((USER,), GREEDY)
    many = llm.chat([[USER], [USER]], GREEDY)
    assert [output.text for output in many] == [single[0].text] * 2


def test_prompts_may_be_arrays(make_llm, plain):
    for prompt in (np.array(PROMPTS[0]), torch.tensor(PROMPTS[0]), tuple(PROMPTS[0])):
        assert list(make_llm().generate(prompt, GREEDY)[0].token_ids) == plain(GREEDY)[0]


@pytest.mark.parametrize("params", [{"temperature": 0}, [None], 5], ids=str)
def test_parameters_of_the_wrong_type_are_refused(make_llm, params):
    for call in (make_llm().generate, make_llm().stream):
        with pytest.raises(InvalidRequest, match="must be SamplingParams"):
            call([PROMPTS[0]] if call.__name__ == "generate" else PROMPTS[0], params)


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": [1]},
        {"allowed_token_ids": 5},
        {"stop": 5},
        {"logit_bias": {3: 1e39}},
        {"repetition_penalty": 1e-45},
        {"temperature": 1e39},
        {"n": 10**9},
    ],
    ids=str,
)
def test_fields_out_of_range_are_refused(fields):
    with pytest.raises(InvalidRequest):
        SamplingParams(**fields)


def test_a_seed_may_be_any_integer(make_llm, plain):
    params = replace(SEEDED, seed=np.int64(SEEDED.seed))
    assert list(make_llm().generate(PROMPTS[0], params)[0].token_ids) == plain(SEEDED)[0]


def assert_empty(llm):
    llm.engine.check_integrity()
    assert llm.engine.pool.num_used == 0
    assert not llm.engine.has_work
