"""Trees of a draft model: the text is the target's, laws are true, the best nodes are found, and
the cache holds what a fresh one computes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from foredraft import LLM, ConfigError, SamplingParams
from foredraft.core.trees import topology
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.models.decoder import new_cache
from foredraft.testing import draft_request, tiny_model
from foredraft.testing.drafters import RecordingDrafter, RepeatDrafter, RoutingDrafter
from foredraft.testing.models import target_logits
from foredraft.testing.pairs import tiny_noisy_pair

from .conftest import GREEDY, PROMPTS
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
from .test_law import LENGTH, PROMPT, VOCAB, chi_square, enumerate_law
from .test_rules import SAMPLED, small, speculating
from .test_trees import PROCESSORS

__all__ = ["small"]  # a fixture

KINDS = {
    "top_k": {"draft_tree": "top_k"},
    "top_k greedy": {"draft_tree": "top_k", "draft_sample_method": "greedy"},
    "sampled": {"draft_tree": "sampled", "draft_tree_branching": [2, 2, 1]},
}
ALL = pytest.mark.parametrize("kind", KINDS)


def llm_of(kind, width=6, target=TARGET, draft=DRAFT, **options):
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": width}
    config |= KINDS[kind]
    return speculating_pair(config, target, **options)


@ALL
@BOTH
@pytest.mark.parametrize("width", [1, 6])
def test_it_changes_nothing(kind, params, width):
    llm = llm_of(kind, width)
    check_nothing_changes(llm, params)
    check_empty(llm)


@ALL
@BOTH
def test_few_pages_chunks_and_processors_change_nothing(kind, params):
    asked = PROCESSORS["penalties"] | PROCESSORS["bias"] | PROCESSORS["truncated"]
    llm = llm_of(kind, **few_pages(11))
    check_nothing_changes_where_pages_run_short(llm, params, max_tokens=16, **asked)
    check_empty(llm)


@ALL
@BOTH
def test_a_tree_runs_to_the_end_of_the_draft_models_context(kind, params):
    _, draft = tiny_noisy_pair(1, noise=0.1, vocab_size=32, draft_max_positions=16)
    llm = llm_of(kind, 6, draft=draft)
    assert ids(llm.generate(PROMPTS, params)) == alone(params)
    check_empty(llm)


@BOTH
def test_beside_other_drafters_in_one_batch(params):
    model = DraftModelDrafter(DRAFT, TARGET, draft_tree="top_k")
    other = RepeatDrafter(7)
    drafter = RoutingDrafter(lambda r: model if len(r.tokens) % 2 else other, model.capabilities)
    config = {"num_speculative_tokens": 5}
    llm = LLM(TARGET, drafter=drafter, speculative_config=config, seed=5, page_size=4)
    assert ids(llm.generate(PROMPTS, params)) == alone(params)


@pytest.mark.parametrize("kind", ["top_k", "sampled"])
@BOTH
def test_the_target_as_its_own_draft_model_has_its_token_first(kind, params):
    """One lost or misplaced position in the draft cache would show (reported faults 15 and 26)."""
    target = tiny_model(seed=4, vocab_size=32)
    params = replace(params, max_tokens=60)
    llm = llm_of(kind, 6, target, target)
    for output in llm.generate(PROMPTS[:3], params):
        counts = output.metrics.speculative_decoding
        assert counts.acceptance_by_position[0] == 1.0
    check_empty(llm)


@ALL
@pytest.mark.parametrize("num_output", [1, 9])
def test_the_cache_holds_what_a_fresh_one_computes(kind, num_output):
    from .test_draft_cache import after, drafter_rows

    llm = llm_of(kind, prefill_chunk_size=3)
    request = after(llm, PROMPTS[4], GREEDY, num_output)
    count = request.num_draft_cached
    assert count >= len(PROMPTS[4]) - 1
    whole = llm_of(kind)
    fresh = after(whole, request.tokens[: count + 1], GREEDY, 1)
    torch.testing.assert_close(
        drafter_rows(llm, request, count), drafter_rows(whole, fresh, count), rtol=0, atol=1e-10
    )


def asked(model, tokens=(3, 4, 5), max_nodes=4, sampling=None, seed=0, coupled=False, **fields):
    made = draft_request(
        list(tokens),
        vocab_size=model.config.vocab_size,
        max_nodes=max_nodes,
        sampling=sampling,
        seed=seed,
        coupled=coupled,
        cache=new_cache(model.config, 8, 4, model.dtype, model.device),
        pages=tuple(range(8)),
    )
    return made._replace(**fields)


def drafted(drafter, request):
    (draft,) = drafter.propose([request])
    drafter.release(request.id)
    topology(tuple(draft.parents))
    return draft


def paths(draft):
    tree = topology(tuple(draft.parents))
    return {
        tuple(draft.tokens[i] for i in tree.path(node)): node for node in range(len(draft.tokens))
    }


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("nodes", [1, 4, 9])
def test_top_k_is_the_best_tree_of_its_size(small, temperature, nodes):
    """Against all sequences of up to four tokens, by the draft model's law."""
    logits = target_logits(small)
    probability = {}
    for length in range(1, 5):
        for path in product(range(VOCAB), repeat=length):
            law = torch.softmax(logits((1, 4, 2, *path[:-1])) / (temperature or 1.0), dim=-1)
            probability[path] = probability.get(path[:-1], 1.0) * float(law[path[-1]])
    best = sorted(probability.values(), reverse=True)[:nodes]
    drafter = DraftModelDrafter(small, small, draft_tree="top_k", draft_tree_branching=[VOCAB])
    params = SamplingParams(temperature=temperature)
    draft = drafted(drafter, asked(small, (1, 4, 2), max_nodes=nodes, sampling=params))
    assert draft.probs is None
    found = [probability[path] for path in paths(draft)]
    assert found == pytest.approx(best)
    for path, node in paths(draft).items():
        above = probability.get(path[:-1], 1.0)
        assert draft.confidence[node] == pytest.approx(probability[path] / above)


