"""The simulator against a measurement: the same loads and widths, played with measured costs and
measured acceptance.

Knows results of `bench serve` and the simulator; measures nothing. What is fed: what steps cost by
what they carried, at the machine's usual pace; how often drafts were found and accepted by the
requests of a load, at each width and in each round; and how long these requests' prompts and
answers were. What is asked: tokens a second at every load and width, at that pace, and the best
width. Rounds ask different prompts first, so they are compared one by one, as they are wherever
configurations are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from statistics import median
from typing import Any

import numpy as np

from foredraft.bench.serve.arrivals import Prompt, Source
from foredraft.bench.serve.sweep import Level, Settings, first_prompt
from foredraft.core.errors import UserError
from foredraft.planning.allocation import Costs
from foredraft.planning.cost import CostCurve
from foredraft.planning.laws import Arrival, Law
from foredraft.planning.policy import FixedWidth
from foredraft.planning.simulate import Machine, Steady, simulate

REQUESTS_PER_CLIENT, LEAST = 5, 64  # more than any window holds
NEAR = 0.10  # of the measured goodput
LEAST_AGREEMENT = 0.90  # of the loads
SAME = 0.01  # of the best goodput: widths closer than that are as good as each other
LEAST_STEPS = 30  # of about so many rows, to say what they cost
NEEDED = (
    "points", "fixed", "costs", "step_costs", "lengths", "prompt_lengths", "max_tokens", "rounds",
    "window",
)  # fmt: skip


def check_simulator(result: Mapping[str, Any]) -> dict[str, Any]:
    """Simulated and measured tokens a second, `[load, width]`, and the best width of each load.

    Raises UserError for a result that lacks what the simulator needs.
    """
    check_has(result)
    points = {
        (point["concurrency"], result["fixed"][point["label"]]): point
        for point in result["points"]
        if point["label"] in result["fixed"] and "concurrency" in point
    }
    curve = served_curve(result["costs"]["calibrated"], result["step_costs"]["decoding"])
    reading = prompt_row_seconds(curve, result["step_costs"]["reading"])
    loads = list(dict.fromkeys(load for load, _ in points))
    widths = list(dict.fromkeys(width for _, width in points))
    lines = [
        _line(result, points[load, width], load, width, curve, reading)
        for load in loads
        for width in widths
    ]
    best = [_best([line for line in lines if line["concurrency"] == load]) for load in loads]
    near, agree = _share(lines, "near"), _share(best, "agree")
    return {
        "kind": "simulated",
        "curve": curve.as_json(),
        "prompt_row_seconds": reading,
        "points": lines,
        "best": best,
        "near_share": near,
        "near_share_of_medians": _share(lines, "medians_near"),
        "agree_share": agree,
        "same_share": _share(best, "same"),  # ties that only the rounds' spread allows left out
        # What a width chosen at random would reach: how little ties leave to be right about.
        "agree_share_at_random": sum(len(each["tied"]) / len(widths) for each in best) / len(best),
        "passed": near == 1.0 and agree >= LEAST_AGREEMENT,
    }


def check_has(result: Mapping[str, Any], more: Sequence[str] = ()) -> None:
    """Raise UserError for a result that lacks what the simulator needs, or one of `more` keys."""
    for key in (*NEEDED, *more):
        if key not in result:
            raise UserError(f"the result lacks {key!r}: it must be one of `bench serve MODEL`")
    if not any(result["lengths"]) or not result["step_costs"]["decoding"]:
        raise UserError("no answer was measured from its start to its end: give more --seconds")
    if "calibrated" not in result["costs"]:
        raise UserError("the result lacks measured costs: --objective must not have been none")


def at_usual_pace(point: Mapping[str, Any]) -> list[float]:
    """Measured tokens a second of every round, as if the machine had always been as fast."""
    rates, slowness = point["tokens_per_second_by_round"], point["slowness_by_round"]
    return [rate * slow for rate, slow in zip(rates, slowness, strict=True)]


def _share(entries: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(bool(entry[key]) for entry in entries) / len(entries)


def served_curve(calibrated: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> CostCurve:
    """The curve of start-up, moved to what steps took while serving: `scale x pass + step +
    requests`, by least squares of relative errors, then point by point.

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
    moved = CostCurve(
        curve.rows,
        tuple(max(least, scale * each + step) for each in curve.seconds),
        max(0.0, scale * curve.request_seconds + request),
        scale * curve.position_seconds,
        scale * curve.row_position_seconds,
    )
    return _through(moved, steps)


