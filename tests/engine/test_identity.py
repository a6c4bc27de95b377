"""Law 3: greedy and coupled output equals plain decoding's, whatever is drafted or batched."""

from __future__ import annotations

import pytest

from foredraft import SamplingParams
from foredraft.testing import target_logits
from foredraft.testing.drafters import (
    EmptyDrafter,
    LiarDrafter,
    RepeatDrafter,
    RoutingDrafter,
    SelfDrafter,
    SkewedDrafter,
    TreeDrafter,
    WrongAtDrafter,
)

from .conftest import GREEDY, PROMPTS, SEEDED

BOTH = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "coupled"])


def ids(outputs):
    return [list(output.token_ids) for output in outputs]


@BOTH
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    "name", ["oracle", "wrong0", "wrong1", "wrong2", "liar", "empty", "repeat"]
)
def test_scripted_drafters_change_nothing(make_llm, plain, oracle, params, width, name):
    known = oracle(params)
    drafter = {
        "oracle": known,
        "wrong0": WrongAtDrafter(known, 0),
        "wrong1": WrongAtDrafter(known, 1),
        "wrong2": WrongAtDrafter(known, 2),
        "liar": LiarDrafter(known),
        "empty": EmptyDrafter(),
        "repeat": RepeatDrafter(7),
    }[name]
    assert ids(make_llm(drafter, width).generate(PROMPTS, params)) == plain(params)


@BOTH
def test_ngram_changes_nothing(make_llm, plain, target, params):
    llm = make_llm(build_ngram(), 5)
    assert ids(llm.generate(PROMPTS, params)) == plain(params)


def build_ngram():
    from foredraft.drafters.ngram import NgramDrafter

    return NgramDrafter(5, prompt_lookup_min=1, prompt_lookup_max=3)


@BOTH
def test_trees_are_verified_along_their_branches(make_llm, plain, oracle, params):
    known = oracle(params)
    drafter = TreeDrafter(LiarDrafter(known), WrongAtDrafter(known, 2), known)
    llm = make_llm(drafter, 9)
    outputs = llm.generate(PROMPTS, params)
    assert ids(outputs) == plain(params)
    # The right branch is the last sibling: its keys and values had to be moved.
    counts = [output.metrics.speculative_decoding for output in outputs]
    assert all(c.num_accepted_draft_tokens > 0 for c in counts)


@BOTH
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_chunks_and_pages_change_nothing(make_llm, plain, oracle, params, chunk, page_size):
    llm = make_llm(oracle(params), 3, prefill_chunk_size=chunk, page_size=page_size)
    assert ids(llm.generate(PROMPTS, params)) == plain(params)


@BOTH
def test_a_mixed_batch_equals_solo_runs(make_llm, plain, oracle, params):
    """Fault 23: oracle, liar, empty, a row that ends this step and a prompt chunk side by side."""
    known = oracle(params)
    kinds = [known, LiarDrafter(known), EmptyDrafter(), WrongAtDrafter(known, 1), known]
    by_prompt = {tuple(p): d for p, d in zip(PROMPTS, kinds, strict=True)}
    drafter = RoutingDrafter(lambda r: by_prompt[tuple(r.tokens[: r.num_prompt_tokens])])
    lengths = [24, 9, 17, 1, 24]
    each = [replace_max(params, n) for n in lengths]
    llm = make_llm(drafter, 4, max_num_batched_tokens=20, prefill_chunk_size=3)
    expected = [out[:n] for out, n in zip(plain(params), lengths, strict=True)]
    assert ids(llm.generate(PROMPTS, each)) == expected


def replace_max(params: SamplingParams, n: int) -> SamplingParams:
    from dataclasses import replace

    return replace(params, max_tokens=n)


@BOTH
def test_a_small_row_budget_only_shrinks_drafts(make_llm, plain, oracle, params):
    llm = make_llm(oracle(params), 6, max_num_seqs=5, max_num_batched_tokens=6)
    assert ids(llm.generate(PROMPTS, params)) == plain(params)


@pytest.mark.parametrize("prompt_length", range(1, 10))
@pytest.mark.parametrize("width", range(1, 6))
def test_every_prompt_length_around_page_borders(make_llm, plain, oracle, prompt_length, width):
    """Fault 18: no draft may run over the slots reserved for it."""
    prompt = [(3 * i + prompt_length) % 31 for i in range(prompt_length)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm = make_llm(oracle(params, [prompt]), width)
    assert ids(llm.generate([prompt], params)) == plain(params, [prompt])


@pytest.mark.parametrize("width", [1, 4, 9])
def test_generation_runs_to_the_last_position_of_the_context(make_llm, plain, oracle, width):
    """Fault 19: drafts near the end of the context neither fail nor change the text."""
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    prompt = PROMPTS[0]
    want = make_llm(max_model_len=30).generate([prompt], params)[0]
    assert len(want.token_ids) == 25
    assert want.finish_reason == "length"
    known = oracle(SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), [prompt])
    got = make_llm(known, width, max_model_len=30).generate([prompt], params)[0]
    assert got.token_ids == want.token_ids
    assert got.finish_reason == "length"


def test_the_self_drafter_is_always_right(make_llm, target):
    """Fault 26: with the target as its own drafter every draft token is accepted."""
    for params in (
        GREEDY,
        SEEDED,
        SamplingParams(temperature=0.9, max_tokens=24, ignore_eos=True),
    ):
        outputs = make_llm(SelfDrafter(target_logits(target)), 4).generate(PROMPTS, params)
        for output in outputs:
            assert output.metrics.speculative_decoding.draft_acceptance_rate == 1.0


def test_the_skewed_drafter_changes_nothing_when_coupled(make_llm, plain, skewed):
    assert ids(make_llm(skewed, 4).generate(PROMPTS, SEEDED)) == plain(SEEDED)


@pytest.fixture
def skewed():
    import torch

    def law(context):
        weights = torch.arange(1, 33, dtype=torch.float64).roll(int(context[-1]))
        return weights / weights.sum()

    return SkewedDrafter(law)


def test_width_zero_runs_no_drafter(make_llm, plain):
    """Law 8."""
    from foredraft.testing.drafters import RaisingDrafter

    llm = make_llm(RaisingDrafter(1), 0)
    assert ids(llm.generate(PROMPTS, GREEDY)) == plain(GREEDY)


def test_a_seed_fixes_the_text_and_seeds_differ(make_llm, oracle):
    """Fault 25: equal seeds agree whatever the width and the batch; different seeds don't."""
    from dataclasses import replace

    known = oracle(SEEDED)
    alone = [list(make_llm().generate([PROMPTS[0]], SEEDED)[0].token_ids)]
    for width in (1, 3):
        together = make_llm(known, width).generate(PROMPTS, SEEDED)
        assert list(together[0].token_ids) == alone[0]
    texts = {
        tuple(make_llm().generate([PROMPTS[0]], replace(SEEDED, seed=seed))[0].token_ids)
        for seed in range(20)
    }
    assert len(texts) == 20
