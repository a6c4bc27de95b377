"""Acceptance counts: the arithmetic of accepted, drafted and emitted tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.core.counts import AcceptanceCounts


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, int, int]:
    drafted = draw(st.integers(0, 5))
    accepted = draw(st.integers(0, drafted))
    cut = accepted > 0 and draw(st.booleans())
    return drafted, accepted, accepted if cut else accepted + 1


def counted(each: list[tuple[int, int, int]]) -> AcceptanceCounts:
    counts = AcceptanceCounts()
    for drafted, accepted, emitted in each:
        counts.record(drafted, accepted, emitted)
    return counts


@given(st.lists(steps()))
def test_sums_and_ranges(each: list[tuple[int, int, int]]) -> None:
    counts = counted(each)
    assert counts.num_steps == len(each)
    assert counts.num_drafts == sum(drafted > 0 for drafted, _, _ in each)
    assert counts.num_draft_tokens == sum(drafted for drafted, _, _ in each)
    assert counts.num_accepted_tokens == sum(accepted for _, accepted, _ in each)
    assert counts.num_emitted_tokens == sum(emitted for _, _, emitted in each)
    assert sum(counts.accepted_per_position) == counts.num_accepted_tokens
    assert sum(counts.drafted_per_position) == counts.num_draft_tokens
    assert sum(counts.histogram) == counts.num_drafts
    assert sum(j * n for j, n in enumerate(counts.histogram)) == counts.num_accepted_tokens
    assert 0.0 <= counts.acceptance_rate <= 1.0
    by_position = counts.acceptance_by_position
    assert all(a >= b for a, b in pairwise(by_position))
    drafting = [emitted for drafted, _, emitted in each if drafted]
    mean = sum(drafting) / len(drafting) if drafting else 1.0
    assert counts.mean_acceptance_length == pytest.approx(mean)
    assert all(0.0 <= rate <= 1.0 for rate in counts.conditional_acceptance_by_position)


@given(st.lists(steps()), st.lists(steps()))
def test_merging_is_recording_both(
    left: list[tuple[int, int, int]], right: list[tuple[int, int, int]]
) -> None:
    merged = counted(left)
    merged.merge(counted(right))
    assert merged == counted(left + right)


def test_emitted_is_accepted_plus_one_unless_the_output_was_cut() -> None:
    counts = counted([(4, 2, 3), (4, 4, 5), (0, 0, 1), (3, 2, 2)])
    assert counts.num_emitted_tokens == counts.num_accepted_tokens + counts.num_steps - 1
    # The last step's extra token was cut: its three drafts emitted 3 + 5 + 2 tokens.
    assert counts.mean_acceptance_length == pytest.approx(10 / 3)
    assert counts.mean_emitted_tokens == pytest.approx(11 / 4)
    assert counts.acceptance_rate == pytest.approx(8 / 11)
    assert counts.histogram == [0, 0, 2, 0, 1]


def test_a_cut_says_nothing_of_the_position_after_it() -> None:
    counts = counted([(8, 3, 3)])
    assert counts.mean_acceptance_length == 3
    assert counts.conditional_acceptance_by_position == [1, 1, 1, 0, 0, 0, 0, 0]
    assert counts.reached_per_position == [1, 1, 1, 0, 0, 0, 0, 0]


def test_rates_by_position() -> None:
    counts = counted([(3, 0, 1), (3, 1, 2), (3, 3, 4), (1, 1, 2)])
    assert counts.accepted_per_position == [3, 1, 1]
    assert counts.acceptance_by_position == [3 / 4, 1 / 4, 1 / 4]
    # The short draft says nothing about position 1: it is not in its denominator.
    assert counts.conditional_acceptance_by_position == [3 / 4, 1 / 2, 1.0]


def test_a_tree_counts_its_nodes_as_drafted_and_its_depth_as_positions() -> None:
    counts = AcceptanceCounts()
    counts.record(drafted=7, accepted=2, emitted=3, depth=3)
    assert counts.num_draft_tokens == 7
    assert counts.drafted_per_position == [1, 1, 1]
    assert counts.accepted_per_position == [1, 1, 0]


def test_nothing_drafted_is_plain_decoding() -> None:
    counts = counted([(0, 0, 1)] * 3)
    assert counts.mean_acceptance_length == 1.0
    assert counts.acceptance_rate == 0.0
    assert counts.histogram == []
    assert AcceptanceCounts().mean_emitted_tokens == 0.0


@pytest.mark.parametrize("step", [(2, 3, 4), (2, -1, 0), (2, 1, 3), (2, 1, 0), (-1, 0, 1)])
def test_contradictions_are_refused(step: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="accepted"):
        AcceptanceCounts().record(*step)
