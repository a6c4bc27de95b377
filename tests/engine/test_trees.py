"""Trees beside chains in one batch: every law of a draft along every branch of a tree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from foredraft import LLM, SamplingParams
from foredraft.drafters.interface import Capabilities, Draft
from foredraft.drafters.ngram import NgramDrafter
from foredraft.drafters.recycling import RecyclingDrafter
from foredraft.models.decoder import cache_shape
from foredraft.testing.drafters import (
    EmptyDrafter,
    LiarDrafter,
    RecordingDrafter,
    RoutingDrafter,
    ScriptedDrafter,
    TreeDrafter,
    WrongAtDrafter,
    different_token,
)

from .conftest import GREEDY, PROMPTS, SEEDED
from .test_law import LENGTH, PROMPT, VOCAB, chi_square, enumerate_law
from .test_rules import SAMPLED, small, speculating

__all__ = ["small"]  # a fixture

PROCESSORS: dict[str, dict[str, Any]] = {
    "bare": {},
    "penalties": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
    },
    "bias": {"logit_bias": {3: 2.0, 7: -4.0}, "banned_token_ids": [5]},
    "shortest": {"min_tokens": 20, "stop_token_ids": [1, 4, 9, 16, 25]},
    "truncated": {"top_k": 6, "top_p": 0.9, "min_p": 0.02},
}
ALL = pytest.mark.parametrize("named", PROCESSORS)
BOTH = pytest.mark.parametrize("base", [GREEDY, SEEDED], ids=["greedy", "coupled"])


def ids(outputs):
    return [list(output.token_ids) for output in outputs]


def mixed(known, target):
    """Trees and chains, by prompt: right, wrong, found in the text, learned, none."""
    kinds = [
        TreeDrafter(LiarDrafter(known), WrongAtDrafter(known, 2), known),
        known,
        NgramDrafter(prompt_lookup_min=1, prompt_lookup_num_matches=3),
        RecyclingDrafter(target, recycling_top_k=3),
        EmptyDrafter(),
    ]
    by_prompt = {tuple(p): d for p, d in zip(PROMPTS, kinds, strict=True)}
    return RoutingDrafter(
        lambda r: by_prompt[tuple(r.tokens[: r.num_prompt_tokens])],
        Capabilities(tree=True, top_ids=3),
    )


@ALL
@BOTH
@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"max_num_seqs": 5, "max_num_batched_tokens": 12, "prefill_chunk_size": 3},
        {"page_size": 1},
        {"pages": 14},
    ],
    ids=["roomy", "few rows", "single slots", "few pages"],
)
def test_a_batch_of_trees_and_chains_is_plain(
    make_llm, plain, oracle, target, base, named, setting
):
    params = replace(base, **PROCESSORS[named])
    setting = dict(setting)
    if "pages" in setting:
        shape = cache_shape(target.config, target.cache_dtype)
        setting["kv_cache_gib"] = setting.pop("pages") * 4 * shape.bytes_per_position / 2**30
    llm = make_llm(mixed(oracle(params), target), 9, **setting)
    outputs = llm.generate(PROMPTS, params)
    assert ids(outputs) == plain(params)
    assert outputs[0].metrics.speculative_decoding.num_accepted_draft_tokens > 0
    assert llm.engine.pool.num_used == 0
    if "kv_cache_gib" in setting:
        assert llm.engine.scheduler.num_preemptions > 0


@BOTH
def test_a_second_turn_finds_what_a_tree_has_left_in_its_pages(make_llm, plain, oracle, base):
    """Pages are published after accepted nodes have moved to the places of their positions."""
    known = oracle(base)
    llm = make_llm(TreeDrafter(LiarDrafter(known), WrongAtDrafter(known, 1), known), 9)
    first = llm.generate(PROMPTS, base)
    turns = [[*o.prompt_token_ids, *o.token_ids, 30, 29] for o in first]
    second = llm.generate(turns, base)
    assert llm.engine.scheduler.prefix_hit_tokens > 60
    assert ids(second) == plain(base, turns)


@pytest.mark.parametrize("offset", range(9))
def test_a_stop_inside_a_branch_cuts_there(make_llm, plain, oracle, offset):
    stop = plain(GREEDY)[1][offset]
    params = replace(GREEDY, stop_token_ids=[stop])
    known = oracle(GREEDY)
    llm = make_llm(TreeDrafter(LiarDrafter(known), WrongAtDrafter(known, 3), known), 12)
    (want,) = make_llm().generate([PROMPTS[1]], params)
    (got,) = llm.generate([PROMPTS[1]], params)
    assert list(got.token_ids) == list(want.token_ids)
    assert (got.finish_reason, got.outputs[0].stop_reason) == ("stop", stop)
    counts = got.metrics.speculative_decoding
    assert counts.num_accepted_draft_tokens == sum(o == "accepted" for o in got.origins)


class RunnersUp(ScriptedDrafter):
    """The known token between siblings that look as good, some of them twice."""

    capabilities = Capabilities(tree=True)

    def __init__(self, known, order):
        self.known, self.order = known, order

    def draft(self, request):
        tokens = self.known.known_tokens(request)[:2]
        if len(tokens) < 2 or request.max_nodes < 6:
            return Draft()
        right, wrong = tokens[0], different_token(tokens[0])
        siblings = {"first": (right, wrong, right), "last": (wrong, wrong, right)}[self.order]
        parent = siblings.index(right)
        return Draft((*siblings, tokens[1]), (-1, -1, -1, parent))


@pytest.mark.parametrize("order", ["first", "last"])
@BOTH
def test_of_siblings_only_the_targets_own_token_stands(make_llm, plain, oracle, base, order):
    """Faults 7 and 8: neither a plausible sibling nor a second copy of one is accepted."""
    drafter = RecordingDrafter(RunnersUp(oracle(base), order))
    outputs = make_llm(drafter, 6).generate(PROMPTS, base)
    assert ids(outputs) == plain(base)
    for result in drafter.results:
        accepted = [row.node for row in result.rows if row.node >= 0 and row.committed]
        right = {"first": 0, "last": 2}[order]
        assert accepted in ([], [right], [right, 3])
    assert any(result.num_accepted == 2 for result in drafter.results)


@pytest.mark.parametrize("width", [1, 4, 9])
def test_a_tree_runs_to_the_last_position_of_the_context(make_llm, oracle, width):
    """Fault 19, with branches."""
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    want = make_llm(max_model_len=30).generate([PROMPTS[0]], params)[0]
    known = oracle(replace(GREEDY, max_tokens=40), [PROMPTS[0]])
    drafter = TreeDrafter(LiarDrafter(known), known)
    got = make_llm(drafter, width, max_model_len=30).generate([PROMPTS[0]], params)[0]
    assert (got.token_ids, got.finish_reason) == (want.token_ids, "length")


@pytest.mark.parametrize("prompt_length", range(1, 9))
def test_no_node_runs_over_the_slots_reserved_for_it(make_llm, plain, oracle, prompt_length):
    """Fault 18, with branches: at every place of a page."""
    prompt = [(3 * i + prompt_length) % 31 for i in range(prompt_length)]
    params = replace(GREEDY, max_tokens=12)
    known = oracle(params, [prompt])
    for width in range(2, 8):
        drafter = TreeDrafter(LiarDrafter(known), known)
        assert ids(make_llm(drafter, width).generate([prompt], params)) == plain(params, [prompt])


@pytest.mark.parametrize(
    "make",
    [
        lambda model: RecyclingDrafter(model, recycling_top_k=3),
        lambda model: NgramDrafter(prompt_lookup_min=1, prompt_lookup_num_matches=4),
    ],
    ids=["recycling", "n-gram tree"],
)
@pytest.mark.parametrize("rule", ["standard", "coupled"])
def test_learned_trees_leave_the_targets_law(small, make, rule):
    """At temperature 0.8; what a drafter has learned of other requests does not matter."""
    llm: LLM = speculating(small, make(small), rule, width=4)
    observed = [0] * VOCAB**LENGTH
    drafted = 0
    for output in llm.generate([[*PROMPT, 4, 2, *PROMPT]] * 1_000, SAMPLED):
        drafted += output.metrics.speculative_decoding.num_draft_tokens
        observed[sum(t * VOCAB**i for i, t in enumerate(reversed(output.token_ids)))] += 1
    assert drafted > 500
    law = enumerate_law(small, 0.8, prompt=[*PROMPT, 4, 2, *PROMPT])
    assert chi_square(observed, law) >= 1e-3