def test_the_rule_of_what_pays_cuts_a_top_k_tree(small):
    drafter = DraftModelDrafter(small, small, draft_tree="top_k", draft_tree_branching=[VOCAB])
    whole = drafted(drafter, asked(small, max_nodes=8))
    values = []
    for node, parent in enumerate(whole.parents):
        values.append(whole.confidence[node] * (values[parent] if parent >= 0 else 1.0))
    least = (values[3] + values[4]) / 2
    cut = drafted(drafter, asked(small, max_nodes=8, least_path=(least,) * 8))
    assert cut.tokens == whole.tokens[:4]
    assert drafted(drafter, asked(small, max_nodes=8, least_path=(1.0,) * 8)).tokens == ()
    sure = drafted(drafter, asked(small, max_nodes=8, confidence_threshold=0.4))
    assert all(value >= 0.4 for value in sure.confidence)


@pytest.mark.parametrize("max_nodes", range(8))
def test_a_sampled_tree_has_its_shape_before_its_tokens(small, max_nodes):
    drafter = DraftModelDrafter(small, small, draft_tree="sampled", draft_tree_branching=[2, 2, 1])
    shape = (-1, -1, 0, 0, 1, 1, 2)[:max_nodes]
    logits = target_logits(small)
    for seed in range(10):
        params = SamplingParams(temperature=0.8)
        request = asked(small, max_nodes=max_nodes, sampling=params, seed=seed)
        draft = drafted(drafter, request)
        assert draft.parents == shape
        tree = topology(shape)
        for node, parent in enumerate(shape):
            path = [draft.tokens[i] for i in (tree.path(parent) if parent >= 0 else ())]
            law = torch.softmax(logits((3, 4, 5, *path)) / 0.8, dim=-1)
            for sibling in tree.children(parent):
                if sibling < node:
                    law[draft.tokens[sibling]] = 0.0
            torch.testing.assert_close(draft.probs[node], law / law.sum(), atol=1e-9, rtol=0)


def test_siblings_end_where_the_law_allows_no_more(small):
    drafter = DraftModelDrafter(small, small, draft_tree="sampled", draft_tree_branching=[4, 1])
    for temperature in (0.8, 0.0):
        params = SamplingParams(temperature=temperature, allowed_token_ids=[2, 5])
        for coupled in (False, True):
            request = asked(small, max_nodes=6, sampling=params, coupled=coupled)
            draft = drafted(drafter, request)
            assert {
                token
                for token, parent in zip(draft.tokens, draft.parents, strict=True)
                if parent < 0
            } == {2, 5}
            assert set(draft.tokens) == {2, 5}


@pytest.mark.parametrize("kind", ["top_k", "sampled"])
def test_the_law_is_the_targets(small, kind):
    draft = tiny_model(seed=8, vocab_size=VOCAB, num_layers=1, sharpness=0.7)
    drafter = RecordingDrafter(
        DraftModelDrafter(draft, small, draft_tree=kind, draft_tree_branching=[2])
    )
    llm = speculating(small, drafter, "standard", width=5)
    observed = [0] * VOCAB**LENGTH
    for output in llm.generate([PROMPT] * 500, SAMPLED):
        observed[sum(t * VOCAB**i for i, t in enumerate(reversed(output.token_ids)))] += 1
    assert chi_square(observed, enumerate_law(small, 0.8)) >= 1e-3
    drawn = [each for each in drafter.drafts if each.tokens]
    assert any(list(each.parents) != list(range(-1, len(each.tokens) - 1)) for each in drawn)
    assert all((each.probs is not None) == (kind == "sampled") for each in drawn)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_tree": "wide"}, "draft_tree must be one of none, top_k, sampled, got 'wide'"),
        ({"draft_tree_branching": [2]}, 'draft_tree_branching needs "draft_tree": "top_k" or'),
        (
            {"draft_tree": "top_k", "draft_tree_branching": [2, 0]},
            r"draft_tree_branching must be a list of integers in 1..16, got \[2, 0\]",
        ),
        ({"draft_tree": "top_k", "draft_tree_branching": 2}, "got 2"),
        ({"draft_tree": "top_k", "draft_tree_branching": []}, r"got \[\]"),
        (
            {"draft_tree": "sampled", "draft_sample_method": "greedy"},
            'draft_tree "sampled" needs "draft_sample_method": "probabilistic", got "greedy"',
        ),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        DraftModelDrafter(DRAFT, TARGET, **options)
