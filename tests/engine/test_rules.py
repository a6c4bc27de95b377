"""`rejection_sample_method`: each rule in the engine, its law, its refusals, its label."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foredraft import LLM, ConfigError, SamplingParams
from foredraft.engine.drafting import DrafterError
from foredraft.kernels.interface import Segment
from foredraft.models.decoder import new_cache
from foredraft.models.interface import FlatBatch
from foredraft.testing.drafters import RepeatDrafter, SkewedDrafter, TreeDrafter
from foredraft.testing.models import tiny_model
from foredraft.testing.sampled_trees import SkewedTreeDrafter
from foredraft.testing.siblings import SIBLING_LAWS, without_replacement

from .conftest import GREEDY, PROMPTS, SEEDED
from .test_law import LENGTH, PROMPT, VOCAB, chi_square, enumerate_law, skewed_law

SAMPLED = SamplingParams(temperature=0.8, max_tokens=LENGTH, ignore_eos=True)
TREE = (-1, -1, 0, 0, 1)


def speculating(model, drafter, rule, width=5, **config):
    config |= {"num_speculative_tokens": width, "rejection_sample_method": rule}
    sizes = {"max_num_seqs": 128, "max_num_batched_tokens": 1024, "page_size": 8}
    return LLM(model, drafter=drafter, speculative_config=config, seed=11, **sizes)


@pytest.fixture(scope="module")
def small():
    return tiny_model(seed=3, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        *(
            (SkewedTreeDrafter(skewed_law, TREE, each), "standard")
            for each in SIBLING_LAWS.values()
        ),
        (SkewedTreeDrafter(skewed_law, TREE), "coupled"),
        (SkewedDrafter(skewed_law), "block"),
    ],
    ids=[*SIBLING_LAWS, "coupled tree", "block"],
)
def test_sampled_sequences_follow_the_enumerated_law(small, drafter, rule):
    llm = speculating(small, drafter, rule)
    observed = [0] * VOCAB**LENGTH
    accepted = 0
    for output in llm.generate([PROMPT] * 1_000, SAMPLED):
        accepted += output.metrics.speculative_decoding.num_accepted_draft_tokens
        assert not output.metrics.speculative_decoding.lossy
        observed[sum(t * VOCAB**i for i, t in enumerate(reversed(output.token_ids)))] += 1
    assert accepted > 500
    assert chi_square(observed, enumerate_law(small, 0.8)) >= 1e-3


def test_siblings_that_share_the_targets_noise_change_nothing(make_llm, plain):
    """The best of log q + G, all of a position with one noise vector: the seeded plain output."""

    def law(context):
        weights = torch.arange(1, 33, dtype=torch.float64).roll(int(context[-1]) + len(context))
        return weights / weights.sum()

    llm = make_llm(SkewedTreeDrafter(law, (-1, -1, -1, 0, 0, 1)), 6)
    outputs = llm.generate(PROMPTS, SEEDED)
    assert [list(output.token_ids) for output in outputs] == plain(SEEDED)
    assert sum(o.metrics.speculative_decoding.num_accepted_draft_tokens for o in outputs) > 0


def test_the_target_as_its_own_drafter_is_always_accepted(small):
    """Standard and block keep every token of a draft drawn from the target's law (vllm#40149)."""
    law = target_law(small, 0.8)
    for rule in ("standard", "block"):
        llm = speculating(small, SkewedDrafter(law), rule, width=2)
        for output in llm.generate([PROMPT] * 50, SAMPLED):
            assert output.metrics.speculative_decoding.draft_acceptance_rate == 1.0


def target_law(model, temperature):
    def law(context):
        cache = new_cache(model.config, 1, len(context), model.dtype, model.device)
        batch = FlatBatch(list(context), [Segment(0, len(context), (), [0])], [len(context) - 1])
        row = model.model.run(batch, cache).logits[0]
        return torch.softmax(row.double() / temperature, dim=-1)

    return law


@pytest.mark.parametrize("rule", ["standard", "block", "coupled"])
def test_above_temperature_zero_tokens_are_drawn(small, rule):
    """No rule falls back to the argmax (sglang#39253): 100 seeds give many outputs."""
    llm = speculating(small, RepeatDrafter(2), rule)
    params = [replace(SAMPLED, seed=seed) for seed in range(100)]
    outputs = {tuple(each.token_ids) for each in llm.generate([PROMPT] * 100, params)}
    assert len(outputs) > 10


@pytest.mark.parametrize("rule", ["standard", "block", "typical", "synthetic"])
def test_a_seed_repeats_at_fixed_widths_in_any_company(small, rule):
    config = {"synthetic_acceptance_length": 2.5} if rule == "synthetic" else {}
    params = replace(SAMPLED, seed=5, max_tokens=12)
    alone = speculating(small, SkewedDrafter(skewed_law), rule, 3, **config)
    batch = speculating(small, SkewedDrafter(skewed_law), rule, 3, **config)
    others = [replace(params, seed=seed) for seed in range(20)]
    tokens = list(alone.generate([PROMPT], params)[0].token_ids)
    assert list(batch.generate([PROMPT] * 21, [params, *others])[0].token_ids) == tokens
    assert len({tuple(o.token_ids) for o in alone.generate([PROMPT] * 20, others)}) > 10


