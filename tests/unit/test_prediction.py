"""The prediction drafter: where an output stands in its prediction, however it has left it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.core.errors import ConfigError
from foredraft.drafters.interface import Drafter
from foredraft.drafters.prediction import Alignment, PredictionDrafter
from foredraft.testing.requests import draft_request

PREDICTION = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]


def ahead(output, prediction=PREDICTION, rejoin=2, limit=3):
    alignment = Alignment(prediction, rejoin)
    alignment.follow(output)
    return list(alignment.ahead(limit))


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([], [10, 11, 12]),
        ([10, 11], [12, 13, 14]),
        ([10, 11, 99], []),
        ([10, 11, 99, 13], []),  # one token in common is not two
        ([10, 11, 99, 13, 14], [15, 16, 17]),  # replaced
        ([10, 11, 14, 15], [16, 17, 18]),  # left out
        ([10, 11, 90, 91, 92, 12, 13], [14, 15, 16]),  # put in
        (PREDICTION[:9], [19]),
        (PREDICTION, []),
        ([*PREDICTION, 12, 13], [14, 15, 16]),  # once more
    ],
)
def test_an_output_is_followed_left_and_rejoined(output, expected):
    assert ahead(output) == expected


def test_a_shorter_n_gram_rejoins_sooner():
    assert ahead([10, 11, 99, 13], rejoin=1) == [14, 15, 16]


def test_among_equal_places_the_one_with_more_in_common_then_the_nearest():
    prediction = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 5]
    assert ahead([7, 1, 2], prediction, limit=1) == [3]
    assert ahead([1, 2, 3, 8, 1, 2], prediction, limit=1) == [4]  # left at 3
    assert ahead([1, 2, 6, 4, 9, 1, 2], prediction, limit=1) == [5]  # 4 9 1 2


@settings(max_examples=200, deadline=None)
@given(
    prediction=st.lists(st.integers(0, 4), max_size=30),
    output=st.lists(st.integers(0, 4), max_size=30),
    rejoin=st.integers(1, 3),
    cut=st.integers(0, 30),
)
def test_what_is_ahead_follows_what_was_said(prediction, output, rejoin, cut):
    """Whether the output comes at once or in parts; and it stands where its last tokens are."""
    whole, parts = Alignment(prediction, rejoin), Alignment(prediction, rejoin)
    whole.follow(output)
    parts.follow(output[:cut])
    parts.follow(output[cut:])
    assert (whole.next, whole.num_followed) == (parts.next, len(output))
    if whole.next is None:
        tail = output[-rejoin:]
        assert len(tail) < rejoin or not any(
            prediction[i : i + rejoin] == tail for i in range(len(prediction))
        )
    elif whole.next:
        assert prediction[whole.next - 1] == output[-1]


def test_an_output_that_keeps_to_it_is_drafted_whole():
    alignment = Alignment(PREDICTION, 2)
    for done in range(len(PREDICTION)):
        assert list(alignment.ahead(4)) == PREDICTION[done : done + 4]
        alignment.follow([PREDICTION[done]])


def drafted(drafter, tokens, num_prompt, prediction, nodes=3):
    request = draft_request(tokens, num_prompt, vocab_size=200, max_nodes=nodes)
    (draft,) = drafter.propose([request._replace(prediction=tuple(prediction))])
    return list(draft.tokens)


def test_lookup_takes_over_where_the_output_has_left():
    prompt = [1, 2, 3, 50, 51, 52, 53, 4]
    for fallback, expected in (("ngram", [52, 53, 4]), ("none", [])):
        drafter = PredictionDrafter(prediction_fallback=fallback, prediction_rejoin=2)
        assert isinstance(drafter, Drafter)
        assert drafted(drafter, prompt, 8, PREDICTION) == [10, 11, 12]
        assert drafted(drafter, [*prompt, 10, 50, 51], 8, PREDICTION) == expected
        assert drafted(drafter, [*prompt, 10, 50, 51, 14, 15], 8, PREDICTION) == [16, 17, 18]
        drafter.release("request")
        assert drafted(drafter, [*prompt, 50, 51], 8, ()) == expected
        drafter.release("request")
        assert drafted(drafter, [*prompt, 10], 8, PREDICTION) == [11, 12, 13]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prediction_rejoin": 0}, "prediction_rejoin must be an integer in 1..64, got 0"),
        ({"prediction_rejoin": "2"}, "got '2'"),
        ({"prediction_fallback": "suffix"}, "one of ngram, none, got 'suffix'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        PredictionDrafter(**options)
