"""What was measured of a drafter and what follows from it, as results state it.

Knows the form of results; measures nothing.
"""

from __future__ import annotations

from typing import Any

from foredraft.bench.plan.predict import Machine, Prediction
from foredraft.bench.plan.recommend import Candidate
from foredraft.bench.plan.replay import counts_of, length_shares, rank_acceptance
from foredraft.planning.best_tree import best_tree


def verify_cost(machine: Machine, positions: float, longest: int) -> list[float]:
    """`[longest + 1]` of a step that verifies 0, 1, ... nodes, drafter apart, in plain ones."""
    plain = machine.plain_seconds(positions)
    return [
        (machine.pass_seconds(1 + nodes, positions) + machine.plain_rest) / plain
        for nodes in range(longest + 1)
    ]


def described(
    candidate: Candidate, tree: bool, width: int, machine: Machine, positions: float
) -> dict[str, Any]:
    """A drafter: rates, its own time, and predictions by width and load."""
    drafting = candidate.drafting
    counts = counts_of(drafting.texts)
    steps = max(1, counts.num_steps)
    result = {
        "label": candidate.label,
        "speculative_config": dict(candidate.config),
        "widest": width,
        "found": counts.num_drafts / steps,  # steps in which it had a draft
        "length_shares": length_shares(drafting.texts),
        "acceptance_by_position": counts.conditional_acceptance_by_position,
        "mean_acceptance_length": counts.mean_acceptance_length,
        "drafter_ms": {"fixed": 1e3 * drafting.drafter.fixed, "node": 1e3 * drafting.drafter.slope},
        "rest_ms": {"fixed": 1e3 * drafting.rest.fixed, "node": 1e3 * drafting.rest.slope},
        "by_load": {
            str(load): [_prediction(each) for each in predictions]
            for load, predictions in candidate.predictions.items()
        },
    }
    if tree:
        result["best_tree"] = _best_tree(candidate, machine, positions, width)
    return result


def _prediction(each: Prediction) -> dict[str, float]:
    return {
        "num_speculative_tokens": each.num_nodes,
        "tokens": each.tokens,
        "step_cost": each.step_cost,
        "speedup": each.speedup,
    }


def _best_tree(
    candidate: Candidate, machine: Machine, positions: float, width: int
) -> dict[str, Any]:
    """The shape that acceptance by rank asks for, if every node had children of every rank: what a
    drafter that could draft any tree would reach, not what this one does.
    """
    rates = rank_acceptance(candidate.drafting.texts)
    scale = max(1.0, sum(rates))
    rates = [rate / scale for rate in rates]
    plain = machine.plain_seconds(positions)
    drafter = candidate.drafting.drafter
    costs = [
        cost + (drafter.fixed / plain if nodes else 0.0)
        for nodes, cost in enumerate(verify_cost(machine, positions, width))
    ]
    shape = best_tree(rates, drafter.slope / plain, costs)
    return {
        "rank_acceptance": rates,
        "parents": list(shape.parents),
        "depth": shape.depth,
        "expected_tokens": shape.expected_tokens,
        "speedup": shape.speedup,
    }
