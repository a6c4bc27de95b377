"""A wide draft's steps, played again with narrower drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft import LLM, SamplingParams
from foredraft.bench.plan.replay import (
    counts_of,
    length_shares,
    rank_acceptance,
    replay,
)
from foredraft.bench.plan.trace import DraftedStep, Recorder, step_of
from foredraft.drafters.catalog import build_drafter
from foredraft.drafters.interface import Draft, StepRow
from foredraft.testing.models import tiny_model

WIDE = 5


def chain(position: int, drafted: int, accepted: int) -> DraftedStep:
    return DraftedStep(position, tuple(range(-1, drafted - 1)), tuple(range(accepted)))


def decoded(right: Sequence[bool], width: int) -> list[DraftedStep]:
    """Steps of a drafter that is right or wrong at each place of a text, whatever it drafts."""
    steps, at = [], 0
    while at < len(right):
        accepted = 0
        while accepted < width and at + accepted < len(right) and right[at + accepted]:
            accepted += 1
        steps.append(chain(at, width, accepted))
        at += accepted + 1
    return steps


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(0, WIDE))
def test_a_narrower_chain_takes_the_steps_that_it_would_have_taken(
    right: list[bool], width: int
) -> None:
    right = [*right, False]  # a text ends with a token of the target's own
    # The token after a whole draft was not drafted, so it isn't known whether it would have been
    # right: it is taken to be so if the draft after it begins right.
    at = 0
    while at < len(right):
        accepted = len(decoded(right[at:], WIDE)[0].accepted)
        if accepted == WIDE and at + WIDE + 1 < len(right):
            right[at + WIDE] = right[at + WIDE + 1]
        at += accepted + 1
    found, expected = replay(decoded(right, WIDE), width), decoded(right, width)
    assert [step.position for step in found] == [step.position for step in expected]
    assert [step.accepted for step in found] == [len(step.accepted) for step in expected]
    assert [step.drafted for step in found] == [width] * len(found)


def test_plain_decoding_is_a_step_a_token() -> None:
    text = [chain(10, 4, 2), chain(13, 0, 0), chain(14, 3, 0)]
    assert [step.position for step in replay(text, 0)] == [10, 11, 12, 13, 14]
    assert all(step.rows == 1 for step in replay(text, 0))
    assert [(s.drafted, s.accepted) for s in replay(text, 4)] == [(4, 2), (0, 0), (3, 0)]
    assert replay([], 4) == []


def test_a_tree_keeps_its_first_nodes_and_goes_on_below_the_accepted_one() -> None:
    # Two children of the root; the second one has two children, the second of which is accepted.
    text = [DraftedStep(0, (-1, -1, 1, 1), (1, 3)), chain(3, 0, 0)]
    assert [(s.drafted, s.accepted) for s in replay(text, 4)] == [(4, 2), (0, 0)]
    assert [(s.drafted, s.accepted) for s in replay(text, 2)] == [(2, 1), (2, 0), (0, 0)]
    assert [(s.drafted, s.accepted) for s in replay(text, 1)] == [(1, 0), (1, 0), (1, 0), (0, 0)]
    assert rank_acceptance([text]) == [0.0, 1.0]


def test_rows_of_the_drafters_own_are_no_draft() -> None:
    rows = [
        StepRow(4, -1, 7, True),
        StepRow(5, 0, 1, True),
        StepRow(5, 1, 2, False),
        StepRow(6, 2, 3, True),
    ]
    draft = Draft((1, 2, 3), (-1, -1, 0), verify=(True, False, True))
    step = step_of(rows, draft, True)
    assert step == DraftedStep(4, (-1, 0), (0, 1), num_own_rows=1)
    assert replay([step, chain(7, 0, 0)], 2)[0].rows == 4


def test_a_draft_that_was_cut_is_matched_with_what_is_left() -> None:
    draft = Draft((5, 6, 7, 8), (-1, 0, -1, 2))
    rows = [StepRow(4, -1, 9, True), StepRow(5, 0, 7, True), StepRow(6, 1, 8, False)]
    assert step_of(rows, draft, True) == DraftedStep(4, (-1, 0), (0,))


def test_shares_and_rates_are_those_of_the_steps() -> None:
    texts = [[chain(0, 3, 3), chain(4, 0, 0)], [chain(0, 3, 0), chain(1, 1, 1)]]
    assert length_shares(texts) == [0.25, 0.25, 0.0, 0.5]
    counts = counts_of(texts)
    assert counts.num_drafts == 3
    assert counts.conditional_acceptance_by_position == [pytest.approx(2 / 3), 1.0, 1.0]


def test_a_draft_that_its_drafter_ended_ends_there() -> None:
    ended = replace(chain(0, 2, 2), full=False)
    text = [ended, replace(chain(3, 3, 3), full=False), chain(7, 0, 0)]
    assert [s.accepted for s in replay(text, 5)] == [2, 3, 0]
    # Begun inside a path, a draft is a new one, and may reach further.
    assert [s.accepted for s in replay(text, 1)] == [1, 1, 1, 0, 0]
    full = [chain(0, 2, 2), *text[1:]]
    assert [s.accepted for s in replay(full, 5)] == [5, 0, 0]


@pytest.mark.parametrize("method", ["ngram", "recycling", "suffix", "lookahead"])
def test_a_record_of_an_engine_replays_to_itself(method: str) -> None:
    loaded = tiny_model(seed=3)
    recorder = Recorder(build_drafter(method, {}, loaded).drafter)
    llm = LLM(loaded, drafter=recorder, speculative_config={"num_speculative_tokens": 6})
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    outputs = llm.generate([[5, 6, 7, 5, 6], [8, 9, 8, 9]], params)
    assert len(recorder.texts) == 2
    for text, output in zip(recorder.texts, outputs, strict=True):
        first = output.metrics.num_first_step_tokens
        assert len(text) == output.metrics.num_steps
        assert sum(step.emitted for step in text) in (40 - first, 41 - first)
        again = replay(text, 6)
        assert [step.position for step in again] == [step.position for step in text]
        assert [step.drafted for step in again] == [len(step.parents) for step in text]
        assert sum(len(step.accepted) for step in text) > 0
        assert len(replay(text, 0)) == sum(step.emitted for step in text)
