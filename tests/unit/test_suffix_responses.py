"""Past responses: bounds, least recently used first, salts apart, responses continued; and the
table of acceptance that learns.
"""

from __future__ import annotations

import random
import sys
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.drafters.suffix_draft import NUM_CELLS, DraftLimits, ReferenceIndex, cell
from foredraft.drafters.suffix_estimates import (
    FORGET_AFTER,
    PRIOR_NODES,
    PRIOR_OWN,
    PRIOR_PAST,
    Estimates,
)
from foredraft.drafters.suffix_responses import ResponseCache
from foredraft.drafters.suffix_source import index_maker, most_bytes

LIMITS = DraftLimits(8, 4.0, 0.0, False)


def cache(max_requests: int = 10, max_tokens: int = 1000, max_context: int = 4) -> ResponseCache:
    return ResponseCache(lambda: ReferenceIndex(24, 64), max_requests, max_tokens, max_context)


def tell(
    made: ResponseCache, name: str, prompt: list[int], output: list[int], salt: str = ""
) -> tuple[str, int]:
    key = made.begin(name, salt, [*prompt, *output], len(prompt))
    made.extend(key, [*prompt, *output])
    made.check_integrity()
    return key


def copied(made: ResponseCache, context: list[int], salt: str = "") -> list[int]:
    """What a request of the salt, that said nothing yet, is offered after `context`."""
    key = made.begin("asks", salt, context, len(context))
    return made.propose(key, context, LIMITS, Estimates().values).tokens


def test_a_response_is_found_by_the_end_of_its_prompt_and_its_own_tokens() -> None:
    made = cache()
    tell(made, "a", [90, 91, 92, 93, 94, 95], [1, 2, 3, 4, 5, 6, 7, 8])
    assert copied(made, [7, 92, 93, 94, 95])[:3] == [1, 2, 3]
    assert copied(made, [7, 3, 4])[:3] == [5, 6, 7]
    # Of the prompt nothing is proposed, and no more than its end is kept.
    assert copied(made, [92, 93]) == []
    assert made._indexes[""].text(0)[:4] == [92, 93, 94, 95]


def test_a_request_does_not_copy_from_its_own_response() -> None:
    made = cache()
    key = tell(made, "a", [9], [1, 2, 3, 1, 2])
    assert made.propose(key, [3, 1, 2], LIMITS, Estimates().values).tokens == []


def test_the_least_recently_used_response_goes_first() -> None:
    made = cache(max_requests=3)
    keys = {name: tell(made, name, [i], [i, i + 1, i + 2]) for i, name in enumerate("abc", 10)}
    made.use(*keys["a"])
    tell(made, "d", [50], [50, 51])
    assert [r.request_id for r in made._responses.values()] == ["c", "a", "d"]
    made.append(keys["c"], 4, [7])
    tell(made, "e", [60], [60, 61])
    assert [r.request_id for r in made._responses.values()] == ["d", "c", "e"]
    assert not made.extend(keys["a"], [10, 10, 11, 12, 13])


def test_tokens_are_bounded_over_all_salts() -> None:
    made = cache(max_tokens=30)
    for i in range(8):
        tell(made, f"r{i}", [1, 2], [100 * i + j for j in range(8)], salt=f"salt {i % 3}")
        assert made.num_tokens <= 30
    assert made.num_responses == 3
    # Alone beyond the bound: nothing is kept of it, nor of any other.
    assert tell(made, "long", [1], list(range(40))) not in made._responses
    assert (made.num_tokens, made.num_responses) == (0, 0)
    assert not made.propose(("", 99), [1, 2], LIMITS, Estimates().values).tokens
    assert not made._indexes


@pytest.mark.parametrize("make", [index_maker(24, 64), partial(ReferenceIndex, 24, 64)])
def test_memory_stays_within_what_is_said(monkeypatch, make) -> None:
    """Also of salts that have had many texts, one after the other, and keep a short one each."""
    if isinstance(make(), ReferenceIndex):
        monkeypatch.setitem(sys.modules, "foredraft._native", None)
    made = ResponseCache(make, max_requests=60, max_tokens=3000, max_context=24)
    draw = random.Random(1)
    largest = 0
    for number in range(300):
        salt, length = f"salt {number // 30}", draw.choice([1, 60, 300])
        key = tell(made, f"r{number}", [1] * 30, draw.choices(range(49152), k=length), salt)
        for each in list(made._responses):
            if each[0] != key[0] and made._responses[each].length < 40:
                made.use(*each)
        largest = max(largest, made.num_bytes)
        assert made.num_bytes <= most_bytes(3000, 60)
    assert len(made._indexes) > 5
    assert largest > most_bytes(3000, 60) / 4  # and what is said is not much more


