"""`n > 1`, log-probabilities and penalties: each row of the window is plain decoding's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foredraft import SamplingParams
from foredraft.core.coins import mix
from foredraft.kernels.interface import Segment
from foredraft.models.decoder import new_cache
from foredraft.models.interface import FlatBatch
from foredraft.testing.drafters import LiarDrafter, RepeatDrafter, TreeDrafter, WrongAtDrafter

from .conftest import GREEDY, PROMPTS, SEEDED


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_child_zero_is_the_single_run_and_children_differ(make_llm, oracle, page_size, prompt):
    single = make_llm().generate([prompt], SEEDED)[0]
    many = make_llm(oracle(SEEDED), 3, page_size=page_size).generate(
        [prompt], replace(SEEDED, n=4)
    )[0]
    assert [c.index for c in many.outputs] == [0, 1, 2, 3]
    assert list(many.outputs[0].token_ids) == list(single.token_ids)
    for completion in many.outputs[1:]:
        child = replace(SEEDED, seed=mix(SEEDED.seed, completion.index))
        alone = make_llm().generate([prompt], child)[0]
        assert list(completion.token_ids) == list(alone.token_ids)
    assert len({tuple(c.token_ids) for c in many.outputs}) == 4


def test_completions_share_the_pages_of_their_prompt(make_llm):
    llm = make_llm()
    prompt = PROMPTS[4]
    stream_params = replace(SEEDED, n=3, max_tokens=4)
    used = []
    step = llm.engine.step

    def watched():
        changed = step()
        used.append(llm.engine.pool.num_used)
        return changed

    llm.engine.step = watched
    llm.generate([prompt], stream_params)
    # 16 slots are 4 pages each; 12 of the prompt's 13 positions are shared, which is 3 pages.
    assert max(used) == 4 + 1 + 1
    assert llm.engine.pool.num_used == 0


@pytest.mark.parametrize("width", [1, 3, 6])
def test_logprobs_equal_plain_decoding(make_llm, oracle, width):
    """Fault 37: every emitted token has the raw target's log-probability, from its parent's row."""
    params = replace(GREEDY, logprobs=5)
    want = make_llm().generate(PROMPTS, params)
    known = oracle(GREEDY)
    for drafter in (known, LiarDrafter(known)):
        got = make_llm(drafter, width).generate(PROMPTS, params)
        for w, g in zip(want, got, strict=True):
            assert len(g.logprobs) == len(g.token_ids)
            for a, b in zip(w.logprobs, g.logprobs, strict=True):
                assert a.token_id == b.token_id
                assert a.logprob == pytest.approx(b.logprob, abs=1e-9)
                assert list(a.top) == list(b.top)
                assert a.rank == 1
                assert a.logprob < 0


def test_logprobs_are_the_raw_target_s(make_llm, target, oracle):
    """Temperature, bias and penalties don't change them; the model's own log-softmax does."""
    params = replace(SEEDED, logprobs=0, presence_penalty=1.5, logit_bias={4: 3.0})
    prompt = PROMPTS[0]
    output = make_llm(oracle(SEEDED), 3).generate([prompt], params)[0]
    raw = raw_logprobs(target, prompt + list(output.token_ids))
    for i, entry in enumerate(output.logprobs):
        row = raw[len(prompt) - 1 + i]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-9)
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
        assert not entry.top


def test_prompt_logprobs_are_those_of_the_prompt(make_llm, target):
    prompt = PROMPTS[4]
    for chunk in (None, 1, 5):
        llm = make_llm(RepeatDrafter(3), 2, prefill_chunk_size=chunk)
        output = llm.generate([prompt], replace(GREEDY, prompt_logprobs=2))[0]
        raw = raw_logprobs(target, prompt)
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for position in range(1, len(prompt)):
            entry = output.prompt_logprobs[position]
            assert entry.token_id == prompt[position]
            assert entry.logprob == pytest.approx(
                float(raw[position - 1, prompt[position]]), abs=1e-9
            )
            assert len(entry.top) == 2


def raw_logprobs(target, tokens):
    cache = new_cache(target.config, 1, len(tokens), target.dtype, target.device)
    batch = FlatBatch(tokens, [Segment(0, len(tokens), (), [0])], list(range(len(tokens))))
    return torch.log_softmax(target.model.run(batch, cache).logits.double(), dim=-1)


PENALTIES = [
    {"frequency_penalty": 2.0},
    {"frequency_penalty": -2.0},
    {"presence_penalty": 1.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 1.05, "frequency_penalty": 0.5, "presence_penalty": -0.5},
    {"logit_bias": {5: -100.0, 9: 4.0}},
    {"banned_token_ids": [1, 2, 3]},
    {"allowed_token_ids": list(range(4, 12))},
]


@pytest.mark.parametrize("penalty", PENALTIES, ids=[" ".join(p) for p in PENALTIES])
@pytest.mark.parametrize("base", [GREEDY, SEEDED], ids=["greedy", "coupled"])
def test_penalties_bite_inside_the_window(make_llm, oracle, plain, penalty, base):
    """Faults 29 to 33: row i counts the draft tokens before it; bias and bans hold on every row."""
    params = replace(base, **penalty)
    want = plain(params)
    known = oracle(params)
    tree = TreeDrafter(LiarDrafter(known), RepeatDrafter(9), WrongAtDrafter(known, 2), known)
    for drafter in (known, oracle(base), RepeatDrafter(5), RepeatDrafter(9), tree):
        got = make_llm(drafter, 11).generate(PROMPTS, params)
        assert [list(output.token_ids) for output in got] == want
    emitted = {token for tokens in want for token in tokens}
    assert not emitted & set(penalty.get("banned_token_ids", ()))
    assert emitted <= set(penalty.get("allowed_token_ids", range(32)))


@pytest.mark.parametrize("extra", [{"min_p": 0.5}, {"top_k": 3}, {"top_p": 0.4}])
def test_the_support_holds_on_every_emitted_token(make_llm, target, extra):
    """Fault 33: min_p (and top-k, top-p) apply to every row, not to the bonus token alone."""
    for seed in (3, None):
        params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, seed=seed, **extra)
        for token in (1, 5, 9):
            output = make_llm(RepeatDrafter(token), 4).generate([PROMPTS[1]], params)[0]
            tokens = PROMPTS[1] + list(output.token_ids)
            law = raw_logprobs(target, tokens).exp()
            for i, emitted in enumerate(output.token_ids):
                assert in_support(law[len(PROMPTS[1]) - 1 + i], emitted, **extra)


def in_support(law, token, min_p=0.0, top_k=0, top_p=1.0):
    order = torch.sort(law, descending=True, stable=True)
    rank = int((order.indices == token).nonzero())
    if top_k:
        return rank < top_k
    if top_p < 1:
        return float(order.values[:rank].sum()) < top_p
    return float(law[token]) >= min_p * float(law.max())


def test_sampling_is_not_greedy_above_temperature_zero(make_llm):
    """Fault 9: two hundred unseeded runs give more than one text."""
    llm = make_llm(RepeatDrafter(5), 2)
    params = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True, n=200)
    outputs = llm.generate([PROMPTS[0]], params)[0].outputs
    assert len({tuple(c.token_ids) for c in outputs}) > 20
