"""Configurations run in turns over the same prompts, and where their seconds went.

Knows engines and what their observers see; knows no prediction. Only steps count in which all slots
decode and no prompt is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean
from typing import Any

from foredraft.bench.clock import what_is_there_stays
from foredraft.bench.decode import Progress, label_of, touch_memory
from foredraft.bench.plan.trace import Recorder
from foredraft.core.sampling import SamplingParams
from foredraft.drafters.catalog import build_drafter
from foredraft.engine.config import RULE_KEYS, SpeculativeConfig
from foredraft.engine.engine import Engine
from foredraft.engine.llm import LLM
from foredraft.engine.observing import Commit
from foredraft.engine.request import Request
from foredraft.models.load import LoadedModel
from foredraft.planning.policy import StepRecord

BEFORE_A_RUN = 12  # calls of what is read between runs of several requests at once
USUAL_SHARE, LARGEST_USUAL = 0.9, 1.5
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step in which all slots decoded and no prompt was read; seconds by where they went."""

    rows: int
    positions: int  # cached, of all requests
    tokens: int
    nodes: int  # draft nodes
    drafter: float
    target: float  # its pass
    rest: float

    @property
    def seconds(self) -> float:
        return self.drafter + self.target + self.rest


@dataclass(slots=True)
class Spent:
    """Steps, summed up."""

    steps: list[TimedStep] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def tokens(self) -> int:
        return sum(step.tokens for step in self.steps)

    def tokens_each(self, requests: int) -> float:
        """Of a mean step and request."""
        return self.tokens / len(self.steps) / requests if self.steps else 0.0

    def mean(self, part: str) -> float:
        """Of a part of a step, a machine that was busy elsewhere left out; 0 without steps."""
        return usual_mean([getattr(step, part) for step in self.steps])

    def step_ms(self) -> dict[str, float]:
        """Milliseconds of a mean step by where they went."""
        return {part: 1e3 * self.mean(part) for part in ("drafter", "target", "rest")}

    def passes(self) -> dict[int, tuple[int, float, float]]:
        """How often passes of so many rows were seen, their mean positions and seconds."""
        rows: dict[int, list[TimedStep]] = {}
        for step in self.steps:
            rows.setdefault(step.rows, []).append(step)
        return {
            count: (len(steps), fmean(s.positions for s in steps), Spent(steps).mean("target"))
            for count, steps in rows.items()
        }


def usual_mean(values: Sequence[float]) -> float:
    """The mean, with what lies far above nearly all others taken as the most of the usual."""
    if not values:
        return 0.0
    bound = LARGEST_USUAL * sorted(values)[int(USUAL_SHARE * (len(values) - 1))]
    return fmean(min(value, bound) for value in values)


class StepTimes:
    """An observer that keeps the steps of one engine in which `slots` requests decode."""

    def __init__(self, engine: Engine, slots: int) -> None:
        self._engine, self._slots = engine, slots
        self._target = engine.seconds.target
        self.steps: list[TimedStep] = []

    def committed(self, commits: Sequence[Commit]) -> None:
        """Nothing that the step's record doesn't say."""

    def stepped(self, record: StepRecord) -> None:
        target, self._target = (
            self._engine.seconds.target - self._target,
            self._engine.seconds.target,
        )
        load = record.load
        if load.num_rows != load.num_requests or load.num_requests != self._slots:
            return
        self.steps.append(
            TimedStep(
                rows=record.num_rows,
                positions=load.num_positions,
                tokens=sum(judged.accepted + 1 for judged in record.requests),
                nodes=record.num_draft_rows,
                drafter=record.drafter_seconds,
                target=target,
                rest=record.seconds - target,
            )
        )

    def ended(self, requests: Sequence[Request]) -> None:
        """Nothing: who runs an engine sees how requests end."""


class Runner:
    """One engine, the steps it took, and its drafter's record if one is kept."""

    def __init__(self, llm: LLM, slots: int, recorder: Recorder | None = None) -> None:
        self.llm, self.recorder = llm, recorder
        self.token_ids: list[Sequence[int]] = []  # of the last answers
        self._times = StepTimes(llm.engine, slots)
        llm.engine.observers.append(self._times)

    def touch_memory(self, longest: int) -> None:
        """Before anything is timed, with a request so long; none of it is recorded."""
        touch_memory(self.llm, longest)
        if self.recorder is not None:
            self.recorder.texts.clear()

    def answer(self, prompts: Prompts, params: SamplingParams) -> Iterator[bool]:
        """Answer these prompts at once: several in one go, a single one step by step."""
        self._times.steps, self.token_ids = [], []
        if len(prompts) > 1:
            outputs = self.llm.generate([list(ids) for ids in prompts], params)
            self.token_ids = [output.token_ids for output in outputs]
            return
        for delta in self.llm.stream(list(prompts[0]), params):
            if delta.finished is not None:
                self.token_ids = [delta.finished.token_ids]
            yield True

    @property
    def spent(self) -> Spent:
        """What the last answers took."""
        return Spent(self._times.steps)


