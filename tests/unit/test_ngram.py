"""The n-gram drafter: against a search by definition, at its boundaries, and by operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.core.errors import ConfigError
from foredraft.core.trees import topology
from foredraft.drafters.interface import Drafter, DraftRequest
from foredraft.drafters.ngram import NgramDrafter, NgramIndex
from foredraft.testing.requests import draft_request

V = 2**17


def request(tokens: Sequence[int], max_nodes: int = 8, id: str = "r") -> DraftRequest:  # noqa: A002
    return draft_request(tokens, max_nodes=max_nodes, vocab_size=V, name=id)


def draft(drafter: NgramDrafter, tokens: Sequence[int], max_nodes: int = 8) -> list[int]:
    (made,) = drafter.propose([request(tokens, max_nodes)])
    assert list(made.parents) == list(range(-1, len(made.tokens) - 1))
    assert made.probs is None
    return list(made.tokens)


def searched(tokens: Sequence[int], lowest: int, highest: int, match: str, limit: int) -> list[int]:
    """Prompt lookup by its definition: longest suffix first, every earlier place compared."""
    for n in range(highest, lowest - 1, -1):
        suffix = tokens[len(tokens) - n :]
        ends = [
            e for e in range(n, len(tokens)) if len(suffix) == n and tokens[e - n : e] == suffix
        ]
        if ends:
            grown = list(tokens)
            place = ends[-1] if match == "latest" else ends[0]
            for i in range(limit):
                grown.append(grown[place + i])
            return grown[len(tokens) :]
    return []


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    cuts=st.lists(st.integers(1, 60), max_size=6),
    lowest=st.integers(1, 3),
    more=st.integers(0, 3),
    match=st.sampled_from(["latest", "earliest"]),
    limit=st.integers(1, 9),
)
def test_equals_the_search_by_definition_however_the_tokens_arrive(
    tokens: list[int], cuts: list[int], lowest: int, more: int, match: str, limit: int
) -> None:
    drafter = NgramDrafter(4, lowest, lowest + more, match)
    for end in sorted({cut for cut in cuts if cut < len(tokens)} | {len(tokens)}):
        expected = searched(tokens[:end], lowest, lowest + more, match, limit)
        assert draft(drafter, tokens[:end], limit) == expected
    drafter.check_integrity()


def test_a_repetition_goes_on_with_its_own_period() -> None:
    tokens = [7, 1, 2, 3, 1, 2, 3, 1, 2, 3]
    assert draft(NgramDrafter(), tokens, 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert draft(NgramDrafter(), [9, 5, 5, 5], 4) == [5, 5, 5, 5]


def test_latest_and_earliest_continue_different_places() -> None:
    tokens = [1, 2, 3, 1, 2, 4, 1, 2]
    assert draft(NgramDrafter(prompt_lookup_match="latest"), tokens, 1) == [4]
    assert draft(NgramDrafter(prompt_lookup_match="earliest"), tokens, 1) == [3]


def test_the_longest_match_goes_before_a_later_shorter_one() -> None:
    tokens = [5, 1, 2, 3, 6, 2, 3, 8, 5, 1, 2, 3]
    assert draft(NgramDrafter(4, 2, 3), tokens, 1) == [6]
    assert draft(NgramDrafter(4, 2, 2), tokens, 1) == [8]


@pytest.mark.parametrize("tokens", [[1], [1, 1], [1, 2], [1, 2, 3, 4, 5]])
def test_the_suffix_never_matches_itself(tokens: list[int]) -> None:
    assert draft(NgramDrafter(4, 2, 4), tokens) == []


def test_never_more_than_max_nodes() -> None:
    for limit in (1, 2, 30):
        assert len(draft(NgramDrafter(), [1, 2, 3] * 4, limit)) == limit


def test_requests_do_not_see_each_other_and_release_forgets() -> None:
    drafter = NgramDrafter()
    first, second = drafter.propose(
        [request([1, 2, 3, 1, 2], 1, "a"), request([1, 2, 4, 1, 2], 1, "b")]
    )
    assert (first.tokens, second.tokens) == ((3,), (4,))
    drafter.release("a")
    drafter.release("a")
    assert draft_of(drafter, [9, 1, 2], "a") == ()
    assert draft_of(drafter, [1, 2, 4, 1, 2, 4], "b") == (1,)


def draft_of(drafter: NgramDrafter, tokens: list[int], id: str) -> tuple[int, ...]:  # noqa: A002
    return tuple(drafter.propose([request(tokens, 1, id)])[0].tokens)


def test_steps_without_a_draft_are_caught_up() -> None:
    drafter = NgramDrafter()
    tokens = [1, 2, 3, 4]
    draft(drafter, tokens)
    tokens += [9, 1, 2, 8, 5, 6, 1, 2]
    assert draft(drafter, tokens, 2) == [8, 5]


def test_is_a_drafter() -> None:
    assert isinstance(NgramDrafter(), Drafter)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be an integer of 1 or more"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min must be an integer of 1 or more, got 0"),
        ({"prompt_lookup_max": "3"}, "prompt_lookup_max must be an integer of 1 or more, got '3'"),
        ({"prompt_lookup_min": True}, "prompt_lookup_min must be an integer"),
        (
            {"prompt_lookup_min": 5, "prompt_lookup_max": 3},
            "prompt_lookup_min must be at most prompt_lookup_max = 3, got 5",
        ),
        (
            {"prompt_lookup_match": "first"},
            "prompt_lookup_match must be one of latest, earliest, got 'first'",
        ),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NgramDrafter(**options)


def test_a_lookup_is_no_longer_than_64_tokens() -> None:
    NgramDrafter(prompt_lookup_min=64, prompt_lookup_max=64)
    for options in ({"prompt_lookup_max": 65}, {"prompt_lookup_min": 20_000}):
        with pytest.raises(ConfigError, match="must be at most 64, got"):
            NgramDrafter(**options)


def test_the_draft_length_is_a_wish_and_max_nodes_the_rule() -> None:
    drafter = NgramDrafter(num_speculative_tokens=2)
    assert drafter.capabilities.num_speculative_tokens == 2
    assert len(draft(drafter, [1, 2, 3, 1, 2], 5)) == 5


def test_a_single_bound_moves_the_other_default_to_it() -> None:
    assert NgramDrafter(prompt_lookup_max=1).options.prompt_lookup_min == 1
    assert NgramDrafter(prompt_lookup_min=6).options.prompt_lookup_max == 6


class Operations:
    """How often tokens were hashed or compared, and how many were read from sequences."""

    def __init__(self) -> None:
        self.count = 0


def counting_tokens(operations: Operations, tokens: Sequence[int]) -> list[int]:
    class CountingToken(int):
        def __hash__(self) -> int:
            operations.count += 1
            return int.__hash__(self)

        def __eq__(self, other: object) -> bool:
            operations.count += 1
            return int.__eq__(self, other)

    class CountingList(list[int]):
        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            operations.count += len(found) if isinstance(key, slice) else 1
            return found

        def __iter__(self) -> Iterator[int]:
            for token in super().__iter__():
                operations.count += 1
                yield token

    return CountingList([CountingToken(t) for t in tokens])


def operations_per_step(length: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most operations of one step after the first, at a context of `length` without a match."""
    operations = Operations()
    tokens = counting_tokens(operations, range(length))
    make_empty = NgramIndex.__init__

    def make_counting(index: NgramIndex, *arguments: Any) -> None:
        make_empty(index, *arguments)
        index.tokens = counting_tokens(operations, [])

    monkeypatch.setattr(NgramIndex, "__init__", make_counting)
    drafter = NgramDrafter()
    asked = request([0])._replace(tokens=tokens)  # made without reading the counted tokens
    assert not drafter.propose([asked])[0].tokens
    assert operations.count >= length
    worst = 0
    for step in range(20):
        tokens.extend(counting_tokens(operations, [length + step]))
        operations.count = 0
        assert not drafter.propose([asked])[0].tokens
        worst = max(worst, operations.count)
    return worst


