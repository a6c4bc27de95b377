"""Rejection on chosen inputs: laziness, guards, and the chain rule as the papers write it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.core.acceptance import Origin, Verdict, decide, draw_from
from foredraft.core.rejection import rejection, residual
from foredraft.core.row_math import TorchRowMath
from foredraft.core.trees import chain, topology
from foredraft.testing.tables import KINDS, random_law

ROW_MATH = TorchRowMath()
LARGEST = 1.0 - 2.0**-33


def law_of(*rows: list[float]) -> dict[int, Tensor]:
    """Rows by node, the root's first."""
    return {node - 1: torch.tensor(row, dtype=torch.float64) for node, row in enumerate(rows)}


def judged(
    tokens: Sequence[int],
    laws: dict[int, Tensor],
    probs: Tensor | None,
    coins: Sequence[float],
    residual_coin: float = 0.5,
    parents: tuple[int, ...] | None = None,
) -> Verdict:
    tree = chain(len(tokens)) if parents is None else topology(parents)
    walk = rejection(tree, tokens, probs, coins.__getitem__, residual_coin, ROW_MATH)
    return decide(walk, laws.__getitem__)


def as_published(
    tokens: Sequence[int],
    laws: dict[int, Tensor],
    probs: Tensor | None,
    coins: Sequence[float],
    residual_coin: float,
) -> Verdict:
    """Speculative sampling of a chain, written down once more (2211.17192, algorithm 1)."""
    for offset, token in enumerate(tokens):
        p = laws[offset - 1]
        q = torch.zeros_like(p) if probs is None else probs[offset].double()
        if probs is None:
            q[token] = 1.0
        if coins[offset] * float(q[token]) < float(p[token]):
            continue
        rest = (p - q).clamp(min=0.0)
        token = draw_from(rest, residual_coin, ROW_MATH, fallback=p)
        return Verdict(tuple(range(offset)), token, Origin.RECOVERED)
    token = draw_from(laws[len(tokens) - 1], residual_coin, ROW_MATH)
    origin = Origin.BONUS if tokens else Origin.PLAIN
    return Verdict(tuple(range(len(tokens))), token, origin)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(KINDS),
    st.sampled_from(KINDS),
    st.integers(0, 4),
    st.sampled_from(["drawn", "float32", "fixed"]),
)
def test_a_chain_is_judged_as_published_to_the_bit(
    seed: int, target_kind: str, draft_kind: str, length: int, kind: str
) -> None:
    """A chain is the tree of single children: no coin, and no rounding, makes a difference."""
    target, draft = random_law(seed, 6, target_kind), random_law(seed + 1, 6, draft_kind)
    generator = torch.Generator().manual_seed(seed)
    coins = torch.rand(length + 1, generator=generator, dtype=torch.float64).tolist()
    tokens: list[int] = []
    rows: list[Tensor] = []
    for _ in range(length):
        rows.append(draft(tuple(tokens)))
        tokens.append(int(torch.multinomial(rows[-1], 1, generator=generator)))
    probs = torch.stack(rows) if rows else None
    if kind == "float32" and probs is not None:
        probs = probs.to(torch.float32)
    if kind == "fixed" or (probs is not None and not (probs[range(length), tokens] > 0).all()):
        probs = None
    laws = {node: target(tuple(tokens[: node + 1])) for node in range(-1, length)}
    expected = as_published(tokens, laws, probs, coins, coins[-1])
    assert judged(tokens, laws, probs, coins, coins[-1]) == expected


def test_only_rows_that_are_reached_are_asked_for() -> None:
    rows = law_of([0.5, 0.5], [0.5, 0.5], [0.5, 0.5])
    asked: list[int] = []

    def law(node: int) -> Tensor:
        asked.append(node)
        return rows[node]

    walk = rejection(chain(2), (0, 0), None, [0.4, 0.6].__getitem__, 0.5, ROW_MATH)
    assert decide(walk, law) == Verdict((0,), 1, Origin.RECOVERED)
    assert asked == [-1, 0]
    walk = rejection(chain(2), (0, 0), None, lambda node: 0.4, 0.4, ROW_MATH)
    assert decide(walk, law) == Verdict((0, 1), 0, Origin.BONUS)


def test_without_a_draft_it_is_plain() -> None:
    rows = law_of([0.25, 0.75])
    assert judged((), rows, None, (), 0.2) == Verdict((), 0, Origin.PLAIN)
    assert judged((), rows, None, (), 0.3) == Verdict((), 1, Origin.PLAIN)


def test_siblings_are_tried_in_order_and_share_nothing_but_the_residual() -> None:
    """p = (.5, .3, .2): after the rejection of 0, 1 stands with .3 / .5; after both, 2 is left."""
    rows = law_of([0.5, 0.3, 0.2], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0])
    both = (-1, -1)
    assert judged((0, 1), rows, None, [0.49, 0.9], parents=both).accepted == (0,)
    assert judged((0, 1), rows, None, [0.51, 0.59], parents=both).accepted == (1,)
    verdict = judged((0, 1), rows, None, [0.51, 0.61], parents=both)
    assert verdict == Verdict((), 2, Origin.RECOVERED)