def _through(curve: CostCurve, steps: Sequence[Mapping[str, Any]]) -> CostCurve:
    """The curve with its points where steps of about so many rows were on average; and with points
    at twice the rows of the last pass that start-up measured, twice that and so on, as far as there
    were such steps.
    """
    last = (curve.rows[:-1] or curve.rows)[-1]  # behind it `cost.fit` goes on by a line
    grid, most = set(curve.rows), max(step["rows"] for step in steps)
    while last < most:
        last *= 2
        grid.add(last)
    rows = sorted(grid)
    points = np.array(rows, dtype=float)
    known, moves = np.zeros(len(rows)), np.zeros(len(rows))
    for step in steps:
        # Shares of the two points that it lies between.
        near = np.array([np.interp(step["rows"], points, each) for each in np.eye(len(rows))])
        expected = curve.of_step(step["rows"], step["requests"], step["positions"])
        known += near * step["steps"]
        moves += near * step["steps"] * (step["seconds"] - expected)
    kept = [i for i in range(len(rows)) if rows[i] in curve.rows or known[i] >= LEAST_STEPS]
    moved = [
        curve.of_rows(rows[i]) + (moves[i] / known[i] if known[i] >= LEAST_STEPS else 0.0)
        for i in kept
    ]
    seconds = tuple(map(float, accumulate((max(each, 1e-9) for each in moved), max)))
    return replace(curve, rows=tuple(rows[i] for i in kept), seconds=seconds)


def prompt_row_seconds(curve: CostCurve, steps: Sequence[Mapping[str, Any]]) -> float | None:
    """What a prompt's row adds to a step, on average; None where no prompt was read."""
    rows = sum(step["prompt_rows"] for step in steps)
    beside = sum(step["steps"] * curve.of_step(step["rows"], step["requests"], 0) for step in steps)
    spent = sum(step["seconds"] for step in steps)
    return max(0.0, spent - beside) / rows if rows else None


def _law(point: Mapping[str, Any], number: int) -> Law:
    """Acceptance and drafts found, of the very requests of a load in one round; in all of them
    where a result doesn't tell rounds apart.
    """
    accepted, filled = point["acceptance_by_position"], point["filled_by_position"]
    if "acceptance_by_round" in point:
        accepted, filled = point["acceptance_by_round"][number], point["filled_by_round"][number]
    return Law.of(*(accepted or [0.0]), filled=filled[0] if filled else 1.0)


def _line(
    result: Mapping[str, Any],
    point: Mapping[str, Any],
    load: int,
    width: int,
    curve: CostCurve,
    reading: float | None,
) -> dict[str, Any]:
    drafter = point["drafter_seconds_per_step"] or 0.0
    ratio = drafter / (width * curve.of_rows(load)) if width else 0.0
    machine = Machine(Costs(curve, ratio), load, max(256, 8 * load), prompt_row_seconds=reading)
    window = Settings(
        [], requests=result["window"]["requests"], seconds=result["window"]["seconds"]
    ).extent(Level(concurrency=load))
    steady = Steady(window.requests, window.seconds)
    measured = at_usual_pace(point)
    found = []
    for number in range(len(measured)):
        trace = _trace(result, number, load, _law(point, number))
        found.append(simulate(FixedWidth(width), trace, machine, steady=steady).full_goodput)
    error = median(ours / theirs for ours, theirs in zip(found, measured, strict=True)) - 1.0
    return {
        "concurrency": load,
        "width": width,
        "measured": median(measured),
        "simulated": median(found),
        "measured_by_round": measured,
        "simulated_by_round": found,
        "error": error,
        "near": abs(error) <= NEAR,
        "medians_near": abs(median(found) / median(measured) - 1.0) <= NEAR,
    }


def _trace(result: Mapping[str, Any], number: int, load: int, law: Law) -> list[Arrival]:
    """The requests of a round, in their order. An answer whose end was never seen is as long as it
    may be.
    """
    lengths, most = result["lengths"], result["max_tokens"]
    prompts = [Prompt(str(index), "", "") for index in range(len(lengths))]
    start = first_prompt(number, len(prompts), result["rounds"])
    trace = []
    for job in islice(Source(prompts, most, start).jobs(load), REQUESTS_PER_CLIENT * load + LEAST):
        index = int(job.prompt.id)
        output = min(job.max_tokens, lengths[index][1] if lengths[index] else most)
        trace.append(Arrival(0.0, result["prompt_lengths"][index], output, law))
    return trace


def _best(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The best widths of one load. They are the same if what the simulator picks was measured
    within 1% of the best. They agree if they are, or if the measurement can't tell the two apart:
    one was not the better in every round.
    """
    measured = max(lines, key=lambda line: line["measured"])
    simulated = max(lines, key=lambda line: line["simulated"])
    tied = [line for line in lines if _same(line, measured) or not _always_less(line, measured)]
    ratios = _ratios(simulated, measured)
    return {
        "concurrency": measured["concurrency"],
        "measured": measured["width"],
        "simulated": simulated["width"],
        "tied": [line["width"] for line in tied],
        "loss": 1.0 - median(ratios),
        "loss_by_round": [1.0 - ratio for ratio in ratios],
        "same": _same(simulated, measured),
        "agree": simulated in tied,
    }


def _ratios(line: Mapping[str, Any], other: Mapping[str, Any]) -> list[float]:
    """Measured tokens a second of one width over another's, round by round."""
    pairs = zip(line["measured_by_round"], other["measured_by_round"], strict=True)
    return [ours / theirs for ours, theirs in pairs]


def _same(line: Mapping[str, Any], best: Mapping[str, Any]) -> bool:
    return bool(line["measured"] >= (1.0 - SAME) * best["measured"])


def _always_less(line: Mapping[str, Any], best: Mapping[str, Any]) -> bool:
    return max(_ratios(line, best)) < 1.0
