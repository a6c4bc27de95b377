"""`bench serve` without passes: the same loads in the simulator, with the model's own answers, the
real drafter and the costs that a result tells.

Knows a result of `bench serve`, a model that answers once, and drafters that read tokens alone;
measures nothing. What a policy does with real drafts can be seen in seconds, on the same luck every
time, and without what a machine's moods add.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any

from foredraft.bench.provenance import provenance
from foredraft.bench.serve.arrivals import Job, Prompt, Source
from foredraft.bench.serve.bench import MEASURE_OF, MIN_ROWS, ROWS_PER_REQUEST
from foredraft.bench.serve.prompts import of_tokens
from foredraft.bench.serve.results import comparisons, points
from foredraft.bench.serve.simulated import (
    LEAST,
    NEAR,
    REQUESTS_PER_CLIENT,
    at_usual_pace,
    check_has,
    prompt_row_seconds,
    served_curve,
)
from foredraft.bench.serve.steps import StepCounts
from foredraft.bench.serve.sweep import (
    WARM_UP_REQUESTS,
    Level,
    Measured,
    Sample,
    Settings,
    first_prompt,
)
from foredraft.bench.serve.traces import Emission, Trace, Window, figures
from foredraft.bench.serve.verdicts import verdicts
from foredraft.bench.workload import Item
from foredraft.core.errors import UserError
from foredraft.core.sampling_params import SamplingParams
from foredraft.drafters.catalog import build_drafter
from foredraft.drafters.interface import Drafter
from foredraft.engine.config import SpeculativeConfig
from foredraft.engine.llm import LLM
from foredraft.models.load import LoadedModel
from foredraft.planning.adaptive import AdaptivePolicy
from foredraft.planning.allocation import Costs
from foredraft.planning.cost import CostCurve
from foredraft.planning.policy import FixedWidth, Offer, Policy, StepRecord
from foredraft.planning.running import Running
from foredraft.planning.simulate import Machine, Steady, play
from foredraft.testing.requests import draft_request

NOISE = 0.03  # of a step's seconds
NEEDED_TOO = ("objectives", "temperature", "method", "speculative_config", "prompt_tokens")
Progress = Callable[[str, int, int], None]
Answers = Mapping[str, Sequence[int]]  # token ids by prompt


class Replayed(Running):
    """A request that is given an answer that is known, and drafts of it as they really are."""

    def __init__(
        self, job: Job, answer: Sequence[int], drafter: Drafter | None, name: str, vocab_size: int
    ) -> None:
        """`name`: for the drafter, which may remember requests of other loads."""
        prompt = job.prompt.token_ids
        self.answer = answer[: job.max_tokens]
        super().__init__(str(job.index), len(prompt), len(self.answer))
        self.trace = Trace(job.index, 0.0, job.prompt.id, len(prompt))
        self._drafter, self._name = drafter, name
        self._tokens = list(prompt)
        self._draft: tuple[int, ...] = ()
        self._request = draft_request(prompt, vocab_size=vocab_size, name=name)

    def offer(self, width: int) -> Offer:
        if not width or self._drafter is None:
            return Offer(self.id, self.request_type, self.num_positions, ())
        request = self._request._replace(tokens=tuple(self._tokens), max_nodes=width)
        (draft,) = self._drafter.propose([request])
        self._draft = tuple(draft.tokens)
        return Offer(
            self.id,
            self.request_type,
            self.num_positions,
            tuple(draft.parents),
            None if draft.confidence is None else tuple(draft.confidence),
        )

    def accepted(self, offer: Offer, nodes: Sequence[int]) -> list[int]:
        path, last = [], -1
        for token in self.answer[self.num_output :]:
            right = (n for n in nodes if offer.parents[n] == last and self._draft[n] == token)
            last = next(right, -1)
            if last < 0:
                break
            path.append(last)
        return path

    def emitted(self, at: float, tokens: int) -> None:
        self._tokens += self.answer[self.num_output : self.num_output + tokens]
        super().emitted(at, tokens)
        self.trace.emissions.append(Emission(at, tokens))
        if not self.left_to_say:
            self.trace.finished = True
            self.leave()

    def leave(self) -> None:
        """The drafter may forget it."""
        if self._drafter is not None:
            self._drafter.release(self._name)


@dataclass(frozen=True, slots=True)
class _Configuration:
    """What lives from the first load to the last."""

    label: str
    policy: Policy
    drafter: Drafter | None
    learns: bool


@dataclass(frozen=True, slots=True)
class _Replay:
    """Everything that all configurations have in common."""

    result: Mapping[str, Any]
    settings: Settings
    prompts: Sequence[Prompt]
    answers: Answers
    vocab_size: int
    curve: CostCurve
    reading: float | None

    def sample(self, each: _Configuration, level: Level, number: int, requests: int) -> Sample:
        """One load of one configuration, from a prompt that depends on the round."""
        crowd, settings = level.concurrency or 1, self.settings
        start = first_prompt(number, len(self.prompts), settings.rounds)
        jobs = Source(self.prompts, settings.max_tokens, start).jobs(crowd)
        name = f"{each.label}/{crowd}/{number}/{requests}"
        running = [
            Replayed(
                job,
                self.answers[job.prompt.id],
                each.drafter,
                f"{name}/{job.index}",
                self.vocab_size,
            )
            for job in islice(jobs, REQUESTS_PER_CLIENT * crowd + LEAST)
        ]
        machine = Machine(
            Costs(self.curve, self._draft_ratio(each.label, crowd)),
            crowd,
            max(MIN_ROWS, ROWS_PER_REQUEST * max(e.concurrency or 1 for e in settings.levels)),
            NOISE,
            self.reading,
        )
        records: list[StepRecord] = []
        steady = Steady(requests, settings.seconds)
        played = play(each.policy, running, machine, number, steady, records.append)
        for one in running:
            if one.trace.emissions and not one.trace.finished:
                one.leave()
        firsts = [one.trace.emissions[0].at for one in running[:crowd]]
        window = Window(max(firsts), played.seconds)
        traces = [one.trace for one in running]
        return Sample(figures(traces, window), StepCounts.of(records), None, {}, 0)

    def _draft_ratio(self, label: str, crowd: int) -> float:
        """Drafting one token / a pass over one row, as it was at that load."""
        for point in self.result["points"]:
            if (point["label"], point.get("concurrency")) == (label, crowd) and point["width"]:
                seconds = point["drafter_seconds_per_step"] or 0.0
                return float(seconds / (point["width"] * self.curve.of_rows(crowd)))
        return 0.0


def replay(
    result: Mapping[str, Any], loaded: LoadedModel, items: Sequence[Item], progress: Progress
) -> dict[str, Any]:
    """What `bench serve` would find by the costs in its `result`, in the same form; and how far
    fixed widths and policies are from what it found.

    Raises UserError for a result of other prompts, of sampled answers or without costs, and for
    drafters that need more than tokens.
    """
    check_has(result, NEEDED_TOO)
    if result["temperature"]:
        raise UserError(
            f"the result is of --temperature {result['temperature']:g}: only greedy answers are "
            "known before they are asked for"
        )
    levels = [Level(concurrency=n) for n in _crowds(result)]
    settings = Settings(
        levels,
        result["max_tokens"],
        result["rounds"],
        result["window"]["requests"],
        result["window"]["seconds"],
    )
    room = loaded.config.max_position_embeddings - settings.max_tokens
    prompts = of_tokens(loaded.tokenizer, items, room, result["prompt_tokens"])
    if [len(prompt.token_ids) for prompt in prompts] != result["prompt_lengths"]:
        raise UserError("the result is of other prompts: replay it with its own MODEL and workload")
    curve = served_curve(result["costs"]["calibrated"], result["step_costs"]["decoding"])
    common = _Replay(
        result,
        settings,
        prompts,
        _answers(loaded, prompts, settings.max_tokens, progress),
        loaded.config.vocab_size,
        curve,
        prompt_row_seconds(curve, result["step_costs"]["reading"]),
    )
    measured, configurations = Measured(), _configurations(result, loaded)
    for done, each in enumerate(configurations, start=1):
        _play_all(common, each, measured)
        progress("replay", done, len(configurations))
    found, ratios = points(measured), comparisons(measured, _fixed(result))
    near = [_near(point, result) for point in found]
    return {
        "kind": "replay",
        **provenance(),
        "model": loaded.name,
        "prompts": len({prompt.id for prompt in prompts}),
        **{key: result[key] for key in ("max_tokens", "rounds", "window", "objectives", "fixed")},
        "of_revision": result.get("revision"),
        "points": found,
        "comparisons": ratios,
        "verdicts": verdicts(found, ratios, result["objectives"]),
        "errors": near,
        "largest_error": max(abs(each["error"]) for each in near),
    }


def _crowds(result: Mapping[str, Any]) -> list[int]:
    found = dict.fromkeys(p["concurrency"] for p in result["points"] if "concurrency" in p)
    if not found:
        raise UserError("the result has no closed loop (--concurrency)")
    return list(found)


def _fixed(result: Mapping[str, Any]) -> list[str]:
    return [label for label, width in result["fixed"].items() if width]


def _configurations(result: Mapping[str, Any], loaded: LoadedModel) -> list[_Configuration]:
    """Those of the result, each with a drafter of its own."""
    found = []
    calibrated = CostCurve.from_json(result["costs"]["calibrated"])
    most = max(result["fixed"].values(), default=0)
    most = result["speculative_config"].get("num_speculative_tokens") or most
    for label, width in result["fixed"].items():
        drafter = _drafter(result, loaded) if width else None
        found.append(_Configuration(label, FixedWidth(width), drafter, learns=False))
    objective_of = {measure: objective for objective, measure in MEASURE_OF.items()}
    for label, measure in result["objectives"].items():
        policy = AdaptivePolicy(most, calibrated, 0.0, objective_of[measure], catches_up=False)
        found.append(_Configuration(label, policy, _drafter(result, loaded), learns=True))
    return found


def _drafter(result: Mapping[str, Any], loaded: LoadedModel) -> Drafter:
    config = SpeculativeConfig.from_mapping(result["speculative_config"])
    drafter = build_drafter(str(result["method"]), config.options, loaded).drafter
    wants = drafter.capabilities
    if wants.costs_passes or wants.cache or wants.top_ids or wants.feature_layers:
        raise UserError(
            f"{result['method']} can't be replayed, it needs what a pass tells: valid are drafters "
            "that read tokens alone, look-ups and tables"
        )
    return drafter


def _answers(
    loaded: LoadedModel, prompts: Sequence[Prompt], max_tokens: int, progress: Progress
) -> Answers:
    """What plain decoding says, and so does every other way."""
    different = {prompt.id: list(prompt.token_ids) for prompt in prompts}
    outputs = LLM(loaded).generate(
        list(different.values()),
        SamplingParams(max_tokens=max_tokens, temperature=0.0),
        progress=lambda done, total: progress("answers", done, total),
    )
    return {id_: output.token_ids for id_, output in zip(different, outputs, strict=True)}


def _play_all(common: _Replay, each: _Configuration, measured: Measured) -> None:
    """As a sweep does: what learns is warmed up, then all levels of a round, and all rounds."""
    levels = common.settings.levels
    if each.learns:
        crowds = sorted(levels, key=lambda level: level.concurrency or 1)
        for level in dict.fromkeys((crowds[0], crowds[-1])):
            common.sample(each, level, 0, WARM_UP_REQUESTS)
    for number in range(common.settings.rounds):
        for level in levels:
            requests = common.settings.extent(level).requests
            measured.add(each.label, level, common.sample(each, level, number, requests))


def _near(point: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """How far a point is from the one measured, at the machine's usual pace: the median round."""
    (other,) = [
        each
        for each in result["points"]
        if each["label"] == point["label"] and each.get("concurrency") == point["concurrency"]
    ]
    rounds = zip(point["tokens_per_second_by_round"], at_usual_pace(other), strict=True)
    error = median(ours / theirs for ours, theirs in rounds) - 1.0
    return {
        "concurrency": point["concurrency"],
        "label": point["label"],
        "error": error,
        "near": abs(error) <= NEAR,
    }