@dataclass(slots=True)
class Turns:
    """What several runners took for the same prompts: `[repeat][group]`."""

    label: str
    spent: list[list[Spent]] = field(default_factory=list)
    token_ids: list[list[Sequence[int]]] = field(default_factory=list)  # by repeat

    def total(self) -> Spent:
        return Spent([s for repeat in self.spent for group in repeat for s in group.steps])

    def tokens_per_second(self) -> float:
        """Of all groups and repeats together, a machine that was busy elsewhere left out."""
        total = self.total()
        seconds = len(total.steps) * total.mean("seconds")
        return total.tokens / seconds if seconds else 0.0

    def spread(self) -> list[float]:
        """Tokens a second of each repeat."""
        totals = [
            (sum(g.tokens for g in repeat), sum(g.seconds for g in repeat)) for repeat in self.spent
        ]
        return [tokens / seconds if seconds else 0.0 for tokens, seconds in totals]


@dataclass(frozen=True, slots=True)
class Bench:
    """What engines are made of, and how long their answers are."""

    loaded: LoadedModel
    engine: Mapping[str, Any]  # further settings of every engine
    max_tokens: int

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, temperature=0.0)

    def runner(self, config: Mapping[str, Any] | None, slots: int = 1) -> Runner:
        """A configuration as a user would run it."""
        llm = LLM(
            self.loaded, speculative_config=config, max_num_seqs=slots,
            enable_prefix_caching=False, **self.engine,
        )  # fmt: skip
        return Runner(llm, slots)

    def recording(self, config: Mapping[str, Any], width: int) -> Runner:
        """A configuration's drafter with fixed drafts of `width`, and a record of what it does."""
        parsed = SpeculativeConfig.from_mapping(config)
        built = build_drafter(parsed.method, parsed.options, self.loaded)
        recorder = Recorder(built.drafter)
        rules = {key: config[key] for key in RULE_KEYS if key in config}
        llm = LLM(
            self.loaded, drafter=recorder, max_num_seqs=1, enable_prefix_caching=False,
            speculative_config={"num_speculative_tokens": width, **rules}, **self.engine,
        )  # fmt: skip
        return Runner(llm, 1, recorder)


def label(loaded: LoadedModel, config: Mapping[str, Any] | None) -> str:
    """A short name, with "auto" for what it stands for."""
    return label_of(None if config is None else str(config.get("method", "auto")), config)


def in_turns(
    make: Sequence[tuple[str, Callable[[], Runner]]],
    groups: Sequence[Prompts],
    params: SamplingParams,
    repeats: int,
    progress: Callable[[int, int], None],
    between: Callable[[], None],
) -> list[Turns]:
    """Every runner on each group, in an order drawn anew each time: a group of one prompt a step
    each in turn, so that what the machine does in these tenths of a second falls on all alike;
    larger ones one after another. `between` is called before each round of steps, or some times
    before each run. Each repeat has new runners: a drafter that remembers must not meet an answer
    again.
    """
    found = [Turns(name) for name, _ in make]
    number, total, draw = 0, repeats * len(groups), Random(0)
    longest = max(len(prompt) for group in groups for prompt in group) + (params.max_tokens or 0)
    for _ in range(repeats):
        runners = [build() for _, build in make]
        for runner in runners:
            runner.touch_memory(longest)
        for each in found:
            each.spent.append([])
            each.token_ids.append([])
        for group in groups:
            with what_is_there_stays():
                left = [runner.answer(group, params) for runner in runners]
                while left:
                    draw.shuffle(left)
                    for _ in range(1 if len(group) == 1 else BEFORE_A_RUN):
                        between()
                    going = left if len(group) == 1 else left[:1]
                    ended = [answer for answer in going if not next(answer, False)]
                    left = [answer for answer in left if answer not in ended]
            for runner, turns in zip(runners, found, strict=True):
                turns.spent[-1].append(runner.spent)
                turns.token_ids[-1] += runner.token_ids
            number += 1
            progress(number, total)
    return found


def reporting(progress: Progress, what: str) -> Callable[[int, int], None]:
    """The progress of one phase."""
    return lambda done, total: progress(what, done, total)
