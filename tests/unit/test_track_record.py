"""What drafters learn of their own drafts: which nodes are judged, and how confidence follows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.drafters.interface import StepResult, StepRow
from foredraft.drafters.ngram import NgramDrafter
from foredraft.drafters.prediction import PredictionDrafter
from foredraft.drafters.recycling import RecyclingDrafter
from foredraft.drafters.suffix import SuffixDrafter
from foredraft.drafters.track_record import PRIOR_NODES, TrackRecord, emitted, judged
from foredraft.testing.models import tiny_model
from foredraft.testing.requests import draft_request

V = 32
PROMPT = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 2, 3, 4, 5, 6]


def told(output, name="request", stop_inside=False):
    """A step after which `output` was committed, its last token not from the draft."""
    accepted = output if stop_inside else output[:-1]
    rows = [StepRow(20, -1, 0, True)]
    rows += [StepRow(21 + i, i, token, True) for i, token in enumerate(accepted)]
    return StepResult(name, rows, len(accepted), output[-1])


def test_what_a_step_emitted():
    assert list(emitted(told([5, 6, 7]))) == [5, 6, 7]
    assert list(emitted(told([5]))) == [5]
    assert list(emitted(told([5, 6], stop_inside=True))) == [5, 6]
    assert list(emitted(StepResult("r", [StepRow(0, -1, 5, True)], 0, None))) == []


def test_nodes_are_judged_where_their_parent_was_right():
    # 1 (2 (4), 3), 5
    tokens, parents = [1, 2, 3, 4, 5], [-1, 0, 0, 1, -1]
    assert judged(tokens, parents, [1, 3]) == [(0, True), (1, False), (2, True), (4, False)]
    assert judged(tokens, parents, [5, 1]) == [(0, False), (4, True)]
    assert judged(tokens, parents, [1]) == [(0, True), (4, False)]
    assert judged(tokens, parents, []) == []
    assert judged([7, 7], [-1, -1], [7]) == [(0, True), (1, False)]


@settings(max_examples=100, deadline=None)
@given(
    parents=st.lists(st.integers(-1, 8), max_size=9),
    tokens=st.lists(st.integers(0, 2), min_size=9, max_size=9),
    output=st.lists(st.integers(0, 2), max_size=4),
)
def test_right_nodes_are_one_path_of_the_output(parents, tokens, output):
    parents = [min(parent, node - 1) for node, parent in enumerate(parents)]
    right = [node for node, was in judged(tokens, parents, output) if was]
    assert [tokens[node] for node in right] == output[: len(right)]
    assert [parents[node] for node in right] == [-1, *right][: len(right)]


def test_belief_gives_way_to_counts():
    record = TrackRecord()
    assert record.value(1, 0.8) == 0.8
    for right in (True, False, False):
        record.learn(1, right)
    assert record.value(1, 0.8) == pytest.approx((PRIOR_NODES * 0.8 + 1) / (PRIOR_NODES + 3))
    for _ in range(10_000):
        record.learn(1, True)
    for _ in range(10_000):
        record.learn(1, False)
    assert record.value(1, 0.8) < 0.2


def drafters():
    target = tiny_model(seed=1, vocab_size=V)
    recycling = RecyclingDrafter(target, recycling_top_k=3)
    recycling.observe(
        [StepResult("x", [StepRow(i, -1, t, True) for i, t in enumerate(PROMPT)], 0, 7)]
    )
    return {
        "n-gram": NgramDrafter(),
        "n-gram tree": NgramDrafter(prompt_lookup_num_matches=3),
        "suffix": SuffixDrafter(),
        "suffix tree": SuffixDrafter(suffix_decoding_tree=True),
        "prediction": PredictionDrafter(),
        "lookup in a prediction": PredictionDrafter(),
        "recycling": recycling,
    }


@pytest.mark.parametrize("kind", drafters())
def test_confidence_is_a_probability_and_follows_what_happens(kind):
    """Right drafts make a drafter surer than wrong ones; siblings add up to 1 at most."""
    firsts = {}
    for right in (True, False):
        drafter = drafters()[kind]
        for number in range(60):
            request = draft_request(PROMPT, vocab_size=V, max_nodes=3, name=f"{number}")
            if kind == "prediction":
                request = request._replace(prediction=(7, 8, 9, 10))
            (draft,) = drafter.propose([request])
            assert len(draft.confidence) == len(draft.tokens) > 0
            assert all(0 < value < 1 for value in draft.confidence)
            for parent in set(draft.parents):
                siblings = [
                    c for c, p in zip(draft.confidence, draft.parents, strict=True) if p == parent
                ]
                assert sum(siblings) <= 1 + 1e-9
            said = [draft.tokens[0], 31] if right else [30, 31]
            if kind != "recycling":
                drafter.observe([told(said, f"{number}")])
            else:
                rows = [StepRow(20, -1, PROMPT[-1], True, (draft.tokens[0], 30, 29))]
                drafter.observe([StepResult(f"{number}", rows, 0, said[0])])
            drafter.release(f"{number}")
        firsts[right] = draft.confidence[0]
    assert firsts[True] > firsts[False] + 0.2


def test_a_longer_match_and_an_undisputed_one_are_surer():
    def first(tokens):
        (draft,) = NgramDrafter().propose([draft_request(tokens, vocab_size=V)])
        assert draft.confidence == sorted(draft.confidence)
        return draft.confidence[0]

    assert first([3, 4, 5, 6, 7, 3, 4, 5, 6]) > first([3, 4, 5, 6, 7, 9, 5, 6])
    assert first([3, 4, 5, 6, 7, 3, 4, 5, 6]) > first([3, 4, 5, 6, 7, 5, 6, 8, 3, 4, 5, 6])
