"""How far a student's law is from the target's, row by row, and what later drafts weigh.

Knows laws; knows no model, no batch and no file. Shapes: N rows, D ids that the student drafts,
S drafts of a chain. The target's law p comes as log-probabilities over those D ids out of its whole
vocabulary, so a row of p sums to less than 1 where the target may say something else; the student's
law q, as log-probabilities too, sums to 1. All results are `[N]`, in the dtype of q.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LOSSES = ("kl", "cross_entropy", "tv", "hybrid")
WEIGHTINGS = ("decay", "survival")
_HYBRID_RATE = 3.0  # of the LK hybrid, 2602.23881


def cross_entropy(logprobs: Tensor, labels: Tensor) -> Tensor:
    """`-log q(label)` for labels `[N]` in 0..D-1."""
    return F.nll_loss(logprobs, labels, reduction="none")


def kl(target_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """`sum p' log(p' / q)` with p' = p renormalised over the D ids (EAGLE-3, 2503.01840)."""
    p = target_logprobs.exp()
    mass = p.sum(-1)
    finite = target_logprobs.clamp(min=torch.finfo(p.dtype).min)  # 0 log 0 is 0
    return (p * (finite - logprobs)).sum(-1) / mass - mass.log()


def acceptance(target_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """`sum min(p, q)`: how likely rejection sampling keeps a token drawn from q (2211.17192)."""
    return torch.minimum(target_logprobs, logprobs).exp().sum(-1)


def total_variation(target_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """`1 - sum min(p, q)`; half of `sum |p - q|` where p sums to 1."""
    return 1.0 - acceptance(target_logprobs, logprobs)


def hybrid(target_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """`w KL + (1 - w) TV` with `w = exp(-3 a)` of each row's own acceptance a, held constant.

    Total variation has no gradient where laws are disjoint, so that KL leads until they overlap
    (2602.23881, whose w comes of a batch's acceptance).
    """
    distance = total_variation(target_logprobs, logprobs)
    weight = torch.exp(-_HYBRID_RATE * (1.0 - distance.detach()))
    return weight * kl(target_logprobs, logprobs) + (1.0 - weight) * distance


def row_losses(kind: str, target_logprobs: Tensor, logprobs: Tensor, labels: Tensor) -> Tensor:
    """The loss called `kind` (one of `LOSSES`) of each row. Raises ValueError for another."""
    match kind:
        case "kl":
            return kl(target_logprobs, logprobs)
        case "cross_entropy":
            return cross_entropy(logprobs, labels)
        case "tv":
            return total_variation(target_logprobs, logprobs)
        case "hybrid":
            return hybrid(target_logprobs, logprobs)
    raise ValueError(f"unknown loss {kind!r}; valid are {', '.join(LOSSES)}")


def step_weights(kind: str, acceptances: Tensor, decay: float) -> Tensor:
    """`[S, N]`: what each draft of a chain weighs, without gradient.

    Args:
        kind: "decay": `decay^s`, whatever happened before; "survival": times the chance that all
            drafts before it are accepted, as a draft counts only then.
        acceptances: `[S, N]`, of each draft by itself.
    """
    steps = torch.arange(len(acceptances), device=acceptances.device, dtype=acceptances.dtype)
    weights = (decay**steps)[:, None].expand_as(acceptances)
    if kind == "decay":
        return weights
    if kind != "survival":
        raise ValueError(f"unknown weighting {kind!r}; valid are {', '.join(WEIGHTINGS)}")
    before = torch.cat([torch.ones_like(acceptances[:1]), acceptances[:-1].detach()])
    return weights * before.cumprod(0)