def test_one_hot_rows_and_no_rows_are_the_same() -> None:
    rows = law_of([0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.1, 0.1, 0.8], [0.3, 0.3, 0.4])
    tokens, parents = (0, 1, 2), (-1, -1, 0)
    one_hot = torch.eye(3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        *coins, last = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
        bare = judged(tokens, rows, None, coins, last, parents)
        assert judged(tokens, rows, one_hot, coins, last, parents) == bare


def test_an_impossible_token_is_rejected_by_the_smallest_coin() -> None:
    rows = law_of([0.0, 1.0], [0.0, 1.0], [0.0, 1.0])
    verdict = judged((0,), rows, None, [2.0**-33])
    assert verdict == Verdict((), 1, Origin.RECOVERED)
    q = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    assert judged((0,), rows, q, [2.0**-33]) == verdict
    twice = judged((0, 0), rows, q, [2.0**-33, 2.0**-33], parents=(-1, -1))
    assert twice == verdict


def test_a_rejected_token_does_not_stand_as_its_own_sibling() -> None:
    rows = law_of([0.5, 0.3, 0.2], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0])
    assert judged((0, 0), rows, None, [0.51, 2.0**-33], parents=(-1, -1)).accepted == ()
    q = torch.tensor([[0.8, 0.1, 0.1]] * 2, dtype=torch.float64)
    assert judged((0, 0), rows, q, [0.9, 2.0**-33], parents=(-1, -1)).accepted == ()


def test_equal_laws_accept_the_largest_coin() -> None:
    """A drafter that is the target is never rejected, whatever rounding does to p / q."""
    for seed in range(50):
        p = torch.rand(5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        p /= p.sum()
        for token in range(5):
            assert judged((token,), {-1: p, 0: p}, p[None], [LARGEST]).num_accepted == 1


def test_a_drawn_token_of_probability_zero_is_the_drafters_fault() -> None:
    rows = law_of([0.5, 0.5], [0.5, 0.5])
    for wrong in (0.0, float("nan")):
        q = torch.tensor([[wrong, 1.0]], dtype=torch.float64)
        with pytest.raises(ValueError, match=r"token 0 at node 0 .*draft_probs"):
            judged((0,), rows, q, [0.5])


def test_a_residual_that_vanishes_by_rounding_falls_back_to_the_target() -> None:
    p = torch.tensor([0.5, 0.5], dtype=torch.float64)
    above = torch.nextafter(p, torch.ones(2, dtype=torch.float64))  # q > p everywhere
    assert float(residual(p, 0, above).sum()) == 0.0
    verdict = judged((0,), {-1: p}, above[None], [1.0], 0.75)
    assert verdict == Verdict((), 1, Origin.RECOVERED)
    siblings = judged((0, 1), {-1: p}, above.repeat(2, 1), [1.0, 0.5], 0.75, (-1, -1))
    assert siblings == verdict
    certain = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert judged((0,), {-1: certain}, None, [1.0], 0.75) == Verdict((), 0, Origin.RECOVERED)


def test_no_argument_is_written_to() -> None:
    """Two rows share storage, as rows of one pass do: writing one would change the other
    (vllm-ascend#2881).
    """
    shared = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.2, 0.6]] * 3, dtype=torch.float64)
    before, q_before = shared.clone(), q.clone()
    laws = {-1: shared[:], 0: shared[:], 1: shared[:], 2: shared[:]}
    for draft_probs in (None, q):
        for parents in ((-1, 0, 1), (-1, -1, -1)):
            judged((2, 0, 2), laws, draft_probs, [0.99, 0.99, 0.99], 0.5, parents)
            assert torch.equal(shared, before)
            assert torch.equal(q, q_before)


def test_a_float32_draft_law_is_compared_in_float64() -> None:
    p = torch.tensor([0.3, 0.7], dtype=torch.float64)
    q = p.to(torch.float32)
    assert residual(p, 0, q).dtype == torch.float64


def test_every_worker_with_the_same_coins_decides_the_same() -> None:
    """Two workers judge the same rows apart: one shared decision, by arguments alone
    (vllm#17498).
    """
    target, draft = random_law(1, 5), random_law(2, 5)
    tokens, parents = (0, 1, 2, 3), (-1, -1, 0, 0)
    laws = {node: target((node + 1,)) for node in range(-1, 4)}
    probs = torch.stack([draft((node,)) for node in range(4)])
    generator = torch.Generator().manual_seed(4)
    for _ in range(50):
        *coins, last = torch.rand(5, generator=generator, dtype=torch.float64).tolist()
        workers = [judged(tokens, laws, probs, coins, last, parents) for _ in range(2)]
        assert workers[0] == workers[1]