def test_lossy_rules_say_so(small):
    """Asked for by name, and marked in the metrics of what they change (vllm#5015)."""

    def lossy(rule, params, **config):
        llm = speculating(small, RepeatDrafter(2), rule, 3, **config)
        return llm.generate([PROMPT], params)[0].metrics.speculative_decoding.lossy

    greedy = replace(SAMPLED, temperature=0.0)
    assert lossy("typical", SAMPLED)
    assert not lossy("typical", greedy)
    assert lossy("synthetic", SAMPLED, synthetic_acceptance_length=2.0)
    assert lossy("synthetic", greedy, synthetic_acceptance_length=2.0)
    for rule in (None, "standard", "block", "coupled"):
        assert not lossy(rule, SAMPLED)
    assert not LLM(small).generate([PROMPT], SAMPLED)[0].metrics.speculative_decoding.lossy


def test_typical_acceptance_at_temperature_zero_is_greedy(make_llm, plain):
    llm = make_llm(RepeatDrafter(2), rule="typical")
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [list(output.token_ids) for output in outputs] == plain(GREEDY)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_synthetic_acceptance_measures_what_was_asked_for(small, temperature):
    params = SamplingParams(temperature=temperature, max_tokens=400, ignore_eos=True)
    always = speculating(small, RepeatDrafter(2), "synthetic", 4, synthetic_acceptance_length=3.0)
    metrics = always.generate([PROMPT], params)[0].metrics.speculative_decoding
    assert metrics.acceptance_histogram[2] >= metrics.num_spec_steps - 1  # the last one may be cut
    rates = [0.8, 0.5, 0.5, 0.1]
    llm = speculating(small, RepeatDrafter(2), "synthetic", 4, synthetic_acceptance_rates=rates)
    metrics = llm.generate([PROMPT], params)[0].metrics.speculative_decoding
    assert metrics.acceptance_by_position == pytest.approx(rates, abs=0.17)  # about 140 steps


def test_a_row_without_a_token_ends_its_request_alone_under_blocks(small):
    impossible = replace(SAMPLED, allowed_token_ids=[3], stop_token_ids=[3], min_tokens=3)
    llm = speculating(small, SkewedDrafter(skewed_law), "block", 3)
    outputs = llm.generate([PROMPT] * 3, [SAMPLED, impossible, SAMPLED])
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert "no token is left" in outputs[1].outputs[0].error


MISTAKES = {
    "must be one of standard, block, coupled, typical, synthetic, got 'strict'": {
        "rejection_sample_method": "strict"
    },
    "needs either synthetic_acceptance_rates or synthetic_acceptance_length, got neither": {
        "rejection_sample_method": "synthetic"
    },
    "got synthetic_acceptance_rates and synthetic_acceptance_length": {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.5, 0.5],
        "synthetic_acceptance_length": 2.0,
    },
    r"that do not rise, got \[0.2, 0.5\]": {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.2, 0.5],
    },
    r"in 0..1 that do not rise, got \[1.5, 0.5\]": {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.5, 0.5],
    },
    "that do not rise, got 0.5": {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": 0.5,
    },
    "must hold 2 numbers, one for each": {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.5],
    },
    "must be a number of 1 or more, got 0.5": {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 0.5,
    },
    "must be in 1..3 with 2 num_speculative_tokens, got 3.5": {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 3.5,
    },
    'synthetic_acceptance_length needs "rejection_sample_method": "synthetic"': {
        "synthetic_acceptance_length": 2.0
    },
    'posterior_alpha needs "rejection_sample_method": "typical"': {"posterior_alpha": 0.3},
    "posterior_threshold must be a number above 0 and at most 1, got 2": {
        "rejection_sample_method": "typical",
        "posterior_threshold": 2,
    },
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_named(small, message):
    config = {"num_speculative_tokens": 2} | MISTAKES[message]
    with pytest.raises(ConfigError, match=message):
        LLM(small, drafter=RepeatDrafter(2), speculative_config=config)


def test_blocks_are_refused_to_a_drafter_of_trees(small):
    drafter = TreeDrafter(RepeatDrafter(1), RepeatDrafter(2))
    with pytest.raises(ConfigError, match=r"this drafter proposes trees: name a \"method\" that"):
        speculating(small, drafter, "block")


def test_a_sampled_tree_needs_a_true_law_of_each_sibling(small):
    """The second sibling's row gives what was drawn before it no mass, but its own token some."""

    class Careless(SkewedTreeDrafter):
        def draft(self, request):
            draft = super().draft(request)
            return draft if draft.probs is None else replace(draft, probs=draft.probs.flip(0))

    llm = speculating(small, Careless(skewed_law, (-1, -1), without_replacement), "standard", 2)
    with pytest.raises(DrafterError, match="probability 0"):
        llm.generate([PROMPT] * 20, SAMPLED)
