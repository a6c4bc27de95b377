"""Whose token is worth how much: readers of requests that get few tokens a step come first."""

from __future__ import annotations

from itertools import product

import pytest

from foredraft.planning.allocation import Costs, Objective, Prospect, allocate
from foredraft.planning.cost import CostCurve
from foredraft.planning.estimates import Outlook
from foredraft.planning.policy import Judged, Load
from foredraft.planning.readers import Readers


def judged(request: str, accepted: int, ended: bool = False) -> Judged:
    return Judged(request, "greedy", 4, 4, accepted, ended)


def readers(**accepted: int) -> Readers:
    """After a long time in which requests had so many drafts accepted in every step."""
    found = Readers()
    for _ in range(400):
        found.add([judged(*each) for each in accepted.items()])
    return found


def test_weights_are_1_on_average_and_alike_for_the_like() -> None:
    found = readers(fast=3, slow=0, slower=0)
    weights = [found.weight(each) for each in ("fast", "slow", "slower")]
    assert sum(weights) / 3 == pytest.approx(1.0)
    assert weights[1] == weights[2] > 1.4 > 0.2 > weights[0]
    assert readers(one=2, other=2).weight("one") == pytest.approx(1.0)
    assert readers(alone=4).weight("alone") == 1.0


def test_a_request_that_nothing_is_known_of_is_as_good_as_any() -> None:
    found = readers(fast=3)
    assert found.weight("new") == 1.0
    found.add([judged("new", 0)])  # one step tells little
    assert found.weight("new") < 2 * found.weight("fast")


def test_a_request_that_is_gone_weighs_nothing() -> None:
    found = readers(fast=3, slow=0)
    found.add([judged("slow", 0, ended=True)])
    found.release("slow")
    assert found.weight("slow") == 1.0
    assert found.weight("fast") == pytest.approx(1.0)  # at once: it is alone now
    found.release("never seen")


def test_weights_choose_what_all_readers_together_wait_least_for() -> None:
    """By enumeration: one row more, for who gets 4 tokens a step or for who gets 1.2, each with the
    chances that drafts have there.
    """
    base, chances = (4.0, 1.2), (0.5, 0.3)
    curve = Costs(CostCurve((1, 2, 3, 4), (1.0, 1.0, 1.0, 2.0)))  # one row is free, more aren't

    def waiting(widths: tuple[int, ...]) -> float:
        seconds = curve.curve.of_rows(2 + sum(widths))
        tokens = [g + p * w for g, p, w in zip(base, chances, widths, strict=True)]
        return sum(seconds / each for each in tokens) / 2

    best = min(product((0, 1), repeat=2), key=waiting)
    weights = [each**-2 for each in base]
    mean = sum(weights) / 2
    prospects = [
        Prospect(Outlook([chance], [1.0]), weight=weight / mean)
        for chance, weight in zip(chances, weights, strict=True)
    ]
    chosen, _ = allocate(Load(2, 2), prospects, curve, Objective.LATENCY)
    assert tuple(chosen.widths) == best == (0, 1)
    alike = [Prospect(each.outlook) for each in prospects]
    assert allocate(Load(2, 2), alike, curve, Objective.LATENCY)[0].widths == [1, 0]


def test_one_that_waits_its_turn_weighs_on_nobody() -> None:
    """A preempted request is not in the step: those that are share it by what they are worth."""
    found = readers(fast=3, slow=0)
    found.add([judged("fast", 3)])
    assert found.weight("fast") == pytest.approx(1.0)
