"""Two beliefs as one: a law, the weights that are learned, and what asking is worth."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.drafters.blend import ASK_EVERY, OTHERS, STARTING_WEIGHTS, Blend, Gains

STATED = [(3, 0.5), (7, 0.2)]
MODEL = {3: 0.1, 7: 0.1, 9: 0.6}


def probability(blended, token):
    return blended.probabilities[blended.tokens.index(token)]


@given(
    st.dictionaries(st.integers(0, 9), st.floats(0.0, 0.1), max_size=8),
    st.dictionaries(st.integers(0, 9), st.floats(0.0, 0.1), max_size=8),
    st.integers(0, 6),
)
def test_it_is_a_law_over_what_either_names(source, model, depth):
    blended = Blend().law(list(source.items()), model, depth)
    assert set(blended.tokens) == {*source, *model, OTHERS}
    assert blended.tokens[-1] == OTHERS
    assert math.isclose(sum(blended.probabilities), 1.0)


def test_it_is_the_weighted_product_of_both():
    a, b = STARTING_WEIGHTS
    blended = Blend().law(STATED, MODEL, 0)
    # What the source leaves is divided as the model has it: 0.6 of the 0.8 outside is token 9's.
    p = {3: 0.5, 7: 0.2, 9: 0.3 * 0.6 / 0.8, OTHERS: 0.3 * 0.2 / 0.8}
    q = {3: 0.1, 7: 0.1, 9: 0.6, OTHERS: 0.2}
    weights = {token: p[token] ** a * q[token] ** b for token in p}
    for token, weight in weights.items():
        assert math.isclose(probability(blended, token), weight / sum(weights.values()))


def test_a_source_that_knows_nothing_leaves_the_models_order():
    blended = Blend().law([], MODEL, 0)
    assert max(zip(blended.probabilities, blended.tokens, strict=True))[1] == 9


def test_it_learns_whom_to_believe():
    """Where the model is right and the source guesses, the model's weight grows; and vice versa."""
    draw = random.Random(1)
    for right_by_model in (True, False):
        blend = Blend()
        for _ in range(2000):
            said, noise = draw.sample(range(10), 2)
            model, source = (said, noise) if right_by_model else (noise, said)
            token = said if draw.random() < 0.8 else draw.randrange(10)
            stated = [(source, 0.6), ((source + 1) % 10, 0.2)]
            blend.learn(blend.law(stated, {model: 0.7, source: 0.02}, 0), token)
        after = blend.law([(1, 0.6), (2, 0.2)], {5: 0.7, 1: 0.02}, 0)
        assert (probability(after, 5) > probability(after, 1)) == right_by_model
        assert (
            blend.law(STATED, MODEL, 2).probabilities == Blend().law(STATED, MODEL, 2).probabilities
        )


def test_what_asking_is_worth_is_learned_where_it_was_asked():
    gains = Gains()
    before = [gains.expected(sureness) for sureness in (0.05, 0.5, 0.95)]
    assert before == sorted(before, reverse=True)
    blended = Blend().law([(3, 0.9)], {3: 0.9, 4: 0.1}, 0)
    for _ in range(500):
        gains.learn([(3, 0.9)], blended)
    assert gains.expected(0.9) == pytest.approx(max(0.0, probability(blended, 3) - 0.9), abs=1e-3)
    assert gains.expected(0.5) == before[1]


def test_it_asks_where_it_pays_and_now_and_then_where_not():
    gains = Gains()
    assert gains.pays(0.0, gains.expected(0.0))
    asked = [gains.pays(1.0, 1.0) for _ in range(3 * ASK_EVERY)]
    assert sum(asked) == 3
