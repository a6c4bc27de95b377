"""`foredraft plan MODEL --workload FILE`: which drafter, how long its drafts, and is that so?

Measures every drafter once with wide drafts, predicts all narrower ones and loads by what passes
cost on this machine, recommends, and runs what it recommends beside plain decoding. Knows engines
and predictions; knows no terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from statistics import fmean
from typing import Any

from foredraft.bench.decode import Progress, prompt_ids
from foredraft.bench.pace import CONTEXT
from foredraft.bench.plan.check import checked
from foredraft.bench.plan.describe import described, verify_cost
from foredraft.bench.plan.measure import (
    Bench,
    Prompts,
    Runner,
    Spent,
    Turns,
    in_turns,
    label,
    reporting,
)
from foredraft.bench.plan.predict import Drafting, Line, Machine, Passes, predict
from foredraft.bench.plan.readings import Readings
from foredraft.bench.plan.recommend import Candidate, Trial, choose_trials, recommend
from foredraft.bench.plan.replay import replay
from foredraft.bench.plan.trace import Text
from foredraft.bench.provenance import provenance
from foredraft.bench.workload import Item
from foredraft.core.errors import ConfigError
from foredraft.drafters.catalog import BUILT_IN, build_drafter
from foredraft.drafters.interface import Capabilities
from foredraft.engine.calibration import cost_curve
from foredraft.engine.config import POLICY_KEYS, SpeculativeConfig
from foredraft.engine.memory import choose_cache_dtype
from foredraft.models.decoder import cache_shape
from foredraft.models.load import LoadedModel

LOADS = (1, 2, 4, 8, 16, 32)
MAX_DRAFT = 8
NARROW = 1  # draft nodes of the second run, which tells what each further node takes
ROWS_READ = (1, 3, 5, 9)  # passes that show what costs are at the moment


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What is asked."""

    configs: Sequence[Mapping[str, Any]] = ()  # beside the drafters at hand, if these are wanted
    at_hand: bool = True
    prompts: int = 10
    max_tokens: int = 96
    max_draft: int | None = None  # None: 8, or what a drafter wants if that is more
    loads: Sequence[int] = LOADS
    checks: int = 1
    repeats: int = 3  # of every check
    recalibrate: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Measured:
    """One drafter's wide run and its narrow one."""

    config: Mapping[str, Any]
    capabilities: Capabilities
    width: int  # the widest draft
    texts: list[Text] = field(default_factory=list)
    wide: Spent = field(default_factory=Spent)
    narrow: Spent = field(default_factory=Spent)

    @property
    def runs_a_model(self) -> bool:
        """Whether a draft costs passes, always or now and then."""
        own = self.capabilities
        return own.costs_passes or own.weight_bytes > 0 or own.target_layers > 0


def plan_workload(
    loaded: LoadedModel, items: Sequence[Item], settings: PlanSettings, progress: Progress
) -> dict[str, Any]:
    """Measure, predict, recommend, check; the form is that of docs/planning.md.

    Raises ConfigError for a configuration that can't be, and where there is no drafter at all;
    InvalidRequest for a prompt that doesn't fit.
    """
    measured = [_drafter(loaded, config, settings) for config in _configs(loaded, settings)]
    ids = prompt_ids(loaded, items, settings.engine.get("max_model_len"))
    prompts = [ids[item.id] for item in spread_over_tasks(items, settings.prompts)]
    bench = Bench(loaded, settings.engine, settings.max_tokens)
    shape = cache_shape(
        loaded.config, choose_cache_dtype(settings.engine.get("kv_dtype", "auto"), loaded)
    )
    curve = cost_curve(loaded, shape, recalibrate=settings.recalibrate)
    readings = Readings(loaded, ROWS_READ, CONTEXT)
    plain = _measure(bench, measured, prompts, progress, readings)
    before = readings.taken()
    if not plain.total().steps:
        raise ConfigError(
            f"there is nothing to measure: all of {len(prompts)} answers end with their first "
            "token; other prompts are needed, or more --max-tokens"
        )
    spent, positions = plain.total(), _mean_position(measured[0].texts)
    machine = Machine.seen(curve, _passes(spent, measured), spent.mean("rest"))
    candidates = [_candidate(each, machine, settings.loads) for each in measured]
    advice = recommend(candidates, machine, settings.loads)
    trials = choose_trials(candidates, advice, settings.loads[0], settings.checks)
    runs = _run(bench, items, ids, trials, settings, progress, readings)
    if runs is not None and not all(run.total().steps for run in (runs[0], *runs[1])):
        advice["reasons"].append(
            f"not checked: in no step did all of {settings.loads[0]} requests decode; more "
            "--max-tokens would help"
        )
        runs = None
    return {
        "kind": "plan",
        **provenance(),
        "model": loaded.name,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "prompts": len(prompts),
        "max_tokens": settings.max_tokens,
        "plain": {
            "tokens_per_second": plain.tokens_per_second(),
            "mean_positions": positions,
            "step_ms": spent.step_ms(),
        },
        "verify_cost": verify_cost(machine, positions, max(each.width for each in measured)),
        "loads": list(settings.loads),
        "drafters": [
            described(candidate, each.capabilities.tree, each.width, machine, positions)
            for each, candidate in zip(measured, candidates, strict=True)
        ],
        "recommendation": advice,
        "check": checked(*runs, trials, machine.when(before, readings.taken())) if runs else None,
    }


