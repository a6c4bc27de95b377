"""What rules accept, in closed form: the formulas that enumeration is held against.

Knows laws; knows no rule's code. p is the target's law, q the draft's, both `[V]` float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

from foredraft.testing.siblings import SiblingLaw, top_and_one

Law = Callable[[tuple[int, ...]], Tensor]
Joint = Callable[[Tensor, Tensor], Tensor]  # (p, q) -> [V] P(draft x is drawn and stands)


def token_joint(p: Tensor, q: Tensor) -> Tensor:
    """`min(p, q)`: rejection (2211.17192, section 3). Its sum is 1 - TV(p, q)."""
    return torch.minimum(p, q)


def coupled_joint(p: Tensor, q: Tensor) -> Tensor:
    """`1 / sum_y max(p_y / p_x, q_y / q_x)`: shared Gumbel noise (2408.07978)."""
    joint = torch.zeros_like(p)
    both = (p > 0) & (q > 0)
    ratios = torch.maximum(p / p[both, None], q / q[both, None])  # [X, V]
    joint[both] = 1.0 / ratios.sum(dim=1)
    return joint


def maximal_acceptance(p: Tensor, q: Tensor) -> float:
    """`sum_x min(p, q) = 1 - TV(p, q)`: no rule accepts one drawn token more often."""
    return float(token_joint(p, q).sum())


def coupled_acceptance(p: Tensor, q: Tensor) -> float:
    """What `match` accepts of one token drawn with the target's own noise."""
    return float(coupled_joint(p, q).sum())


def independent_joint(p: Tensor, q: Tensor) -> Tensor:
    """`p q`: a drawn draft that is compared with a fresh draw of the target."""
    return p * q


def chain_tokens(target: Law, draft: Law, depth: int, joint: Joint = token_joint) -> float:
    """Expected tokens of a step over a drawn chain: 1 + the sum over its prefixes of the product of
    `joint`.
    """
    total = 1.0
    reached: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        following: dict[tuple[int, ...], float] = {}
        for prefix, probability in reached.items():
            for token, share in enumerate(joint(target(prefix), draft(prefix)).tolist()):
                if share > 0.0:
                    following[(*prefix, token)] = probability * share
        total += sum(following.values())
        reached = following
    return total


def top_and_one_acceptance(p: Tensor, q: Tensor, count: int) -> float:
    """`p(T) + sum over x outside T of min(p, q')`: T the `count - 1` most likely of q, q' the law
    of the drawn one (2502.18779, greedy draft sampling).
    """
    top = torch.sort(q, descending=True, stable=True).indices[: count - 1]
    others = torch.minimum(p, top_and_one(q, [], count))
    others[top] = 0.0
    return float(p[top].sum() + others.sum())


def siblings_acceptance(p: Tensor, q: Tensor, count: int, siblings: SiblingLaw) -> float:
    """What `rejection` accepts of one node's siblings (recursive rejection sampling, 2402.14160).

    With R what is still to be said: `sum_x min(R, q_i)`, and where sibling i was rejected the same
    for the next one, given the tokens before it.
    """

    def accepted(rest: Tensor, earlier: tuple[int, ...]) -> float:
        if len(earlier) == count:
            return 0.0
        law = siblings(q, earlier, count)
        left = (rest - law).clamp(min=0.0)
        total = float(left.sum())
        acceptance = float(torch.minimum(rest, law).sum())
        for token, share in enumerate((law - rest).clamp(min=0.0).tolist()):
            if share > 0.0 and total > 0.0:
                acceptance += share * accepted(left / total, (*earlier, token))
        return acceptance

    return accepted(p, ())


def prefix_bound(target: Law, draft: Law, depth: int) -> float:
    """What no rule can exceed for a drawn chain: 1 + the sum over all prefixes of the smaller of
    the two probabilities (2403.10444, the ideal of its motivating example).
    """
    total = 1.0
    reached: dict[tuple[int, ...], tuple[float, float]] = {(): (1.0, 1.0)}
    for _ in range(depth):
        following: dict[tuple[int, ...], tuple[float, float]] = {}
        for prefix, (by_target, by_draft) in reached.items():
            rows = zip(target(prefix).tolist(), draft(prefix).tolist(), strict=True)
            for token, (p, q) in enumerate(rows):
                following[(*prefix, token)] = (by_target * p, by_draft * q)
        total += sum(min(pair) for pair in following.values())
        reached = following
    return total


def transport_bound(p: Tensor, q: Tensor, count: int, siblings: SiblingLaw) -> float:
    """What no rule can exceed for one node's `count` siblings: `1 + min over H of p(H) - P(all
    siblings lie in H)`, H any set of ids (optimal transport; SpecTr 2310.15141, Hu et al.
    2502.18779). By trying all 2^V sets.
    """
    drawn = sibling_tuples(q, count, siblings)
    best = 0.0
    for members in product((False, True), repeat=p.numel()):
        inside = sum(weight for tokens, weight in drawn if all(members[x] for x in tokens))
        best = min(best, float(p[torch.tensor(members)].sum()) - inside)
    return 1.0 + best


def iid_transport_bound(p: Tensor, q: Tensor, count: int) -> float:
    """`transport_bound` for draws with replacement: H need only be a prefix of the ids by q / p."""
    order = torch.sort(q / p, descending=True, stable=True).indices
    gains = p[order].cumsum(0) - q[order].cumsum(0) ** count
    return 1.0 + min(0.0, float(gains.min()))


def sibling_tuples(
    q: Tensor, count: int, siblings: SiblingLaw
) -> Sequence[tuple[tuple[int, ...], float]]:
    """All siblings that can be drawn, in draw order, and their probabilities."""
    drawn: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for _ in range(count):
        drawn = [
            ((*tokens, token), weight * share)
            for tokens, weight in drawn
            for token, share in enumerate(siblings(q, tokens, count).tolist())
            if share > 0.0
        ]
    return drawn
