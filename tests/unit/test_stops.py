"""The one function that ends requests, and the text that may be shown before it does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foredraft.engine.stops import StopRules, check_stop, find_stop_string, safe_text_length


def rules(**changes):
    values = {
        "eos_token_ids": frozenset({0}),
        "stop_token_ids": frozenset({7}),
        "stop_strings": ("ab",),
        "include_stop_string": False,
        "min_tokens": 0,
        "max_tokens": 10,
    }
    return StopRules(**(values | changes))


def test_every_reason():
    assert check_stop(rules(), 3, 1, "x", 1) is None
    assert check_stop(rules(), 0, 1, "x", 0).finish_reason == "stop"
    assert check_stop(rules(), 0, 1, "x", 0).stop_reason is None
    assert check_stop(rules(), 7, 1, "x", 1).stop_reason == 7
    assert check_stop(rules(), 3, 10, "x", 1).finish_reason == "length"
    stop = check_stop(rules(), 3, 4, "xyab", 1)
    assert (stop.stop_reason, stop.text_end) == ("ab", 2)
    assert check_stop(rules(include_stop_string=True), 3, 4, "xyabz", 2).text_end == 4


def test_a_stop_wins_over_length():
    assert check_stop(rules(), 7, 10, "x", 1).finish_reason == "stop"
    assert check_stop(rules(), 0, 10, "x", 1).finish_reason == "stop"
    assert check_stop(rules(), 3, 10, "ab", 1).finish_reason == "stop"


def test_stops_count_from_min_tokens_on_but_length_always():
    early = rules(min_tokens=5, max_tokens=10)
    for token, text in ((0, "x"), (7, "x"), (3, "ab")):
        assert check_stop(early, token, 4, text, 2) is None
        assert check_stop(early, token, 5, text, 2).finish_reason == "stop"
    # A string that was complete before min_tokens is not found later.
    assert check_stop(early, 3, 6, "abxyz", 1) is None


def test_the_string_that_ends_first_wins():
    assert find_stop_string(("bcd", "ab"), "xabcd", 5) == ("ab", 1)
    assert find_stop_string(("cd", "abcd"), "xabcd", 1) == ("abcd", 1)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_shown_text_never_has_to_be_taken_back(text, stops):
    """Growing one character at a time: what is shown is never past the start of a later match."""
    shown = 0
    for end in range(1, len(text) + 1):
        found = find_stop_string(stops, text[:end], 1)
        if found is not None:
            assert shown <= found[1]
            return
        shown = max(shown, safe_text_length(stops, text[:end]))
        assert all(not text[:shown].endswith(s) for s in stops)


@given(st.text("abc", max_size=12))
def test_nothing_is_held_without_stop_strings(text):
    assert safe_text_length((), text) == len(text)
