"""Losses against their closed forms at float64, their gradients, and what drafts weigh."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from foredraft.training.losses import (
    LOSSES,
    acceptance,
    cross_entropy,
    hybrid,
    kl,
    row_losses,
    step_weights,
    total_variation,
)

ROWS, SIZE, WHOLE = 6, 5, 9


@pytest.fixture
def laws() -> tuple[Tensor, Tensor]:
    """p over 5 of 9 ids and a student's law, as log-probabilities."""
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(ROWS, WHOLE, generator=generator, dtype=torch.float64) * 2
    logits = torch.randn(ROWS, SIZE, generator=generator, dtype=torch.float64) * 2
    return whole.log_softmax(-1)[:, :SIZE], logits.log_softmax(-1)


def _plain(logprobs: Tensor, logits: Tensor) -> list[tuple[list[float], list[float]]]:
    """p and q of each row as lists."""
    p, q = logprobs.exp().tolist(), logits.softmax(-1).tolist()
    return list(zip(p, q, strict=True))


def test_kl_is_that_of_the_renormalised_target(laws: tuple[Tensor, Tensor]) -> None:
    expected = []
    for p, q in _plain(*laws):
        total = sum(p)
        expected.append(sum(x / total * math.log(x / total / y) for x, y in zip(p, q, strict=True)))
    assert kl(*laws).tolist() == pytest.approx(expected, rel=1e-12)


def test_acceptance_and_total_variation_are_of_the_whole_vocabulary(
    laws: tuple[Tensor, Tensor],
) -> None:
    for row, (p, q) in enumerate(_plain(*laws)):
        outside = 1.0 - sum(p)
        distance = (sum(abs(x - y) for x, y in zip(p, q, strict=True)) + outside) / 2
        assert float(total_variation(*laws)[row]) == pytest.approx(distance, abs=1e-12)
        assert float(acceptance(*laws)[row]) == pytest.approx(1 - distance, abs=1e-12)


def test_cross_entropy_is_of_the_label(laws: tuple[Tensor, Tensor]) -> None:
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    expected = [-math.log(q[i]) for (_, q), i in zip(_plain(*laws), labels.tolist(), strict=True)]
    assert cross_entropy(laws[1], labels).tolist() == pytest.approx(expected, rel=1e-12)


def test_the_hybrid_is_kl_far_away_and_total_variation_close_by(
    laws: tuple[Tensor, Tensor],
) -> None:
    weight = torch.exp(-3 * acceptance(*laws))
    expected = weight * kl(*laws) + (1 - weight) * total_variation(*laws)
    assert torch.allclose(hybrid(*laws), expected, rtol=1e-12)


@pytest.mark.parametrize("kind", LOSSES)
def test_gradients(kind: str, laws: tuple[Tensor, Tensor]) -> None:
    logprobs, logits = laws
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    if kind == "hybrid":  # its weight is held constant, which differences of it would not see
        weight = torch.exp(-3 * acceptance(logprobs, logits))
        leaf = logits.clone().requires_grad_()
        (found,) = torch.autograd.grad(hybrid(logprobs, leaf).sum(), leaf)
        parts = weight * kl(logprobs, leaf) + (1 - weight) * total_variation(logprobs, leaf)
        (expected,) = torch.autograd.grad(parts.sum(), leaf)
        assert torch.allclose(found, expected, rtol=1e-12)
        return
    leaf = logits.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: row_losses(kind, logprobs, x, labels), (leaf,))


def test_the_gradient_of_total_variation_is_its_closed_form() -> None:
    """`q_y (1[q_y > p_y] - sum_x q_x 1[q_x > p_x])`."""
    generator = torch.Generator().manual_seed(1)
    p = torch.randn(1, SIZE, generator=generator, dtype=torch.float64).softmax(-1)
    leaf = torch.randn(1, SIZE, generator=generator, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(total_variation(p.log(), leaf.log_softmax(-1)).sum(), leaf)
    q = leaf.detach().softmax(-1)
    above = (q > p).double()
    assert torch.allclose(found, q * (above - (q * above).sum()), rtol=1e-10)


@pytest.mark.parametrize("kind", LOSSES)
def test_ids_that_the_target_never_says_are_no_trouble(kind: str) -> None:
    logprobs = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    logits = torch.tensor([[0.5, 0.1, -0.2]], requires_grad=True)
    loss = row_losses(kind, logprobs, logits.log_softmax(-1), torch.tensor([0]))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["kl", "tv", "hybrid"])
def test_a_perfect_student_has_nothing_to_lose(kind: str) -> None:
    logits = torch.randn(4, SIZE, dtype=torch.float64)
    law = logits.log_softmax(-1)
    loss = row_losses(kind, law, law, torch.zeros(4, dtype=torch.int64))
    assert loss.tolist() == pytest.approx([0.0] * 4, abs=1e-12)


def test_an_unknown_loss_is_named() -> None:
    with pytest.raises(ValueError, match="'mse'; valid are kl"):
        row_losses("mse", torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))


def test_weights_of_later_drafts() -> None:
    kept = torch.tensor([[0.5, 1.0], [0.8, 0.0], [0.3, 0.7]])
    decayed = [[1.0, 1.0], [0.8, 0.8], [0.64, 0.64]]
    reached = [[1.0, 1.0], [0.8 * 0.5, 0.8], [0.64 * 0.5 * 0.8, 0.0]]
    assert torch.allclose(step_weights("decay", kept, 0.8), torch.tensor(decayed))
    assert torch.allclose(step_weights("survival", kept, 0.8), torch.tensor(reached))
    with pytest.raises(ValueError, match="valid are decay, survival"):
        step_weights("none", kept, 0.8)
