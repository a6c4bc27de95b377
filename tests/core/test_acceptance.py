"""Verdicts of the acceptance rules on chosen inputs: bookkeeping, guards, laziness."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foredraft.core.acceptance import Origin, Verdict, draw_from, match, rejection, residual
from foredraft.core.row_math import TorchRowMath
from foredraft.core.trees import topology

ROW_MATH = TorchRowMath()


def law_of(*rows: list[float]) -> dict[int, Tensor]:
    """Rows by node, the root's first."""
    return {node - 1: torch.tensor(row, dtype=torch.float64) for node, row in enumerate(rows)}


def test_a_verdict_never_counts_the_extra_token_as_accepted() -> None:
    verdict = Verdict((0, 1), 7, Origin.BONUS)
    assert verdict.num_accepted == 2
    assert verdict.num_emitted == 3


CHAIN = topology((-1, 0, 1))


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

    assert match(CHAIN, (5, 6, 7), draw) == Verdict(accepted, next_token, origin)
    assert asked == [-1, *accepted]


def test_match_without_a_draft_is_plain() -> None:
    assert match(topology(()), (), lambda node: 3) == Verdict((), 3, Origin.PLAIN)


def test_match_on_a_tree_goes_down_one_path() -> None:
    #      root -> 0:a, 1:b;  0 -> 2:c;  1 -> 3:c, 4:d
    tree = topology((-1, -1, 0, 1, 1))
    tokens = (10, 11, 12, 12, 13)
    said = {-1: 11, 1: 13, 4: 9, 0: 12}
    assert match(tree, tokens, said.__getitem__) == Verdict((1, 4), 9, Origin.BONUS)
    said[1] = 99
    assert match(tree, tokens, said.__getitem__) == Verdict((1,), 99, Origin.RECOVERED)


def test_only_the_argmax_child_stands_at_temperature_zero() -> None:
    """A sibling that is nearly as likely is not accepted."""
    tree = topology((-1, -1))
    row = torch.tensor([1.0, 1.0 + 1e-6, 0.0])
    verdict = match(tree, (0, 1), lambda node: ROW_MATH.argmax(row) if node == -1 else 2)
    assert verdict.accepted == (1,)


def test_rejection_asks_only_rows_that_are_reached() -> None:
    rows = law_of([0.5, 0.5], [0.5, 0.5], [0.5, 0.5])
    asked: list[int] = []

    def law(node: int) -> Tensor:
        asked.append(node)
        return rows[node]

    verdict = rejection((0, 0), law, None, [0.4, 0.6], 0.5, ROW_MATH)
    assert verdict == Verdict((0,), 1, Origin.RECOVERED)
    assert asked == [-1, 0]
    assert rejection((0, 0), law, None, lambda i: 0.4, 0.4, ROW_MATH) == Verdict(
        (0, 1), 0, Origin.BONUS
    )


def test_rejection_without_a_draft_is_plain() -> None:
    rows = law_of([0.25, 0.75])
    assert rejection((), rows.__getitem__, None, (), 0.2, ROW_MATH) == Verdict((), 0, Origin.PLAIN)
    assert rejection((), rows.__getitem__, None, (), 0.3, ROW_MATH) == Verdict((), 1, Origin.PLAIN)


def test_an_impossible_token_is_rejected_by_the_smallest_coin() -> None:
    rows = law_of([0.0, 1.0], [0.0, 1.0])
    verdict = rejection((0,), rows.__getitem__, None, [2.0**-33], 0.5, ROW_MATH)
    assert verdict == Verdict((), 1, Origin.RECOVERED)
    q = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert rejection((0,), rows.__getitem__, q, [2.0**-33], 0.5, ROW_MATH) == verdict


def test_equal_laws_accept_the_largest_coin() -> None:
    """A drafter that is the target is never rejected, whatever rounding does to p / q."""
    largest = 1.0 - 2.0**-33
    for seed in range(50):
        p = torch.rand(5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        p /= p.sum()
        for token in range(5):
            verdict = rejection((token,), lambda node, p=p: p, p[None], [largest], 0.5, ROW_MATH)
            assert verdict.num_accepted == 1


def test_a_drawn_token_of_probability_zero_is_the_drafters_fault() -> None:
    rows = law_of([0.5, 0.5], [0.5, 0.5])
    for wrong in (0.0, float("nan")):
        q = torch.tensor([[wrong, 1.0]], dtype=torch.float64)
        with pytest.raises(ValueError, match=r"token 0 at offset 0 .*draft_probs"):
            rejection((0,), rows.__getitem__, q, [0.5], 0.5, ROW_MATH)


def test_a_residual_that_vanishes_by_rounding_falls_back_to_the_target() -> None:
    p = torch.tensor([0.5, 0.5], dtype=torch.float64)
    above = torch.nextafter(p, torch.ones(2, dtype=torch.float64))  # q > p everywhere
    assert float(residual(p, 0, above[None][0]).sum()) == 0.0
    verdict = rejection((0,), lambda node: p, above[None], [1.0], 0.75, ROW_MATH)
    assert verdict == Verdict((), 1, Origin.RECOVERED)
    certain = torch.tensor([1.0, 0.0], dtype=torch.float64)
    verdict = rejection((0,), lambda node: certain, None, [1.0], 0.75, ROW_MATH)
    assert verdict == Verdict((), 0, Origin.RECOVERED)


def test_no_argument_is_written_to() -> None:
    """Two rows share storage, as rows of one pass do: writing one would change the other."""
    shared = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.2, 0.6]], dtype=torch.float64)
    before, q_before = shared.clone(), q.clone()
    for draft_probs in (None, q):
        rejection((2,), lambda node: shared[:], draft_probs, [0.99], 0.5, ROW_MATH)
        assert torch.equal(shared, before)
        assert torch.equal(q, q_before)


def test_a_float32_draft_law_is_compared_in_float64() -> None:
    p = torch.tensor([0.3, 0.7], dtype=torch.float64)
    q = p.to(torch.float32)[None]
    assert residual(p, 0, q[0]).dtype == torch.float64


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
