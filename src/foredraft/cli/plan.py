"""`foredraft plan`: what speculation is worth, from rates and costs, or measured with a model.

Knows options, a table and a plot; `foredraft.planning` answers, and `plan_workload` measures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated, Any

from rich.text import Text
from typer import Argument, Option

from foredraft.cli.console import output_console
from foredraft.cli.option_groups import option_groups
from foredraft.cli.options import JsonFlag, RuntimeOptions
from foredraft.cli.plan_workload import PlanOptions, plan_workload, refuse_without_model
from foredraft.cli.plots import PNG_OR_SVG, check_plot, write_plot
from foredraft.cli.prompt import check_text
from foredraft.cli.tables import Figures
from foredraft.core.errors import UserError
from foredraft.planning.allocation import Costs
from foredraft.planning.best_tree import best_tree
from foredraft.planning.cost import CostCurve, Roofline
from foredraft.planning.laws import Law
from foredraft.planning.speedup import (
    best_draft_length,
    expected_tokens,
    speedup,
    speedup_ceiling,
)

LONGEST, LONGEST_BY_DEFAULT = 256, 16
MOST_REQUESTS = 1024
NEEDED = ("weights_gb", "bandwidth_gb_s", "tflops")
LONGEST_SIMULATED = 8
PROMPT_TOKENS, ANSWER_TOKENS = 16, 128
LOAD_COLUMNS = ("best_fixed_speedup", "policy_speedup", "oracle_speedup", "mean_width")
SIMULATED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 4096)


@option_groups
def plan(
    model: Annotated[
        str | None,
        Argument(
            metavar="MODEL",
            help="Measure its drafters on --workload; without one, rates and costs are given.",
            show_default=False,
        ),
    ] = None,
    alpha: Annotated[
        float | None, Option(help="Acceptance of every position.", metavar="RATE")
    ] = None,
    acceptance: Annotated[
        str | None,
        Option(
            help="Acceptance by position, each once all before it were accepted; the last one "
            "holds for all further positions.",
            metavar="RATE,...",
        ),
    ] = None,
    draft_cost: Annotated[
        float, Option(help="Of drafting a token, in plain passes of the target.", metavar="COST")
    ] = 0.0,
    verify_cost: Annotated[
        str | None,
        Option(
            help="Of passes over 1, 2, 3, ... rows, in plain passes. (default: free)",
            metavar="COST,...",
        ),
    ] = None,
    roofline: Annotated[
        str | None,
        Option(help="Or a data sheet: weights_gb, bandwidth_gb_s, tflops, ...", metavar="JSON"),
    ] = None,
    max_draft: Annotated[
        int | None,
        Option(
            help="Longest draft looked at. (default: 16, with a model 8)",
            metavar="K",
            min=1,
            max=LONGEST,
        ),
    ] = None,
    tree: Annotated[
        str | None,
        Option(help="Acceptance by rank among siblings: the best tree.", metavar="RATE,..."),
    ] = None,
    loads: Annotated[
        str | None,
        Option(help="Simulate so many requests at once: policy, fixed, oracle.", metavar="N,..."),
    ] = None,
    plot: Annotated[
        Path | None, Option(help="Draw it into a PNG or SVG file.", metavar="FILE")
    ] = None,
    json_output: JsonFlag = False,
    *,
    measured: PlanOptions,
    runtime: RuntimeOptions,
) -> None:
    """What speculation is worth: expected tokens, best draft length, speed-up, ceiling."""
    given = {
        "--alpha": alpha, "--acceptance": acceptance, "--draft-cost": draft_cost or None,
        "--verify-cost": verify_cost, "--roofline": roofline, "--tree": tree, "--loads": loads,
    }  # fmt: skip
    if model is not None:
        _refuse_beside_model(given)
        plan_workload(model, measured, runtime, max_draft, plot, json_output)
        return
    refuse_without_model(measured, runtime)
    max_draft = LONGEST_BY_DEFAULT if max_draft is None else max_draft
    rates = _acceptance(alpha, acceptance, max_draft)
    if not 0.0 <= draft_cost < inf:
        raise UserError(f"--draft-cost must be 0 or more, got {draft_cost}")
    if verify_cost is not None and roofline is not None:
        raise UserError("--verify-cost and --roofline say the same thing: give one of them")
    check_plot(plot, *PNG_OR_SVG)
    sheet = None if roofline is None else _roofline(roofline)
    costs = _verify_costs(verify_cost, sheet, max_draft)
    result = _closed_forms(rates[: len(costs) - 1], draft_cost, costs)
    if tree is not None:
        result["tree"] = _tree(_numbers("--tree", tree), draft_cost, costs)
    if loads is not None:
        if verify_cost is None and sheet is None:
            raise UserError("--loads needs what rows cost: --verify-cost or --roofline")
        curve, context = _curve(costs, sheet), 0 if sheet is None else int(sheet.context)
        result["loads"] = [
            _simulated(load, result["acceptance"], draft_cost, curve, context)
            for load in _loads(loads)
        ]
    if json_output:
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    else:
        _print(result)
    if plot is not None:
        from foredraft.cli.plan_plot import draw

        write_plot(plot, partial(draw, result))


def _refuse_beside_model(given: Mapping[str, Any]) -> None:
    for option, value in given.items():
        if value is not None:
            raise UserError(f"{option} is for a plan without a MODEL, which measures it")


def _acceptance(alpha: float | None, acceptance: str | None, length: int) -> list[float]:
    if (alpha is None) == (acceptance is None):
        raise UserError("give either --alpha or --acceptance")
    option = "--alpha" if acceptance is None else "--acceptance"
    rates = [alpha or 0.0] if acceptance is None else _numbers(option, acceptance)
    for rate in rates:
        if not 0.0 <= rate <= 1.0:
            raise UserError(f"{option}: a rate must be in 0..1, got {rate}")
    return (rates + [rates[-1]] * length)[:length]


def _numbers(option: str, text: str) -> list[float]:
    check_text(text, option)
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [inf]
    if not all(-inf < value < inf for value in values):
        raise UserError(f"{option} must be numbers with commas between, got {text!r}")
    return values


def _loads(text: str) -> list[int]:
    check_text(text, "--loads")
    try:
        loads = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--loads must be integers with commas between, got {text!r}") from None
    for load in loads:
        if not 1 <= load <= MOST_REQUESTS:
            raise UserError(f"--loads must be in 1..{MOST_REQUESTS}, got {load}")
    return loads


def _roofline(text: str) -> Roofline:
    check_text(text, "--roofline")
    names = [field.name for field in fields(Roofline)]
    try:
        values = json.loads(text)
    except ValueError as error:
        raise UserError(f"--roofline {text!r} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"--roofline must be a JSON object, got {text!r}")
    for name, value in values.items():
        if name not in names:
            raise UserError(f"--roofline has no {name!r}; valid are {', '.join(names)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"--roofline: {name} must be a number, got {value!r}")
    for name in NEEDED:
        if name not in values:
            raise UserError(f"--roofline needs {', '.join(NEEDED)}; there is no {name!r}")
    try:
        return Roofline(**values)
    except ValueError as error:
        raise UserError(f"--roofline: {error}") from None


def _verify_costs(text: str | None, sheet: Roofline | None, longest: int) -> list[float]:
    """`[K + 1]` of passes that verify 0 .. K draft tokens."""
    if sheet is not None:
        return sheet.verify_cost(longest)
    if text is None:
        return [1.0] * (longest + 1)
    costs = _numbers("--verify-cost", text)
    if costs != sorted(costs) or not costs[0] > 0:
        raise UserError(f"--verify-cost must be above 0 and never fall, got {text!r}")
    if len(costs) < 2:
        raise UserError(f"--verify-cost needs the costs of 2 rows or more, got {text!r}")
    return [cost / costs[0] for cost in costs[: longest + 1]]


def _closed_forms(
    rates: Sequence[float], draft_cost: float, costs: Sequence[float]
) -> dict[str, Any]:
    lengths = range(len(rates) + 1)
    best = best_draft_length(rates, draft_cost, costs)
    return {
        "acceptance": list(rates),
        "draft_cost": draft_cost,
        "verify_cost": list(costs),
        "by_length": [
            {
                "num_draft_tokens": k,
                "expected_tokens": expected_tokens(rates[:k]),
                "speedup": speedup(rates[:k], draft_cost, costs),
            }
            for k in lengths
        ],
        "best": {
            "num_draft_tokens": best.num_draft_tokens,
            "expected_tokens": expected_tokens(rates[: best.num_draft_tokens]),
            "speedup": best.speedup,
        },
        # With equal rates and free verification; JSON has no infinity.
        "ceiling": _finite(speedup_ceiling(max(rates), draft_cost)),
    }


def _finite(value: float) -> float | None:
    return value if value < inf else None


def _tree(rates: Sequence[float], draft_cost: float, costs: Sequence[float]) -> dict[str, Any]:
    try:
        shape = best_tree(rates, draft_cost, costs)
    except ValueError as error:
        raise UserError(f"--tree: {error}") from None
    return {
        "rank_acceptance": list(rates),
        "parents": list(shape.parents),
        "depth": shape.depth,
        "expected_tokens": shape.expected_tokens,
        "speedup": shape.speedup,
    }


def _curve(costs: Sequence[float], sheet: Roofline | None) -> CostCurve:
    """Costs by rows for the simulator; beyond what was given the last slope goes on."""
    if sheet is None:
        return CostCurve(tuple(range(1, len(costs) + 1)), tuple(costs))
    alone = replace(sheet, requests=1, context=0)
    plain = alone.seconds(1)
    return CostCurve(
        SIMULATED_ROWS,
        tuple(alone.seconds(rows) / plain for rows in SIMULATED_ROWS),
        position_seconds=sheet.kv_kb_per_position * 1e-6 / sheet.bandwidth_gb_s / plain,
    )


def _simulated(
    load: int,
    rates: Sequence[float],
    draft_cost: float,
    curve: CostCurve,
    context: int,
) -> dict[str, Any]:
    """As many requests at once, four times as many in all, behind a context that is cached."""
    from foredraft.planning.simulate import Machine, compare, poisson

    num_requests = max(8, 4 * load)
    law = Law.of(*rates)
    trace = poisson(0, num_requests, PROMPT_TOKENS, ANSWER_TOKENS, law, num_cached=context)
    costs = Costs(curve, draft_cost)
    machine = Machine(costs, max_num_seqs=load, max_num_batched_tokens=max(256, 16 * load))
    longest = min(len(rates), LONGEST_SIMULATED)
    played = compare(trace, machine, longest)
    best = played.fixed[played.best_width].goodput
    plain = played.fixed[0].goodput
    return {
        "requests": load,
        "best_width": played.best_width,
        "best_fixed_speedup": best / plain,
        "policy_speedup": played.adaptive.goodput / plain,
        "oracle_speedup": played.oracle.goodput / plain,
        "mean_width": played.adaptive.mean_width,
        "plain_share": played.adaptive.plain_share,
        "fixed_speedup": [each.goodput / plain for each in played.fixed],
    }


def _print(result: Mapping[str, Any]) -> None:
    console = output_console()
    rows = [
        [str(each["num_draft_tokens"]), f"{each['expected_tokens']:.2f}", f"{each['speedup']:.2f}"]
        for each in result["by_length"]
    ]
    console.print(Figures("By draft length", ("draft", "tokens\na step", "speed-up"), rows))
    if "loads" in result:
        console.print(_loads_table(result["loads"]))
    best = result["best"]
    ceiling = "none" if result["ceiling"] is None else f"{result['ceiling']:.2f}"
    lines = [
        f"best draft length {best['num_draft_tokens']}: {best['expected_tokens']:.2f} tokens a "
        f"step, speed-up {best['speedup']:.2f} (ceiling with free verification: {ceiling})"
    ]
    if "tree" in result:
        tree = result["tree"]
        lines.append(
            f"best tree: {len(tree['parents'])} nodes, {tree['depth']} deep, "
            f"{tree['expected_tokens']:.2f} tokens a step, speed-up {tree['speedup']:.2f}; "
            f"parents {tree['parents']}"
        )
    for line in lines:
        console.print(Text(line))


def _loads_table(loads: Sequence[Mapping[str, Any]]) -> Figures:
    rows = [
        [
            str(each["requests"]),
            str(each["best_width"]),
            *(f"{each[key]:.2f}" for key in LOAD_COLUMNS),
            f"{each['plain_share']:.0%}",
        ]
        for each in loads
    ]
    headings = (
        "requests", "best\nfixed", "its\nspeed-up", "the\npolicy's", "the\noracle's",
        "mean\nwidth", "plain\nsteps",
    )  # fmt: skip
    return Figures("Simulated, against plain decoding", headings, rows)
