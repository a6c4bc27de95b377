"""The suffix drafter: by scripted sequences, through its states, and its options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from foredraft.core.errors import ConfigError
from foredraft.drafters.catalog import build_drafter
from foredraft.drafters.interface import Draft, Drafter, DraftRequest, StepResult, StepRow
from foredraft.drafters.suffix import SuffixDrafter
from foredraft.testing.requests import draft_request

V = 1000


def asked(
    tokens: Sequence[int],
    max_nodes: int = 8,
    name: str = "r",
    num_prompt: int | None = None,
    salt: str = "",
) -> DraftRequest:
    made = draft_request(list(tokens), num_prompt, max_nodes=max_nodes, vocab_size=V, name=name)
    return made._replace(cache_salt=salt)


def draft(drafter: SuffixDrafter, tokens: Sequence[int], max_nodes: int = 8, **more: Any) -> Draft:
    (made,) = drafter.propose([asked(tokens, max_nodes, **more)])
    drafter.check_integrity()
    assert made.probs is None
    assert len(made.tokens) <= max_nodes
    return made


def chain(drafter: SuffixDrafter, tokens: Sequence[int], max_nodes: int = 8) -> list[int]:
    made = draft(drafter, tokens, max_nodes)
    assert list(made.parents) == list(range(-1, len(made.tokens) - 1))
    return list(made.tokens)


def told(name: str, root: int, draft: Draft, accepted: int, next_token: int) -> StepResult:
    """What the engine says of a step that verified the chain `draft` after position `root`."""
    rows = [StepRow(root, -1, 0, True)]
    rows += [StepRow(root + 1 + i, i, t, i < accepted) for i, t in enumerate(draft.tokens)]
    return StepResult(name, rows, accepted, next_token)


def test_a_copy_is_found_whole() -> None:
    source = list(range(100, 140))
    assert chain(SuffixDrafter(), [*source, 7, *source[:10]], 20) == source[10:30]


def test_a_repetition_goes_on_with_its_own_period() -> None:
    drafter = SuffixDrafter(suffix_decoding_max_spec_factor=10)
    assert chain(drafter, [7, *[1, 2, 3] * 3], 8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_the_longest_match_is_not_always_the_best() -> None:
    """5 1 2 was followed by 3 and by 6; 1 2 was, behind other tokens, eight times by 4."""
    often = [token for i in range(8) for token in (20 + i, 1, 2, 4)]
    assert chain(SuffixDrafter(), [5, 1, 2, 3, 5, 1, 2, 6, *often, 5, 1, 2], 1) == [4]
    assert chain(SuffixDrafter(), [5, 1, 2, 3, *often[:4], 5, 1, 2], 1) == [3]


def test_nothing_is_drafted_for_what_was_never_seen() -> None:
    for tokens in ([1], [1, 2], list(range(50))):
        assert chain(SuffixDrafter(), tokens) == []


def test_a_draft_ends_where_it_becomes_unlikely() -> None:
    """1 2 was followed by ten tokens once each: none of them is worth a row."""
    tokens = [token for i in range(10) for token in (1, 2, 30 + i)] + [1, 2]
    assert chain(SuffixDrafter(suffix_decoding_min_token_prob=0.5), tokens) == []
    assert len(chain(SuffixDrafter(suffix_decoding_min_token_prob=0.01), tokens)) > 0


def test_the_length_is_bounded_by_the_match() -> None:
    tokens = [1, 2, *range(10, 40), 50, 1, 2]
    for factor, most in ((0.4, 0), (1.0, 2), (1.5, 3), (4.0, 8)):
        drafter = SuffixDrafter(
            suffix_decoding_max_spec_factor=factor, suffix_decoding_min_token_prob=0.0
        )
        assert len(chain(drafter, tokens, 20)) == most


def test_a_tree_holds_both_continuations() -> None:
    tokens = [1, 2, 3, 4, 9, 1, 2, 5, 6, 8, 1, 2]
    made = draft(SuffixDrafter(suffix_decoding_tree=True), tokens, 4)
    first = {t for t, parent in zip(made.tokens, made.parents, strict=True) if parent == -1}
    assert first == {3, 5}
    assert chain(SuffixDrafter(), tokens, 4)[:1] == [5]


def test_acceptance_changes_what_is_drafted() -> None:
    drafter = SuffixDrafter(suffix_decoding_min_token_prob=0.3)
    tokens = [1, 2, 3, 9, 1, 2]
    assert chain(drafter, tokens, 1) == [3]
    for number in range(200):
        made = draft(drafter, tokens, 1, name=str(number))
        drafter.observe([told(str(number), len(tokens) - 1, made, 0, 4)])
    assert chain(drafter, tokens, 1) == []


def test_a_history_that_changed_is_read_anew() -> None:
    drafter = SuffixDrafter()
    source = list(range(10, 30))
    assert chain(drafter, [*source, 10, 11, 12], 2) == [13, 14]
    assert chain(drafter, [*source[:10], 14, 15], 2) == [16, 17]  # shorter
    assert chain(drafter, [*source[5:], 1, 2, 3, 3, 3, 20, 21], 2) == [22, 23]  # another
    drafter.release("r")
    drafter.release("r")
    assert chain(drafter, [7, 20, 21], 2) == []


def test_requests_at_once_do_not_see_each_other() -> None:
    drafter = SuffixDrafter(suffix_decoding_max_cached_requests=0)
    first, second = drafter.propose(
        [asked([1, 2, 3, 1, 2], 1, "a"), asked([1, 2, 4, 1, 2], 1, "b")]
    )
    assert (tuple(first.tokens), tuple(second.tokens)) == ((3,), (4,))
    assert chain(drafter, [8, 1, 2], 1) == []


def test_is_in_the_catalog() -> None:
    built = build_drafter("suffix", {"suffix_decoding_tree": True})
    assert isinstance(built.drafter, Drafter)
    assert isinstance(built.drafter, SuffixDrafter)
    assert built.drafter.capabilities.tree


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be an integer of 1 or more"),
        (
            {"suffix_decoding_max_tree_depth": 0},
            "suffix_decoding_max_tree_depth must be an integer of 1 or more, got 0",
        ),
        (
            {"suffix_decoding_max_tree_depth": 257},
            "suffix_decoding_max_tree_depth must be at most 256, got 257",
        ),
        (
            {"suffix_decoding_max_cached_requests": -1},
            "suffix_decoding_max_cached_requests must be an integer of 0 or more, got -1",
        ),
        (
            {"suffix_decoding_max_cached_tokens": True},
            "suffix_decoding_max_cached_tokens must be an integer of 1 or more, got True",
        ),
        (
            {"suffix_decoding_max_spec_factor": "2"},
            "suffix_decoding_max_spec_factor must be a number from 0 to 1e\\+06, got '2'",
        ),
        (
            {"suffix_decoding_min_token_prob": 1.5},
            "suffix_decoding_min_token_prob must be a number from 0 to 1, got 1.5",
        ),
        (
            {"suffix_decoding_min_token_prob": float("nan")},
            "suffix_decoding_min_token_prob must be a number from 0 to 1, got nan",
        ),
        ({"suffix_decoding_tree": 1}, "suffix_decoding_tree must be true or false, got 1"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SuffixDrafter(**options)
