"""The combined drafter: who is asked, what is chosen or merged, learned and refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.cache.tensors import CacheShape
from foredraft.core.errors import ConfigError
from foredraft.core.trees import topology
from foredraft.drafters.catalog import build_drafter
from foredraft.drafters.combined import CombinedDrafter, merged
from foredraft.drafters.interface import Capabilities, Draft, StepResult, StepRow
from foredraft.drafters.member import Rated
from foredraft.testing.drafters import FixedDrafter, RecordingDrafter, ScriptedDrafter
from foredraft.testing.models import tiny_model
from foredraft.testing.requests import draft_request

V = 32
SHAPE = CacheShape(1, 1, 8, torch.float64)


@pytest.fixture(scope="module")
def target():
    return tiny_model(seed=1, vocab_size=V)


class Sure(ScriptedDrafter):
    """Drafts what it is given, as sure as it is told to be."""

    def __init__(self, draft, capabilities=None):
        self.given = draft
        self.capabilities = capabilities or Capabilities(tree=True)

    def draft(self, request):
        return self.given if request.max_nodes else Draft()


def sure(tokens, *confidence, parents=None, **capabilities):
    parents = tuple(range(-1, len(tokens) - 1)) if parents is None else parents
    made = Capabilities(**({"tree": True} | capabilities))
    return Sure(Draft(tuple(tokens), parents, confidence=confidence or None), made)


def ask(drafter, nodes=4, **fields):
    request = draft_request([3, 4], vocab_size=V, max_nodes=nodes)._replace(**fields)
    (draft,) = drafter.propose([request])
    topology(tuple(draft.parents))
    assert len(draft.tokens) <= nodes
    return draft


def told(*output, accepted=0):
    rows = [StepRow(1, -1, 4, True)]
    rows += [StepRow(2 + i, i, token, True) for i, token in enumerate(output[:accepted])]
    return StepResult("request", rows, accepted, output[-1])


def test_the_surest_draft_is_chosen(target):
    drafter = CombinedDrafter(target, [sure([5, 6], 0.5, 0.5), sure([7], 0.9), sure([8, 9])])
    assert ask(drafter).tokens == (8, 9)  # nothing said: 0.6, 0.6
    drafter = CombinedDrafter(target, [sure([5, 6], 0.5, 0.5), sure([7], 0.9), sure([], 0.9)])
    assert ask(drafter).tokens == (7,)
    assert ask(drafter, nodes=0).tokens == ()


def test_nodes_that_do_not_pay_do_not_count(target):
    drafter = CombinedDrafter(target, [sure([5, 6, 7], 0.6, 0.6, 0.6), sure([8], 0.9)])
    assert ask(drafter).tokens == (5, 6, 7)
    assert ask(drafter, least_path=(0.5, 0.5, 0.5)).tokens == (8,)


def test_a_boaster_is_found_out(target):
    """All drafts are judged by the output, whichever was verified."""
    drafter = CombinedDrafter(target, [sure([5], 0.95), sure([7], 0.5)])
    assert ask(drafter).tokens == (5,)
    for _ in range(20):
        drafter.observe([told(7)])
        draft = ask(drafter)
    assert draft.tokens == (7,)
    assert draft.confidence[0] > 0.7
    for _ in range(100):
        drafter.observe([told(5, 9, accepted=1)])
        draft = ask(drafter)
    assert draft.tokens == (5,)


def test_merging_keeps_equal_paths_once_and_the_likeliest_nodes(target):
    one = sure([5, 6, 7], 0.6, 0.5, 0.5)
    two = sure([5, 8, 9], 0.3, 0.4, 0.1)
    three = sure([1, 2, 3, 4], 0.2, 0.1, 0.1, 0.9, parents=(-1, -1, 0, 2))
    drafter = CombinedDrafter(target, [one, two, three], combine="merge")
    draft = ask(drafter, nodes=6)
    assert draft.tokens == (5, 6, 8, 1, 7, 2)
    assert draft.parents == (-1, 0, 0, -1, 1, -1)
    assert draft.confidence == pytest.approx([0.6, 0.5, 0.4, 0.2, 0.5, 0.1])


@settings(max_examples=150, deadline=None)
@given(
    drafts=st.lists(
        st.lists(
            st.tuples(st.integers(-1, 5), st.integers(0, 3), st.sampled_from([0.1, 0.5, 0.9])),
            max_size=6,
        ),
        max_size=4,
    ),
    nodes=st.integers(1, 8),
)
def test_a_merged_tree_is_the_best_of_its_size(drafts, nodes):
    rated = [
        Rated(
            Draft(
                tuple(token for _, token, _ in each),
                tuple(min(parent, i - 1) for i, (parent, _, _) in enumerate(each)),
                confidence=[value for _, _, value in each],
            ),
            (),
            0.0,
            False,
        )
        for each in drafts
    ]
    request = draft_request([3], vocab_size=V, max_nodes=nodes)

    def paths(draft):
        tree = topology(tuple(draft.parents))
        found = {}
        for node in range(len(tree)):
            value = 1.0
            for each in tree.path(node):
                value *= draft.confidence[each]
            found[tuple(draft.tokens[each] for each in tree.path(node))] = value
        return found

    chosen = merged(rated, request)
    everything = merged(rated, request._replace(max_nodes=100))
    given = {path for each in rated for path in paths(each.draft)}
    assert set(paths(everything)) == given
    assert len(everything.tokens) == len(given), "a path came twice"
    best = sorted(paths(everything).values(), reverse=True)[:nodes]
    assert sorted(paths(chosen).values(), reverse=True) == pytest.approx(best)


def paying(tokens, bytes_=0, **more):
    return sure(tokens, costs_passes=True, weight_bytes=bytes_, cache=SHAPE, **more)


def test_who_pays_is_asked_where_the_others_have_little(target):
    payer = RecordingDrafter(paying([9, 9]))
    free = sure([5, 6, 7, 8], 0.9, 0.9, 0.9, 0.9)
    drafter = CombinedDrafter(target, [payer, free])
    assert ask(drafter).tokens == (5, 6, 7, 8)
    assert not payer.calls
    free.given = Draft((5,), (-1,), confidence=[0.4])
    assert ask(drafter).tokens == (9, 9)
    assert ask(drafter, nodes=0).tokens == ()
    assert payer.requests[-1].max_nodes == 0, "it reads prompts along"
    for _ in range(100):
        ask(drafter)
        drafter.observe([told(5, 1, accepted=1)])
    num_calls = len(payer.calls)
    assert ask(drafter).tokens == (5,)  # it has promised too much
    assert len(payer.calls) == num_calls


def test_a_dear_drafter_has_to_promise_more(target):
    free = sure([5], 0.8)
    for share, chosen in ((0.0, (9,)), (2.0, (5,))):
        payer = paying([9], int(share * target.weight_bytes))
        assert ask(CombinedDrafter(target, [free, payer])).tokens == chosen


def test_no_more_is_bought_than_pays(target):
    payer = RecordingDrafter(paying([9], target.weight_bytes // 2))
    drafter = CombinedDrafter(target, [payer, sure([], tree=False)])
    ask(drafter, nodes=8)
    assert payer.requests[-1].max_nodes == 1  # 1.7 / 1.5, then 2.19 / 2
    alone = CombinedDrafter(target, [payer])
    ask(alone, nodes=8)
    assert payer.requests[-1].max_nodes == 8


def test_drawn_drafts_are_taken_as_they_are_or_refused(target):
    laws = torch.full((2, V), 1 / V, dtype=torch.float64)
    drawn = Sure(
        Draft.chain([9, 8], laws, 2, [0.01, 0.01]),
        Capabilities(deterministic=False, costs_passes=True, cache=SHAPE),
    )
    drafter = CombinedDrafter(target, [sure([5], 0.5), drawn])
    draft = ask(drafter)  # the choice was made before they were seen
    assert (draft.tokens, draft.num_cached) == ((9, 8), 2)
    assert draft.probs is laws
    assert not drafter.capabilities.deterministic
    with pytest.raises(
        ConfigError, match=r"drafters\[1\] draws its drafts from a law, which can't"
    ):
        CombinedDrafter(target, [sure([5]), drawn], combine="merge")
    free = Sure(Draft(), Capabilities(deterministic=False))
    with pytest.raises(ConfigError, match="drafters of fixed drafts"):
        CombinedDrafter(target, [free])


def test_capabilities_are_those_of_all(target):
    members = [
        sure([5], tree=False, num_speculative_tokens=6, top_ids=3, max_positions=40),
        paying([9], 100, prediction=True, max_positions=90),
    ]
    made = CombinedDrafter(target, members).capabilities
    assert (made.tree, made.num_speculative_tokens, made.cache) == (True, 6, SHAPE)
    assert (made.weight_bytes, made.max_positions, made.top_ids) == (100, 90, 3)
    assert made.prediction
    assert not made.costs_passes
    chains = [sure([5], tree=False), sure([5], tree=False)]
    assert not CombinedDrafter(target, chains).capabilities.tree
    assert CombinedDrafter(target, chains, "merge", 9).capabilities == Capabilities(
        tree=True, num_speculative_tokens=9
    )


def test_everything_told_is_passed_on_whatever_fails(target):
    class Failing(Sure):
        def observe(self, results):
            raise RuntimeError("as scripted")

        def release(self, request_id):
            raise RuntimeError("as scripted")

    few = RecordingDrafter(sure([5], top_ids=1))
    many = RecordingDrafter(sure([5], top_ids=3))
    none = RecordingDrafter(sure([5]))
    drafter = CombinedDrafter(target, [Failing(Draft()), few, many, none])
    result = StepResult("request", [StepRow(1, -1, 4, True, (7, 8, 9))], 0, 7)
    ask(drafter)
    with pytest.raises(RuntimeError, match="as scripted"):
        drafter.observe([result])
    assert [each.results[0].rows[0].top_ids for each in (few, many)] == [(7,), (7, 8, 9)]
    ask(drafter)
    with pytest.raises(RuntimeError, match="as scripted"):
        drafter.release("request")
    for each in (few, many, none):
        assert each.released == ["request"]
    for member in drafter.members:
        assert not member._nodes.num_expected


def test_members_come_from_configs(target):
    config = {"drafters": [{"method": "ngram", "prompt_lookup_max": 3}, {"method": "suffix"}]}
    drafter = build_drafter("combined", config, target).drafter
    assert [type(m.drafter).__name__ for m in drafter.members] == ["NgramDrafter", "SuffixDrafter"]
    assert drafter.capabilities.num_speculative_tokens == 8
    assert len(build_drafter("combined", {}, target).drafter.members) == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"combine": "all"}, "combine must be one of best, merge, got 'all'"),
        ({"drafters": []}, r"drafters must be a list of one or more objects, got \[\]"),
        ({"drafters": "ngram"}, "drafters must be a list .*, got 'ngram'"),
        (
            {"drafters": ["ngram"]},
            r"drafters\[0\] must be an object with a \"method\", got 'ngram'",
        ),
        (
            {"drafters": [{"method": "suffix"}, {"method": "ngram", "policy": "fixed"}]},
            r"drafters\[1\]: unknown option 'policy' for speculative method 'ngram'; valid are "
            "method, num_speculative_tokens, prompt_lookup_min",
        ),
        (
            {"drafters": [{"method": "ngram", "prompt_lookup_min": 0}]},
            r"drafters\[0\]: prompt_lookup_min must be an integer of 1 or more, got 0",
        ),
        ({"drafters": [{"method": "nrgam"}]}, r"drafters\[0\]: unknown speculative method 'nrgam'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be an integer of 1 or more"),
    ],
)
def test_mistakes_are_named_with_their_key(target, config, message):
    with pytest.raises(ConfigError, match=message):
        build_drafter("combined", config, target)


def test_two_caches_are_one_too_many(target):
    with pytest.raises(ConfigError, match=r"drafters\[2\] keeps keys and values of its own, and"):
        CombinedDrafter(target, [paying([5]), FixedDrafter([]), paying([6])])
