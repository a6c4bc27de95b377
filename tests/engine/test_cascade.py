"""A cascade: what the draft model hands on is its own, whoever guessed; and the text is the
target's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foredraft import LLM, ConfigError, SamplingParams
from foredraft.drafters.cascade import CascadeDrafter
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.interface import Capabilities, Draft
from foredraft.drafters.staged_growth import cut_depth
from foredraft.testing import tiny_model
from foredraft.testing.drafters import RepeatDrafter, RoutingDrafter, ScriptedDrafter, TreeDrafter
from foredraft.testing.models import target_logits
from foredraft.testing.pairs import tiny_noisy_pair

from .conftest import PROMPTS
from .pair_rig import (
    BOTH,
    DRAFT,
    TARGET,
    alone,
    check_empty,
    check_nothing_changes,
    check_nothing_changes_where_pages_run_short,
    few_pages,
    ids,
    speculating_pair,
)
from .test_draft_model_trees import asked, drafted
from .test_law import LENGTH, PROMPT, VOCAB, chi_square, enumerate_law
from .test_rules import SAMPLED, small, speculating
from .test_trees import PROCESSORS

__all__ = ["small"]  # a fixture

GUESSERS = {
    "chain": {"method": "ngram", "prompt_lookup_min": 1},
    "tree": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_num_matches": 3},
    "learning": {"method": "recycling"},
}
ALL = pytest.mark.parametrize("guesser", GUESSERS)


def llm_of(guesser, width=6, target=TARGET, draft=DRAFT, **options):
    config = {"method": "cascade", "model": draft, "num_speculative_tokens": width}
    config["drafter"] = GUESSERS[guesser]
    return speculating_pair(config, target, **options)


@ALL
@BOTH
@pytest.mark.parametrize("width", [1, 6])
def test_it_changes_nothing(guesser, params, width):
    llm = llm_of(guesser, width)
    check_nothing_changes(llm, params)
    check_empty(llm)


@ALL
@BOTH
def test_few_pages_chunks_and_processors_change_nothing(guesser, params):
    asked = PROCESSORS["penalties"] | PROCESSORS["bias"] | PROCESSORS["truncated"]
    llm = llm_of(guesser, **few_pages(11))
    check_nothing_changes_where_pages_run_short(llm, params, max_tokens=16, **asked)
    check_empty(llm)


@BOTH
def test_the_end_of_the_draft_models_context_and_other_drafters_change_nothing(params):
    _, draft = tiny_noisy_pair(1, noise=0.1, vocab_size=32, draft_max_positions=16)
    cascade = CascadeDrafter(draft, GUESSERS["tree"], TARGET)
    other = RepeatDrafter(7)
    drafter = RoutingDrafter(
        lambda r: cascade if len(r.tokens) % 2 else other, cascade.capabilities
    )
    config = {"num_speculative_tokens": 5}
    llm = LLM(TARGET, drafter=drafter, speculative_config=config, seed=5, page_size=4)
    assert ids(llm.generate(PROMPTS, params)) == alone(params)


@BOTH
@pytest.mark.parametrize("guesser", ["chain", "tree"])
def test_the_target_as_its_own_draft_model_is_always_right(params, guesser):
    """One lost position in the cache would show: accepted guesses lie where they are read."""
    target = tiny_model(seed=4, vocab_size=32)
    llm = llm_of(guesser, 5, target, target)
    for output in llm.generate(PROMPTS, replace(params, max_tokens=80)):
        assert output.metrics.speculative_decoding.draft_acceptance_rate == 1.0
    check_empty(llm)


class Guess(ScriptedDrafter):
    """The same tokens always: a chain, or siblings with a chain below one of them."""

    capabilities = Capabilities(tree=True)

    def __init__(self, tree=False):
        self.tree = tree

    def draft(self, request):
        tokens = [2, 4, 4, 1, 3][: request.max_nodes]
        return (
            Draft(tuple(tokens), (-1, -1, 1, 2, 0)[: len(tokens)])
            if self.tree
            else Draft.chain(tokens)
        )


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_what_is_handed_on_is_what_the_model_alone_would_draft(small, tree):
    """Greedy and with the target's noise: token for token, with processors too."""
    for params in (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8, top_k=3, repetition_penalty=1.4),
        SamplingParams(temperature=0.0, frequency_penalty=2.0),
    ):
        for seed in range(5):
            fields = {"max_nodes": 5, "sampling": params, "seed": seed, "coupled": True}
            own = drafted(DraftModelDrafter(small, small), asked(small, **fields))
            cascade = CascadeDrafter(small, Guess(tree), small)
            staged = drafted(cascade, asked(small, **fields))
            assert (staged.tokens, staged.parents) == (own.tokens, own.parents)
            assert staged.probs is None


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_what_is_drawn_obeys_the_models_law(small, tree):
    """Sequences of three handed on follow q; and the laws that are told are those of q."""
    drafter = CascadeDrafter(small, Guess(tree), small)
    params = SamplingParams(temperature=0.8)
    logits = target_logits(small)
    observed = [0] * VOCAB**LENGTH
    for seed in range(500):
        draft = drafted(drafter, asked(small, PROMPT, max_nodes=LENGTH, sampling=params, seed=seed))
        observed[sum(t * VOCAB**i for i, t in enumerate(reversed(draft.tokens)))] += 1
        if seed % 100 == 0:
            for i, law in enumerate(draft.probs):
                row = logits((*PROMPT, *draft.tokens[:i]))
                torch.testing.assert_close(law, torch.softmax(row / 0.8, dim=-1))
    assert chi_square(observed, enumerate_law(small, 0.8)) >= 1e-3


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_the_law_is_the_targets(small, rule):
    draft = tiny_model(seed=8, vocab_size=VOCAB, num_layers=1, sharpness=1.0)
    guesses = TreeDrafter(RepeatDrafter(2), RepeatDrafter(5))
    llm = speculating(small, CascadeDrafter(draft, guesses, small), rule, width=4)
    observed = [0] * VOCAB**LENGTH
    accepted = 0
    for output in llm.generate([PROMPT] * 500, SAMPLED):
        accepted += output.metrics.speculative_decoding.num_accepted_draft_tokens
        observed[sum(t * VOCAB**i for i, t in enumerate(reversed(output.token_ids)))] += 1
    assert accepted > 100
    assert chi_square(observed, enumerate_law(small, 0.8)) >= 1e-3


