"""`foredraft plan MODEL --workload FILE`: options, tables and files.

Knows the form of the result; `foredraft.bench.plan` measures, predicts and recommends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rich.console import Group
from rich.text import Text
from typer import Option

from foredraft.cli.console import visible
from foredraft.cli.delivery import check_output, deliver, progress_bars
from foredraft.cli.interrupts import held_interrupts
from foredraft.cli.option_groups import given_options
from foredraft.cli.options import RuntimeOptions, parse_config
from foredraft.cli.plan_config_file import check_config_file, write_config_file
from foredraft.cli.plots import PNG_OR_SVG, check_plot, write_plot
from foredraft.cli.tables import Figures
from foredraft.core.errors import UserError

PANEL = "With a model"
MOST_REQUESTS = 256
DEFAULT_LOADS = "1,2,4,8,16,32"


def _workload(*names: str, words: str, value: str | None = "N", **more: Any) -> Any:
    return Option(*names, help=words, metavar=value, rich_help_panel=PANEL, **more)


@dataclass(frozen=True)
class PlanOptions:
    """What is measured, and where results go."""

    workload: Annotated[
        Path | None, _workload(words="JSON lines with id, task, turns.", value="FILE")
    ] = None
    speculative_config: Annotated[
        list[str] | None,
        _workload(words="A drafter beside those at hand; may be repeated.", value="JSON"),
    ] = None
    only_given: Annotated[
        bool,
        _workload("--only-given", words="None but those of --speculative-config.", value=None),
    ] = False
    prompts: Annotated[int, _workload(words="Of all tasks in turn.", min=1)] = 10
    max_tokens: Annotated[int, _workload(words="Of each answer at most.", min=2)] = 96
    concurrency: Annotated[
        str, _workload(words="Loads: requests at once. The first one is checked.", value="N,...")
    ] = DEFAULT_LOADS
    check: Annotated[int, _workload(words="Configurations to run after the prediction.", min=0)] = 1
    repeats: Annotated[int, _workload(words="Times each of them is run.", min=1)] = 3
    recalibrate: Annotated[
        bool,
        _workload("--recalibrate", words="Measure what passes cost anew.", value=None),
    ] = False
    output: Annotated[
        Path | None,
        _workload("--output", words="Write the JSON result to this file.", value="FILE"),
    ] = None
    output_config: Annotated[
        Path | None,
        _workload(words="Write what is recommended, for --speculative-config.", value="FILE.toml"),
    ] = None

    def loads(self) -> list[int]:
        """Rising numbers. Raises UserError."""
        try:
            loads = [int(part) for part in self.concurrency.split(",")]
        except ValueError:
            loads = []
        if (
            not loads
            or loads != sorted(set(loads))
            or not 1 <= loads[0] <= loads[-1] <= MOST_REQUESTS
        ):
            raise UserError(
                f"--concurrency must be rising integers in 1..{MOST_REQUESTS} with commas "
                f"between, got {self.concurrency!r}"
            )
        return loads


def refuse_without_model(options: PlanOptions, runtime: RuntimeOptions) -> None:
    """Raise UserError where an option that is about a model came without one."""
    given = [*given_options(options), *given_options(runtime)]
    if given:
        raise UserError(f"{given[0]} needs a MODEL: foredraft plan MODEL --workload FILE")


def plan_workload(
    model: str,
    options: PlanOptions,
    runtime: RuntimeOptions,
    max_draft: int | None,
    plot: Path | None,
    json_output: bool,
) -> None:
    """Measure, predict, recommend, check, deliver."""
    if options.workload is None:
        raise UserError("a MODEL needs a workload to plan for: --workload FILE")
    configs = [parse_config(text) for text in options.speculative_config or ()]
    if None in configs:
        raise UserError("--speculative-config null: plain decoding is measured anyway")
    if options.only_given and not configs:
        raise UserError("--only-given needs a --speculative-config")
    loads = options.loads()
    check_output(options.output)
    check_config_file(options.output_config)
    check_plot(plot, *PNG_OR_SVG)
    from foredraft.bench.workload import read_workload

    items = read_workload(options.workload)
    with held_interrupts():
        from foredraft.bench.plan.plan import PlanSettings
        from foredraft.bench.plan.plan import plan_workload as measure
    from foredraft.cli.download import fetch_draft

    loaded = runtime.load(model)
    for config in configs:
        fetch_draft(config)
    settings = PlanSettings(
        configs=[config for config in configs if config is not None],
        at_hand=not options.only_given,
        prompts=options.prompts,
        max_tokens=options.max_tokens,
        max_draft=max_draft,
        loads=loads,
        checks=options.check,
        repeats=options.repeats,
        recalibrate=options.recalibrate,
        engine=runtime.engine_settings(),
    )
    with progress_bars() as progress:
        result = measure(loaded, items, settings, progress)
    if options.output_config is not None:
        advice = result["recommendation"]
        config = advice["speculative_config"]
        write_config_file(options.output_config, model, config, advice["reasons"])
    deliver(result, options.output, json_output, plan_table)
    if plot is not None:
        from foredraft.cli.plan_plot import draw_workload

        write_plot(plot, partial(draw_workload, result))


def plan_table(result: Mapping[str, Any]) -> Group:
    """Drafters, predictions by load, the recommendation and what became of it."""
    parts: list[Figures | Text] = [_drafters(result), _loads(result)]
    parts += [Text(visible(f"- {line}")) for line in result["recommendation"]["reasons"]]
    parts.append(Text(""))
    if result["check"] is not None:
        parts.append(_check(result["check"]))
    return Group(*parts)


def _drafters(result: Mapping[str, Any]) -> Figures:
    title = (
        f"{result['model']}, {result['dtype']}, {result['prompts']} prompts, greedy; plain "
        f"{result['plain']['tokens_per_second']:.1f} tokens/s"
    )
    first = str(result["loads"][0])
    rows = []
    for each in result["drafters"]:
        best = max(each["by_load"][first], key=lambda found: found["speedup"])
        rates = each["acceptance_by_position"][:4]
        rows.append(
            [
                each["label"],
                f"{each['found']:.0%}",
                " ".join(f"{rate:.2f}" for rate in rates) or "-",
                f"{_drafter_ms(each, best['num_speculative_tokens']):.2f}",
                str(best["num_speculative_tokens"]),
                f"{best['tokens']:.2f}",
                f"{best['step_cost']:.2f}",
                f"{best['speedup']:.2f}x",
            ]
        )
    headings = (
        "drafter", "finds\na draft", "accepted at\npositions 1-4", "its ms\na step", "best\nlength",
        "tokens\na step", "step\ncost", f"predicted,\n{first} at once",
    )  # fmt: skip
    return Figures(title, headings, rows)


def _drafter_ms(drafter: Mapping[str, Any], nodes: int) -> float:
    spent = drafter["drafter_ms"]
    return float(spent["fixed"] + spent["node"] * nodes)


def _loads(result: Mapping[str, Any]) -> Figures:
    loads = [str(load) for load in result["loads"]]
    rows = []
    for each in result["drafters"]:
        best = [max(each["by_load"][load], key=lambda found: found["speedup"]) for load in loads]
        rows.append(
            [
                each["label"],
                *(f"{found['speedup']:.2f}x ({found['num_speculative_tokens']})" for found in best),
            ]
        )
    title = "predicted speed-up (best draft length) by requests at once"
    return Figures(title, ("drafter", *loads), rows)


def _check(check: Mapping[str, Any]) -> Figures:
    rows = [
        [
            each["label"],
            f"{each['predicted']:.2f}x",
            f"{each['predicted_at_pace']:.2f}x",
            f"{each['measured']:.2f}x",
            f"{each['error']:+.1%}",
            "yes" if each["identical_to_plain"] else "no",
        ]
        for each in check["configs"]
    ]
    title = (
        f"checked with {check['requests']} at once, {check['repeats']} times: "
        f"{check['num_close']} of {len(rows)} within {check['close']:.0%}"
    )
    headings = (
        "configuration", "predicted", "at the costs\nof the check", "measured", "off by",
        "identical",
    )  # fmt: skip
    return Figures(title, headings, rows)