def test_a_step_costs_the_same_at_any_context_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported fault 60, in operations: 50,000 tokens without a match."""
    short = operations_per_step(50, monkeypatch)
    assert operations_per_step(50_000, monkeypatch) == short
    assert short <= 100


def tree(drafter: NgramDrafter, tokens: Sequence[int], nodes: int) -> tuple[list[int], list[int]]:
    (made,) = drafter.propose([request(tokens, nodes)])
    topology(tuple(made.parents))
    siblings = list(zip(made.parents, made.tokens, strict=True))
    assert len(set(siblings)) == len(siblings)
    return list(made.tokens), list(made.parents)


def test_several_matches_share_what_they_have_in_common() -> None:
    drafter = NgramDrafter(prompt_lookup_min=2, prompt_lookup_num_matches=2)
    assert drafter.capabilities.tree
    # After 1 2: first 3 4 5, then 3 6 7, which is the latest.
    tokens = [1, 2, 3, 4, 5, 9, 1, 2, 3, 6, 7, 9, 8, 1, 2]
    assert tree(drafter, tokens, 3) == ([3, 6, 7], [-1, 0, 1])
    assert tree(drafter, tokens, 6) == ([3, 6, 7, 9, 8, 4], [-1, 0, 1, 2, 3, 0])
    assert tree(drafter, tokens, 0) == ([], [])


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=50),
    cut=st.integers(1, 50),
    count=st.integers(2, 6),
    nodes=st.integers(1, 12),
)
def test_every_branch_of_a_tree_continues_a_match(
    tokens: list[int], cut: int, count: int, nodes: int
) -> None:
    drafter = NgramDrafter(4, 1, 3, prompt_lookup_num_matches=count)
    tree(drafter, tokens[:cut], nodes)
    made, parents = tree(drafter, tokens, nodes)
    drafter.check_integrity()
    ends: list[int] = []
    for n in (3, 2, 1):
        suffix = tokens[-n:]
        places = [e for e in range(n, len(tokens)) if tokens[e - n : e] == suffix]
        ends += [e for e in reversed(places) if len(suffix) == n and e not in ends]
    branches = [list(tokens) for _ in ends[:count]]
    for branch, end in zip(branches, ends[:count], strict=True):
        for i in range(nodes):
            branch.append(branch[end + i])
    continued = [branch[len(tokens) :] for branch in branches]
    shape = topology(tuple(parents))
    for node in range(len(made)):
        path = [made[each] for each in shape.path(node)]
        assert any(branch[: len(path)] == path for branch in continued)
    # The best match is followed first, and no node that could be had is left out.
    different = {tuple(branch[:d]) for branch in continued for d in range(1, nodes + 1)}
    assert len(made) == min(nodes, len(different))
    if made:
        assert made[0] in {branch[0] for branch in continued}


def test_one_match_as_a_tree_is_the_chain() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 1, 2]
    many = NgramDrafter(prompt_lookup_num_matches=8)
    assert tree(many, tokens, 4) == ([3, 4, 5, 6], [-1, 0, 1, 2])
    assert draft(NgramDrafter(), tokens, 4) == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_lookup_num_matches": 0}, "prompt_lookup_num_matches must be an integer of 1"),
        ({"prompt_lookup_num_matches": 17}, "at most 16, got 17"),
        (
            {"prompt_lookup_num_matches": 2, "prompt_lookup_match": "earliest"},
            "needs prompt_lookup_match 'latest', got 'earliest'",
        ),
    ],
)
def test_several_matches_are_bounded(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NgramDrafter(**options)
