"""Walks: what they ask for, how many go side by side, what `match` and the draw of a token say."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from foredraft.core.acceptance import (
    BadRow,
    Origin,
    Verdict,
    Walk,
    decide,
    decide_all,
    draw_from,
    match,
)
from foredraft.core.row_math import TorchRowMath
from foredraft.core.trees import chain, topology

ROW_MATH = TorchRowMath()


def test_a_verdict_never_counts_the_extra_token_as_accepted() -> None:
    verdict = Verdict((0, 1), 7, Origin.BONUS)
    assert verdict.num_accepted == 2
    assert verdict.num_emitted == 3


@pytest.mark.parametrize(
    ("said", "accepted", "next_token", "origin"),
    [
        ([5, 6, 7, 8], (0, 1, 2), 8, Origin.BONUS),
        ([5, 6, 0, 8], (0, 1), 0, Origin.RECOVERED),
        ([5, 0, 7, 8], (0,), 0, Origin.RECOVERED),
        ([0, 6, 7, 8], (), 0, Origin.RECOVERED),
    ],
)
def test_match_on_a_chain_asks_only_rows_that_decide(
    said: list[int], accepted: tuple[int, ...], next_token: int, origin: Origin
) -> None:
    asked: list[int] = []

    def draw(node: int) -> int:
        asked.append(node)
        return said[node + 1]

    assert decide(match(chain(3), (5, 6, 7)), draw) == Verdict(accepted, next_token, origin)
    assert asked == [-1, *accepted]


def test_match_without_a_draft_is_plain() -> None:
    assert decide(match(topology(()), ()), lambda node: 3) == Verdict((), 3, Origin.PLAIN)


def test_match_on_a_tree_goes_down_one_path() -> None:
    #      root -> 0:a, 1:b;  0 -> 2:c;  1 -> 3:c, 4:d
    tree = topology((-1, -1, 0, 1, 1))
    tokens = (10, 11, 12, 12, 13)
    said = {-1: 11, 1: 13, 4: 9, 0: 12}
    verdict = decide(match(tree, tokens), said.__getitem__)
    assert verdict == Verdict((1, 4), 9, Origin.BONUS)
    said[1] = 99
    verdict = decide(match(tree, tokens), said.__getitem__)
    assert verdict == Verdict((1,), 99, Origin.RECOVERED)


def test_only_the_argmax_child_stands_at_temperature_zero() -> None:
    """A sibling that is nearly as likely is not accepted (EAGLE#301)."""
    tree = topology((-1, -1))
    row = torch.tensor([1.0, 1.0 + 1e-6, 0.0])
    verdict = decide(match(tree, (0, 1)), lambda node: int(row.argmax()) if node == -1 else 2)
    assert verdict.accepted == (1,)


def test_walks_go_side_by_side_and_each_round_asks_once_per_walk() -> None:
    drafts = [(5, 6, 7), (), (5,), (9, 9)]
    said = [[5, 6, 7, 8], [1], [5, 2], [0, 0, 0]]
    rounds: list[list[tuple[int, int]]] = []

    def answer(asked: Sequence[tuple[int, int]]) -> list[int]:
        rounds.append(list(asked))
        return [said[index][node + 1] for index, node in asked]

    verdicts = decide_all([match(chain(len(draft)), draft) for draft in drafts], answer)
    assert verdicts == [
        Verdict((0, 1, 2), 8, Origin.BONUS),
        Verdict((), 1, Origin.PLAIN),
        Verdict((0,), 2, Origin.BONUS),
        Verdict((), 0, Origin.RECOVERED),
    ]
    assert rounds == [
        [(0, -1), (1, -1), (2, -1), (3, -1)],
        [(0, 0), (2, 0)],
        [(0, 1)],
        [(0, 2)],
    ]


def test_no_walks_ask_for_nothing() -> None:
    assert decide_all([], lambda asked: pytest.fail("asked")) == []


def test_a_bad_row_ends_its_own_walk_alone() -> None:
    def answer(asked: Sequence[tuple[int, int]]) -> list[int | BadRow]:
        return [BadRow(node, "bad") if (index, node) == (1, 0) else 5 for index, node in asked]

    first, second, third = decide_all([match(chain(2), (5, 5)) for _ in range(3)], answer)
    assert first == third == Verdict((0, 1), 5, Origin.BONUS)
    assert isinstance(second, BadRow)
    assert (second.node, str(second)) == (0, "bad")


def test_one_request_raises_what_the_answer_raises() -> None:
    def bad(node: int) -> int:
        raise BadRow(node, "bad")

    with pytest.raises(BadRow, match="bad"):
        decide(match(chain(1), (5,)), bad)
    with pytest.raises(ZeroDivisionError):
        decide(match(chain(1), (5,)), lambda node: 1 // 0)


def test_a_walk_that_knows_what_to_do_about_a_bad_row_goes_on() -> None:
    def careful() -> Walk[int]:
        try:
            token = yield 3
        except BadRow:
            token = yield -1
        return Verdict((), token, Origin.PLAIN)

    def answer(node: int) -> int:
        if node == 3:
            raise BadRow(node, "bad")
        return 7

    assert decide(careful(), answer) == Verdict((), 7, Origin.PLAIN)


def test_drawing_is_by_the_running_sum_in_id_order() -> None:
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    drawn = [draw_from(weights, coin, ROW_MATH) for coin in (1e-12, 0.6666, 0.6667, 1.0 - 2**-33)]
    assert drawn == [1, 1, 3, 3]


def test_drawing_never_leaves_the_support() -> None:
    tiny = torch.tensor([0.0, 5e-324, 0.0], dtype=torch.float64)
    for coin in (0.4, 0.6, 1.0 - 2.0**-33):
        assert draw_from(tiny, coin, ROW_MATH) == 1
    with pytest.raises(ValueError, match="add up to 0"):
        draw_from(torch.zeros(3, dtype=torch.float64), 0.5, ROW_MATH)
    with pytest.raises(ValueError, match="add up to nan"):
        draw_from(torch.full((3,), float("nan"), dtype=torch.float64), 0.5, ROW_MATH)
    assert draw_from(torch.zeros(3, dtype=torch.float64), 0.5, ROW_MATH, fallback=tiny) == 1
