"""Law 1, end to end: sequences sampled by the engine follow the target's enumerated law."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy import stats

from foredraft import LLM, SamplingParams
from foredraft.kernels.interface import Segment
from foredraft.models.decoder import new_cache
from foredraft.models.interface import FlatBatch
from foredraft.testing.drafters import RepeatDrafter, SkewedDrafter, TreeDrafter
from foredraft.testing.models import tiny_model

VOCAB, PROMPT, LENGTH = 6, [1, 4, 2], 3
LONGER = 5  # several windows of a tree, so that coins of one step could meet those of the next


@pytest.fixture(scope="module")
def small():
    return tiny_model(seed=3, vocab_size=VOCAB)


def enumerate_law(model, temperature, length=LENGTH, prompt=PROMPT):
    """P of every continuation of `length` tokens, `[V ** length]`."""
    c = model.config
    total = len(prompt) + length
    cache = new_cache(c, 1, total, model.dtype, model.device)
    law = []
    for tail in itertools.product(range(c.vocab_size), repeat=length):
        tokens = [*prompt, *tail]
        batch = FlatBatch(tokens, [Segment(0, total, (), [0])], list(range(total)))
        rows = torch.softmax(model.model.run(batch, cache).logits.double() / temperature, dim=-1)
        p = 1.0
        for i, token in enumerate(tail):
            p *= float(rows[len(prompt) - 1 + i, token])
        law.append(p)
    return law


def sampled(llm, runs, params):
    """How often each continuation came, `[V ** LENGTH]`, and how many tokens were drafted."""
    observed = [0] * VOCAB**LENGTH
    drafted = 0
    for output in llm.generate([PROMPT] * runs, params):
        observed[sum(t * VOCAB**i for i, t in enumerate(reversed(output.token_ids)))] += 1
        drafted += output.metrics.speculative_decoding.num_draft_tokens
    return observed, drafted


def skewed_law(context):
    weights = torch.arange(1, VOCAB + 1, dtype=torch.float64).roll(int(context[-1]) + len(context))
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("drafter", "runs", "rule"),
    [
        (SkewedDrafter(skewed_law), 20_000, "standard"),
        (SkewedDrafter(skewed_law), 4_000, "coupled"),
        (RepeatDrafter(2), 4_000, "standard"),
        (TreeDrafter(RepeatDrafter(2), RepeatDrafter(5)), 4_000, "standard"),
        (None, 4_000, None),
    ],
    ids=["skewed", "skewed-coupled", "one-hot", "tree", "plain"],
)
def test_sampled_sequences_follow_the_enumerated_law(small, drafter, runs, rule):
    config = {"num_speculative_tokens": 2, "rejection_sample_method": rule}
    llm = LLM(
        small,
        drafter=drafter,
        speculative_config=None if drafter is None else config,
        max_num_seqs=128,
        max_num_batched_tokens=512,
        page_size=8,
        seed=2024,
    )
    params = SamplingParams(temperature=0.8, max_tokens=LENGTH, ignore_eos=True)
    observed = [0] * VOCAB**LENGTH
    for output in llm.generate([PROMPT] * runs, params):
        index = 0
        for token in output.token_ids:
            index = index * VOCAB + token
        observed[index] += 1
    p_value = chi_square(observed, enumerate_law(small, 0.8))
    assert p_value >= 1e-3


def test_windows_of_a_tree_do_not_share_coins():
    """A vocabulary of 3 and five tokens: each request passes through several windows."""
    model = tiny_model(seed=9, vocab_size=3, sharpness=0.7)
    drafter = TreeDrafter(RepeatDrafter(0), RepeatDrafter(1), RepeatDrafter(2))
    config = {"num_speculative_tokens": 3, "rejection_sample_method": "standard"}
    sizes = {"max_num_seqs": 128, "max_num_batched_tokens": 512, "page_size": 8}
    llm = LLM(model, drafter=drafter, speculative_config=config, seed=7, **sizes)
    params = SamplingParams(temperature=0.8, max_tokens=LONGER, ignore_eos=True)
    prompt = [token % 3 for token in PROMPT]
    observed = [0] * 3**LONGER
    for output in llm.generate([prompt] * 4000, params):
        observed[sum(t * 3**i for i, t in enumerate(reversed(output.token_ids)))] += 1
    assert chi_square(observed, enumerate_law(model, 0.8, LONGER, prompt)) >= 1e-3


def test_without_a_seed_rejection_is_the_rule():
    """A draft that is drawn from q is accepted with 1 - TV; coupled draws would accept less."""
    model = tiny_model(seed=3, vocab_size=VOCAB)
    accepted = {}
    for rule in (None, "standard", "coupled"):
        config = {"num_speculative_tokens": 2, "rejection_sample_method": rule}
        llm = LLM(model, drafter=SkewedDrafter(skewed_law), speculative_config=config, seed=4)
        params = SamplingParams(temperature=0.8, max_tokens=4, ignore_eos=True)
        outputs = llm.generate([PROMPT] * 300, params)
        accepted[rule] = [tuple(output.token_ids) for output in outputs]
    assert accepted[None] == accepted["standard"] != accepted["coupled"]


def chi_square(observed, law):
    """p-value of the counts under the law, cells with fewer than 5 expected pooled into one."""
    runs = sum(observed)
    cells = sorted(zip(law, observed, strict=True), reverse=True)
    large = [(p * runs, n) for p, n in cells if p * runs >= 5]
    small_expected = runs - sum(e for e, _ in large)
    small_observed = runs - sum(n for _, n in large)
    if small_expected >= 5:
        large.append((small_expected, small_observed))
    expected, counts = zip(*large, strict=True)
    scale = sum(counts) / sum(expected)
    return float(stats.chisquare(counts, [e * scale for e in expected]).pvalue)