def _run(
    bench: Bench,
    items: Sequence[Item],
    ids: Mapping[str, Sequence[int]],
    trials: Sequence[Trial],
    settings: PlanSettings,
    progress: Progress,
    readings: Readings,
) -> tuple[Turns, list[Turns]] | None:
    """Plain decoding and the trials, run at the first load; None where there is no trial."""
    if not trials:
        return None
    load = settings.loads[0]
    # Several at once: two waves, of which the steps count that all slots share.
    count = settings.prompts if load == 1 else max(settings.prompts, 2 * load)
    prompts = [ids[item.id] for item in spread_over_tasks(items, count)]
    waves = [prompts[i % len(prompts)] for i in range(count)]
    groups = [[prompt] for prompt in prompts] if load == 1 else [waves]
    configs = [None, *(trial.config for trial in trials)]
    plain, *runs = in_turns(
        [(label(bench.loaded, each), partial(bench.runner, each, load)) for each in configs],
        groups, bench.params, settings.repeats, reporting(progress, "check"), readings.read,
    )  # fmt: skip
    return plain, runs


def spread_over_tasks(items: Sequence[Item], count: int) -> list[Item]:
    """The first `count` items, taken from all tasks in turn."""
    by_task: dict[str, list[Item]] = {}
    for item in items:
        by_task.setdefault(item.task, []).append(item)
    rounds = zip_longest(*by_task.values())
    return [item for one in rounds for item in one if item is not None][:count]


def _configs(loaded: LoadedModel, settings: PlanSettings) -> Sequence[Mapping[str, Any]]:
    """Those given, and the drafters that need nothing but their name."""
    found = [dict(config) for config in settings.configs]
    for method in BUILT_IN if settings.at_hand else ():
        try:
            capabilities = build_drafter(method, {}, loaded).drafter.capabilities
        except ConfigError:  # it needs an option, or does not go with this model
            continue
        if not capabilities.prediction and {"method": method} not in found:
            found.append({"method": method})
    if not found:
        raise ConfigError("there is no drafter to plan for: give a --speculative-config")
    return found


def _drafter(loaded: LoadedModel, config: Mapping[str, Any], settings: PlanSettings) -> _Measured:
    """A configuration's drafter and its widest draft: what the config says, else as wide as asked
    or as the drafter would go.
    """
    parsed = SpeculativeConfig.from_mapping(config)
    built = build_drafter(parsed.method, parsed.options, loaded)
    wanted = parsed.num_speculative_tokens
    if wanted is not None and wanted < 1:
        raise ConfigError(
            f"num_speculative_tokens must be 1 or more to plan for {parsed.method!r}, got {wanted}"
        )
    fixed = {key: value for key, value in config.items() if key not in POLICY_KEYS}
    width = wanted or settings.max_draft or max(MAX_DRAFT, built.num_speculative_tokens)
    return _Measured(fixed, built.drafter.capabilities, width)


def _measure(
    bench: Bench,
    measured: Sequence[_Measured],
    prompts: Prompts,
    progress: Progress,
    readings: Readings,
) -> Turns:
    """Run plain decoding, and every drafter wide and narrow, in turns; the plain run."""
    wide = [bench.recording(each.config, each.width) for each in measured]
    narrow = [bench.recording(each.config, NARROW) for each in measured]
    names = [label(bench.loaded, each.config) for each in measured]
    plain, *found = in_turns(
        [
            (name, partial(_same, runner))
            for name, runner in zip(
                ["plain", *names, *names], [bench.runner(None), *wide, *narrow], strict=True
            )
        ],
        [[prompt] for prompt in prompts], bench.params, 1, reporting(progress, "measure"),
        readings.read,
    )  # fmt: skip
    count = len(measured)
    for each, runner, long, short in zip(measured, wide, found[:count], found[count:], strict=True):
        if runner.recorder is not None:
            each.texts = list(runner.recorder.texts)
        each.wide, each.narrow = long.total(), short.total()
    return plain


def _same(runner: Runner) -> Runner:
    return runner


def _mean_position(texts: Sequence[Text]) -> float:
    """Of the plain steps over these texts."""
    steps = [step.position for text in texts for step in replay(text, 0)]
    return fmean(steps)


def _candidate(each: _Measured, machine: Machine, loads: Sequence[int]) -> Candidate:
    wide, narrow = each.wide, each.narrow
    drafting = Drafting(
        each.texts,
        _line(narrow, wide, "drafter"),
        _line(narrow, wide, "rest"),
        each.runs_a_model,
        _pass_factor(each, machine) if each.runs_a_model else 1.0,
    )
    widths = [each.width] if drafting.own_rows else range(1, each.width + 1)
    predictions = {
        load: [predict(drafting, machine, width, load) for width in widths] for load in loads
    }
    return Candidate(each.config, drafting, predictions)


def _line(narrow: Spent, wide: Spent, part: str) -> Line:
    """Seconds of a step, by its draft nodes."""
    few, many = narrow.mean("nodes"), wide.mean("nodes")
    return Line.through((few, narrow.mean(part)), (many, wide.mean(part)))


def _pass_factor(each: _Measured, machine: Machine) -> float:
    steps = [step for step in (*each.wide.steps, *each.narrow.steps) if step.nodes]
    costs = sum(machine.pass_seconds(step.rows, step.positions) for step in steps)
    return len(steps) * Spent(steps).mean("target") / costs if steps else 1.0


def _passes(plain: Spent, measured: Sequence[_Measured]) -> Passes:
    """Of all runs together, but for drafters that may do a part of them, or drive the target's
    weights out of the caches.
    """
    cheap = [each for each in measured if not each.runs_a_model]
    spent = [plain, *(each.wide for each in cheap), *(each.narrow for each in cheap)]
    return Spent([step for each in spent for step in each.steps]).passes()