def test_a_salt_sees_its_own_responses_only() -> None:
    made = cache()
    tell(made, "a", [9], [1, 2, 3, 4, 5, 6], salt="a")
    tell(made, "b", [9], [1, 2, 7, 7, 8, 8], salt="b")
    assert copied(made, [1, 2], "a")[:2] == [3, 4]
    assert copied(made, [1, 2], "b")[:2] == [7, 7]
    assert copied(made, [1, 2], "") == []


def test_a_response_goes_on_after_a_preemption_and_another_of_the_name_is_new() -> None:
    made = cache()
    key = tell(made, "a", [9, 9], [1, 2, 3])
    assert tell(made, "a", [9, 9], [1, 2, 3, 4]) == key
    assert made._indexes[""].text(key[1]) == [9, 9, 1, 2, 3, 4]
    other = tell(made, "a", [9, 9], [1, 5])
    assert other != key
    assert made.num_responses == 2


def test_tokens_are_appended_where_the_response_ends() -> None:
    made = cache()
    key = tell(made, "a", [9], [1, 2])
    assert made.append(key, 5, [3])
    assert made.append(key, 3, [3, 4])
    assert made._indexes[""].text(key[1]) == [9, 1, 2, 3, 4]


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 2), st.lists(st.integers(0, 3), max_size=12)),
        max_size=30,
    ),
    max_requests=st.integers(1, 4),
    max_tokens=st.integers(1, 60),
)
def test_counts_hold_whatever_comes(steps, max_requests, max_tokens) -> None:
    made = cache(max_requests, max_tokens)
    said: dict[tuple[int, int], list[int]] = {}
    for number, salt, tokens in steps:
        whole = said.setdefault((number, salt), [number, salt])
        whole += tokens
        key = made.begin(f"{number} {salt}", str(salt), whole, 2)
        made.extend(key, whole)
        made.check_integrity()


def test_cells_are_told_apart_by_match_and_agreement() -> None:
    counts = [(1, 1), (3, 3), (4, 4), (3, 4), (1, 2), (1, 4), (1, 5)]
    assert [cell(1, count, total) for count, total in counts] == list(range(7))
    rows = [cell(match, 1, 1) // 7 for match in (1, 2, 3, 4, 5, 6, 7, 9, 10, 15, 16, 99)]
    assert rows == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    assert len(Estimates().values) == NUM_CELLS


@pytest.mark.parametrize("prior", [PRIOR_OWN, PRIOR_PAST], ids=["own", "past"])
def test_the_starting_values_rise_with_match_and_agreement(prior) -> None:
    for row, longer in pairwise(prior):
        assert all(a <= b for a, b in zip(row, longer, strict=True))
    for row in prior:
        assert row[0] <= row[1] <= row[2]
        assert list(row[2:]) == sorted(row[2:], reverse=True)
    assert all(0 < value < 1 for row in prior for value in row)


def test_cells_learn_from_the_nodes_that_were_judged() -> None:
    estimates = Estimates()
    before = list(estimates.values)
    estimates.learn([0, 7, 14, 21, 28], [(0, True), (1, False), (3, False)])
    changed = [i for i in range(NUM_CELLS) if estimates.values[i] != before[i]]
    assert changed == [0, 7, 21]
    assert estimates.values[0] > before[0]
    assert estimates.values[7] < before[7]
    assert estimates.values[21] == before[21] * PRIOR_NODES / (PRIOR_NODES + 1)


def test_what_was_long_ago_counts_less() -> None:
    estimates = Estimates()
    for _ in range(int(2 * FORGET_AFTER)):
        estimates.learn([0], [(0, False)])
    for _ in range(int(FORGET_AFTER)):
        estimates.learn([0], [(0, True)])
    assert estimates.values[0] > 0.5
