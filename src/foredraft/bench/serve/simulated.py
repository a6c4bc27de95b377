"""The simulator against a measurement: the same loads and widths, played with measured costs and
measured acceptance.

Knows results of `bench serve` and the simulator; measures nothing. What is fed: what steps cost by
what they carried, at the machine's usual pace; how often drafts were found and accepted by the
requests of a load, at each width; and how long these requests' prompts and answers were. What is
asked: tokens a second at every load and width, at that pace, and the best width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from statistics import median
from typing import Any

import numpy as np

from foredraft.bench.serve.arrivals import Prompt, Source
from foredraft.bench.serve.sweep import Level, Settings, first_prompt
from foredraft.core.errors import UserError
from foredraft.planning.allocation import Costs
from foredraft.planning.cost import CostCurve
from foredraft.planning.policy import FixedWidth
from foredraft.planning.simulate import Arrival, Law, Machine, Steady, simulate

REQUESTS_PER_CLIENT, LEAST = 5, 64  # more than any window holds
NEAR = 0.10  # of the measured goodput
LEAST_AGREEMENT = 0.90  # of the loads
NEEDED = (
    "points", "fixed", "costs", "step_costs", "lengths", "prompt_lengths", "max_tokens", "rounds",
    "window",
)  # fmt: skip


def check_simulator(result: Mapping[str, Any]) -> dict[str, Any]:
    """Simulated and measured tokens a second, `[load, width]`, and the best width of each load.

    Raises UserError for a result that lacks what the simulator needs.
    """
    for key in NEEDED:
        if key not in result:
            raise UserError(f"the result lacks {key!r}: it must be one of `bench serve MODEL`")
    if not any(result["lengths"]) or not result["step_costs"]["decoding"]:
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
    lines = [
        _line(result, points[load, width], load, width, curve, reading)
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


def _law(point: Mapping[str, Any]) -> Law:
    """Acceptance and drafts found, of the very requests of a load."""
    filled = point["filled_by_position"]
    return Law.of(*(point["acceptance_by_position"] or [0.0]), filled=filled[0] if filled else 1.0)


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
    traces = [_trace(result, number, load, _law(point)) for number in range(result["rounds"])]
    found = median(
        simulate(FixedWidth(width), trace, machine, steady=steady).full_goodput for trace in traces
    )
    measured = point["tokens_per_second_at_equal_pace"]
    return {
        "concurrency": load,
        "width": width,
        "measured": measured,
        "simulated": found,
        "error": found / measured - 1.0,
        "near": abs(found / measured - 1.0) <= NEAR,
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
