"""Combined drafters in the engine: every member sees every step, and the text is the target's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foredraft.drafters.combined import CombinedDrafter
from foredraft.testing.drafters import LiarDrafter, RecordingDrafter, RoutingDrafter

from .conftest import GREEDY, PROMPTS
from .pair_rig import (
    BOTH,
    DRAFT,
    TARGET,
    alone,
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

FREE = [{"method": "ngram", "prompt_lookup_min": 1}, {"method": "suffix"}, {"method": "recycling"}]
DRAWN = {"method": "draft_model", "model": DRAFT}
FIXED = {**DRAWN, "draft_sample_method": "greedy"}
COMBINATIONS = {
    "best": {"drafters": FREE},
    "chains": {"drafters": FREE[:2]},
    "merged": {"drafters": FREE, "combine": "merge"},
    "best with a model": {"drafters": [DRAWN, *FREE]},
    "merged with a model": {"drafters": [*FREE, FIXED], "combine": "merge"},
    "only a model": {"drafters": [DRAWN]},
}
ALL = pytest.mark.parametrize("named", COMBINATIONS)


def llm_of(named, width=6, **options):
    config = {"method": "combined", "num_speculative_tokens": width, **COMBINATIONS[named]}
    return speculating_pair(config, **options)


def assert_empty(llm):
    llm.engine.check_integrity()
    assert llm.engine.pool.num_used == 0
    for member in llm.drafter.members:
        assert not member._nodes.num_expected
        assert not getattr(member.drafter, "_computed", None)


@ALL
@BOTH
@pytest.mark.parametrize("width", [2, 6])
def test_it_changes_nothing(named, params, width):
    llm = llm_of(named, width)
    check_nothing_changes(llm, params)
    assert_empty(llm)


@ALL
@BOTH
def test_few_pages_and_penalties_change_nothing(named, params):
    models = (TARGET, DRAFT) if "model" in named else (TARGET,)
    llm = llm_of(named, **few_pages(14, models))
    check_nothing_changes_where_pages_run_short(llm, params, **PROCESSORS["penalties"])
    assert_empty(llm)


@BOTH
def test_beside_other_drafters_in_one_batch(make_llm, plain, oracle, target, params):
    combined = CombinedDrafter(target, FREE, combine="merge")
    liar = LiarDrafter(oracle(params))
    drafter = RoutingDrafter(
        lambda request: combined if len(request.tokens) % 2 else liar, combined.capabilities
    )
    assert ids(make_llm(drafter, 6).generate(PROMPTS, params)) == plain(params)


def test_a_free_drafter_spares_the_models_passes():
    """What the free ones know is not asked of the model; its cache catches up when it is."""
    llm = llm_of("best with a model", 4)
    model = llm.drafter._paying[0]
    model._token_cost = 0.1  # the two are about as large
    model.drafter = recorder = RecordingDrafter(model.drafter)
    outputs = llm.generate([PROMPTS[1], PROMPTS[3]], replace(GREEDY, max_tokens=60))
    want = replace(GREEDY, max_tokens=60)
    assert ids(outputs) == alone(want, [PROMPTS[1], PROMPTS[3]])
    asked = sum(request.max_nodes > 0 for request in recorder.requests)
    steps = sum(output.metrics.num_steps for output in outputs)
    assert 0 < asked < steps


@pytest.mark.parametrize("way", ["best", "merge"])
def test_the_law_is_the_targets(small, way):
    """At temperature 0.8, whatever was learned of other requests; drawn drafts too where chosen
    before they are drawn.
    """
    model = {"method": "draft_model", "model": small}
    if way == "merge":
        model["draft_sample_method"] = "greedy"
    drafter = CombinedDrafter(small, [*FREE, model], combine=way)
    llm = speculating(small, drafter, "standard", width=4)
    observed = [0] * VOCAB**LENGTH
    drafted = 0
    for output in llm.generate([[*PROMPT, 4, 2, *PROMPT]] * 500, SAMPLED):
        drafted += output.metrics.speculative_decoding.num_draft_tokens
        observed[sum(t * VOCAB**i for i, t in enumerate(reversed(output.token_ids)))] += 1
    assert drafted > 300
    law = enumerate_law(small, 0.8, prompt=[*PROMPT, 4, 2, *PROMPT])
    assert chi_square(observed, law) >= 1e-3