def test_right_guesses_spare_the_model_passes(small):
    class Counting:
        def __init__(self, model):
            self.model, self.passes = model, 0

        def __getattr__(self, name):
            return getattr(self.model, name)

        def run(self, batch, cache):
            self.passes += 1
            return self.model.run(batch, cache)

    own = DraftModelDrafter(small, small)
    tokens = list(drafted(own, asked(small, max_nodes=5)).tokens)

    class Right(ScriptedDrafter):
        def draft(self, request):
            return Draft.chain(tokens[: request.max_nodes])

    for inner, passes in ((Right(), 1), (RepeatDrafter((tokens[0] + 1) % VOCAB), 5)):
        counting = Counting(small.model)
        drafter = CascadeDrafter(replace(small, model=counting), inner, small)
        assert list(drafted(drafter, asked(small, max_nodes=5)).tokens) == tokens
        assert counting.passes == passes


def test_the_rule_of_what_pays_looks_at_what_is_kept(small):
    drafter = CascadeDrafter(small, Guess(), small)
    whole = drafted(drafter, asked(small, max_nodes=5, least_path=(0.0,) * 5))
    assert len(whole.tokens) == len(whole.confidence) == 5
    value = whole.confidence[0] * whole.confidence[1]
    cut = drafted(drafter, asked(small, max_nodes=5, least_path=(0, 0, value * 1.01, 1, 1)))
    assert cut.tokens == whole.tokens[:2]
    unsure = min(whole.confidence[:4])
    cut = drafted(drafter, asked(small, max_nodes=5, confidence_threshold=unsure * 1.01))
    first = next(i for i, each in enumerate(whole.confidence) if each < unsure * 1.01)
    assert cut.tokens == whole.tokens[: first + 1]


def test_a_row_without_a_token_ends_the_draft_there(small):
    drafter = CascadeDrafter(small, Guess(), small)
    params = SamplingParams(
        temperature=0.0, allowed_token_ids=[2], stop_token_ids=[2], min_tokens=3
    )
    request = asked(small, max_nodes=5, sampling=params)
    sampler = type(request.sampler)(params, VOCAB, frozenset([2]), request.sampler._row_math)
    assert drafted(drafter, request._replace(sampler=sampler)).tokens == ()


def test_guesses_are_cut_to_what_may_be_verified():
    draft = Draft((5, 6, 7, 8, 9), (-1, 0, 1, -1, 3), verify=(True, True, True, False, False))
    assert cut_depth(draft, 2) == Draft((5, 6), (-1, 0))
    assert cut_depth(replace(draft, verify=None), 1) == Draft((5, 8), (-1, -1))
    assert cut_depth(draft, 0) == Draft()


def test_mistakes_are_named(small):
    drawing = {"method": "draft_model", "model": small}
    with pytest.raises(ConfigError, match="drafter: a cascade's drafter must draft without a law"):
        CascadeDrafter(small, drawing, small)
    with pytest.raises(ConfigError, match="without a cache of its own"):
        CascadeDrafter(small, {**drawing, "draft_sample_method": "greedy"}, small)
    with pytest.raises(ConfigError, match="drafter: unknown option 'prompt_lookup'"):
        CascadeDrafter(small, {"method": "ngram", "prompt_lookup": 3}, small)
