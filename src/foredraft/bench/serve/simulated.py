"""The simulator against a measurement: the same loads and widths, played with measured costs and
measured acceptance.

Knows results of `bench serve` and the simulator; measures nothing. What is fed: what steps cost by
what they carried, how often drafts were found and accepted at each width, and how long prompts and
answers were. What is asked: tokens a second at every load and width, and the best width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np

from foredraft.core.errors import UserError
from foredraft.planning.allocation import Costs
from foredraft.planning.cost import CostCurve
from foredraft.planning.policy import FixedWidth
from foredraft.planning.simulate import Arrival, Law, Machine, simulate

NEAR = 0.10  # of the measured goodput
LEAST_AGREEMENT = 0.90  # of the loads
ANSWERS_PER_CLIENT, LEAST_ANSWERS = 8, 64
NEEDED = ("points", "fixed", "costs", "step_costs", "lengths", "max_tokens")


def check_simulator(result: Mapping[str, Any]) -> dict[str, Any]:
    """Simulated and measured tokens a second, `[load, width]`, and the best width of each load.

    Raises UserError for a result that lacks what the simulator needs.
    """
    for key in NEEDED:
        if key not in result:
            raise UserError(f"the result lacks {key!r}: it must be one of `bench serve MODEL`")
    if not result["lengths"] or not result["step_costs"]["decoding"]:
        raise UserError("no answer was measured from its start to its end: give more --seconds")
    if "calibrated" not in result["costs"]:
        raise UserError("the result lacks measured costs: --objective must not have been none")
    points = {
        (point["concurrency"], result["fixed"][point["label"]]): point
        for point in result["points"]
        if point["label"] in result["fixed"] and "concurrency" in point
    }
    curve = served_curve(result["costs"]["calibrated"], result["step_costs"]["decoding"])
    reading = prompt_row_seconds(curve, result["step_costs"]["reading"])
    loads = list(dict.fromkeys(load for load, _ in points))
    widths = list(dict.fromkeys(width for _, width in points))
    laws = {width: _law([points[load, width] for load in loads]) for width in widths}
    lines = [
        _line(result, points[load, width], load, width, curve, reading, laws[width])
        for load in loads
        for width in widths
    ]
    best = [_best([line for line in lines if line["concurrency"] == load]) for load in loads]
    near = sum(line["near"] for line in lines) / len(lines)
    agree = sum(each["agree"] for each in best) / len(best)
    return {
        "kind": "simulated",
        "curve": curve.as_json(),
        "prompt_row_seconds": reading,
        "points": lines,
        "best": best,
        "near_share": near,
        "agree_share": agree,
        "passed": near == 1.0 and agree >= LEAST_AGREEMENT,
    }


def served_curve(calibrated: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> CostCurve:
    """The curve of start-up, moved to what steps took while serving: `scale x pass + step +
    requests`, by least squares of relative errors.

    Passes know nothing of scheduling, verification and commit, and were measured at another time.
    """
    curve = CostCurve.from_json(calibrated)
    passes = np.array([curve.of_step(s["rows"], s["requests"], s["positions"]) for s in steps])
    requests = np.array([float(step["requests"]) for step in steps])
    seconds = np.array([step["seconds"] for step in steps])
    weight = np.sqrt([float(step["steps"]) for step in steps]) / seconds
    columns = np.stack([passes, np.ones_like(passes), requests - 1.0], axis=1)
    kept = columns.shape[1] if len(steps) > columns.shape[1] else 1  # too few kinds: scale alone
    solved, *_ = np.linalg.lstsq(columns[:, :kept] * weight[:, None], seconds * weight, rcond=None)
    scale, step, request = [*map(float, solved), 0.0, 0.0][:3]
    scale = max(scale, 1e-6)
    least = 1e-3 * curve.seconds[0]
    return CostCurve(
        curve.rows,
        tuple(max(least, scale * each + step) for each in curve.seconds),
        max(0.0, scale * curve.request_seconds + request),
        scale * curve.position_seconds,
        scale * curve.row_position_seconds,
    )


def prompt_row_seconds(curve: CostCurve, steps: Sequence[Mapping[str, Any]]) -> float | None:
    """What a prompt's row adds to a step, on average; None where no prompt was read."""
    rows = sum(step["prompt_rows"] for step in steps)
    beside = sum(step["steps"] * curve.of_step(step["rows"], step["requests"], 0) for step in steps)
    spent = sum(step["seconds"] for step in steps)
    return max(0.0, spent - beside) / rows if rows else None


def _law(points: Sequence[Mapping[str, Any]]) -> Law:
    """Acceptance at one width, over all loads, each by its tokens."""
    rates = _mean([(p["acceptance_by_position"], p["tokens"]) for p in points])
    filled = _mean([(p["filled_by_position"], p["tokens"]) for p in points])
    return Law.of(*(rates or [0.0]), filled=filled[0] if filled else 1.0)


def _mean(many: Sequence[tuple[Sequence[float], float]]) -> list[float]:
    """Position by position, over those that have it."""
    found = []
    for position in range(max((len(values) for values, _ in many), default=0)):
        pairs = [(v[position], weight) for v, weight in many if position < len(v)]
        found.append(sum(v * w for v, w in pairs) / sum(w for _, w in pairs))
    return found


def _line(
    result: Mapping[str, Any],
    point: Mapping[str, Any],
    load: int,
    width: int,
    curve: CostCurve,
    reading: float | None,
    law: Law,
) -> dict[str, Any]:
    trace = _trace(result["lengths"], load, law)
    drafter = point["drafter_seconds_per_step"] or 0.0
    ratio = drafter / (width * curve.of_rows(load)) if width else 0.0
    rows = max(256, 8 * load)
    machine = Machine(Costs(curve, ratio), load, rows, prompt_row_seconds=reading)
    found = simulate(FixedWidth(width), trace, machine).full_goodput
    measured = point["tokens_per_second"]
    return {
        "concurrency": load,
        "width": width,
        "measured": measured,
        "simulated": found,
        "error": found / measured - 1.0,
        "near": abs(found / measured - 1.0) <= NEAR,
    }


def _trace(lengths: Sequence[Sequence[int]], load: int, law: Law) -> list[Arrival]:
    """As many clients as slots, the first answers of all lengths, like those that were measured."""
    number = load + max(LEAST_ANSWERS, ANSWERS_PER_CLIENT * load)
    order = [lengths[n % len(lengths)] for n in range(number)]
    Random(0).shuffle(order)
    trace = []
    for index, (prompt, output) in enumerate(order):
        left = index + 1 if index < load else load
        trace.append(Arrival(0.0, prompt, max(1, -(-output * left // load)), law))
    return trace


def _best(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The best widths of one load. They agree if what the simulator picks was measured within 1%
    of the best: closer than that, a measurement can't tell them apart.
    """
    measured = max(lines, key=lambda line: line["measured"])
    simulated = max(lines, key=lambda line: line["simulated"])
    return {
        "concurrency": measured["concurrency"],
        "measured": measured["width"],
        "simulated": simulated["width"],
        "loss": 1.0 - simulated["measured"] / measured["measured"],
        "agree": simulated["measured"] >= 0.99 * measured["measured"],
    }
