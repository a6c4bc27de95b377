"""What wrong rules and wrong draft laws would say first, exactly: what the test must see.

Knows p and q as rows of probabilities; knows no coin, no model and no test. Each law is the
closed form of a mistake somebody made (`foredraft.testing.mutants` holds most of them as rules).
"""

from __future__ import annotations

import torch
from torch import Tensor


def mutant_laws(
    target_probs: Tensor, draft_probs: Tensor, temperature: float, *, sampled: bool
) -> dict[str, Tensor]:
    """Laws `[V]` of the first token under each mistake, by its name.

    Args:
        target_probs: `[V]` p.
        draft_probs: `[V]` q, one-hot where the draft is not `sampled`.
        temperature: that q was drawn at.
    """
    p, q = target_probs.double(), draft_probs.double()
    kept = torch.minimum(p, q)
    rejected = 1.0 - kept.sum()
    laws = {
        "no residual": kept + rejected * p,
        "residual swapped": kept + rejected * _normalised((q - p).clamp(min=0.0)),
        "inverted ratio": _inverted_ratio(p, q),
        "argmax match": torch.zeros_like(p).index_fill_(0, p.argmax(), 1.0),
        "double softmax": torch.softmax(p, dim=0),
        "acceptance coin reused for the residual": _reused_for_residual(p, q),
    }
    if sampled:
        laws["residual from p"] = kept + _without_rejected(p, (q - p).clamp(min=0.0))
        laws["draft coin reused for acceptance"] = _reused_for_acceptance(p, q)
        # q is claimed, and drawn at temperature 1 (at 0.8 where it is claimed at 1).
        power = temperature if temperature != 1.0 else 1.25
        laws["draft drawn at another temperature"] = emitted(p, q, _normalised(q**power))
    return laws


def emitted(target_probs: Tensor, claimed: Tensor, drawn: Tensor) -> Tensor:
    """The law of the exact rule for `claimed` where drafts come from another law, `drawn`."""
    accepted = drawn * (target_probs / claimed.clamp(min=1e-300)).clamp(max=1.0)
    left_over = _normalised((target_probs - claimed).clamp(min=0.0))
    return accepted + (1.0 - accepted.sum()) * left_over


def _inverted_ratio(p: Tensor, q: Tensor) -> Tensor:
    """Accepted with min(1, q / p)."""
    accepted = q * (q / p.clamp(min=1e-300)).clamp(max=1.0)
    return accepted + (1.0 - accepted.sum()) * _normalised((p - q).clamp(min=0.0))


def _without_rejected(p: Tensor, rejections: Tensor) -> Tensor:
    """After token x is rejected, p without x: `sum_x r(x) p(y) [y != x] / (1 - p(x))`."""
    weights = rejections / (1.0 - p).clamp(min=1e-300)
    return p * (weights.sum() - weights)


def _reused_for_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """The coin u that drew x, `F(x) - q(x) <= u < F(x)`, accepts it too: iff `u q(x) < p(x)`."""
    end = torch.cumsum(q, dim=0)
    limit = torch.where(q > 0, p / q.clamp(min=1e-300), torch.zeros_like(p))
    accepted = torch.minimum((limit - (end - q)).clamp(min=0.0), q)
    left_over = _normalised((p - q).clamp(min=0.0))
    return accepted + (1.0 - accepted.sum()) * left_over


def _reused_for_residual(p: Tensor, q: Tensor) -> Tensor:
    """The coin u that rejected x, `u >= a(x) = min(1, p / q)`, draws from the residual too.

    y gets the u of its part of (0, 1) in the residual's running sum R, for each x that u rejects:
    `H(R(y)) - H(R(y) - r(y))` with `H(t) = sum_x q(x) (t - a(x))+`.
    """
    drafted = q > 0
    limits, order = (p[drafted] / q[drafted]).clamp(max=1.0).sort()
    weights = q[drafted][order]
    mass = torch.cat([weights.new_zeros(1), weights.cumsum(0)])
    moment = torch.cat([weights.new_zeros(1), (weights * limits).cumsum(0)])

    def rejected_below(coin: Tensor) -> Tensor:
        below = torch.searchsorted(limits, coin)
        return coin * mass[below] - moment[below]

    left_over = _normalised((p - q).clamp(min=0.0))
    running = torch.cumsum(left_over, dim=0).clamp(max=1.0)
    start = torch.cat([running.new_zeros(1), running[:-1]])
    return torch.minimum(p, q) + rejected_below(running) - rejected_below(start)


def _normalised(weights: Tensor) -> Tensor:
    total = weights.sum()
    return weights / total if total > 0 else weights
