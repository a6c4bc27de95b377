"""What one measured generation yields, and the figures made of many.

Knows counts and seconds; knows neither models nor files. Every figure counts token ids and the
time after the first one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from foredraft.bench.intervals import bootstrap_interval, spread

Pair = tuple[float, float]  # tokens, seconds
STRETCH = 64  # tokens; a drafter that loses its place accepts less from one stretch to the next


@dataclass(frozen=True, slots=True)
class Sample:
    """One generation. Tokens, steps and seconds are those after the prompt's own pass."""

    token_ids: tuple[int, ...]
    tokens: int
    seconds: float
    steps: int
    drafts: int = 0  # steps that verified a draft
    drafted: int = 0
    accepted: int = 0
    accepted_by_position: tuple[float, ...] = ()  # drafts whose first i + 1 tokens were accepted
    part_seconds: Mapping[str, float] = field(default_factory=dict)  # drafter, target, rest
    from_draft: tuple[bool, ...] = ()  # of each token: it was an accepted draft token
    # Mean seconds of the reference passes of one row between its steps: how fast the machine was.
    reference_seconds: float | None = None


@dataclass(slots=True)
class Run:
    """One configuration's samples, by prompt id, in order of repetition."""

    label: str
    speculative_config: Mapping[str, Any] | None = None
    peer: str | None = None
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def add(self, prompt_id: str, sample: Sample) -> None:
        self.samples.setdefault(prompt_id, []).append(sample)


def _seconds(samples: Sequence[Sample]) -> float:
    return median(sample.seconds for sample in samples)


def _at_equal_pace(samples: Sequence[Sample], usual: float | None) -> float:
    """Seconds, had the machine been as fast as `usual` all the time (seconds of a reference pass);
    as they were where nobody knows.
    """
    return median(
        sample.seconds * usual / sample.reference_seconds
        if usual and sample.reference_seconds
        else sample.seconds
        for sample in samples
    )


def _common_pace(run: Run, plain: Run) -> float | None:
    """Seconds of a reference pass at which two runs are compared: what is usual beside `plain`.
    None unless both were measured beside such passes.
    """
    return None if _usual(run) is None else _usual(plain)


def _usual(run: Run) -> float | None:
    every = [sample.reference_seconds for each in run.samples.values() for sample in each]
    known = [seconds for seconds in every if seconds is not None]
    return median(known) if known else None


def _rate(pairs: Sequence[Pair]) -> float:
    """Tokens per second of `(tokens, seconds)` pairs together."""
    seconds = sum(pair[1] for pair in pairs)
    return sum(pair[0] for pair in pairs) / seconds if seconds > 0 else 0.0


def _cost(run: Run, ids: Sequence[str], usual: float | None) -> float:
    """Seconds of a mean step at the `usual` pace, over the prompts `ids`."""
    steps = sum(run.samples[key][0].steps for key in ids)
    seconds = sum(_at_equal_pace(run.samples[key], usual) for key in ids)
    return seconds / steps if steps else 0.0


def _step_cost(run: Run, plain: Run, ids: Sequence[str]) -> float | None:
    """Of a mean step, in plain ones, at equal pace."""
    usual = _common_pace(run, plain)
    return _ratio(_cost(run, ids, usual), _cost(plain, ids, usual))


def _by_stretch(samples: Sequence[Sample]) -> list[float]:
    """Tokens per step in each whole stretch of `STRETCH` output tokens, over all samples."""
    longest = max(len(sample.from_draft) for sample in samples)
    figures = []
    for start in range(0, longest - STRETCH + 1, STRETCH):
        parts = [sample.from_draft[start : start + STRETCH] for sample in samples]
        flags = [flag for part in parts if len(part) == STRETCH for flag in part]
        # Every step ends with one token that is the target's own.
        figures.append(len(flags) / max(1, flags.count(False)))
    return figures


def _step_ms(samples: Sequence[Sample]) -> dict[str, float]:
    """Milliseconds of a mean step by where they went."""
    steps = sum(sample.steps for sample in samples)
    parts = dict.fromkeys(part for sample in samples for part in sample.part_seconds)
    return {
        part: 1e3 * sum(sample.part_seconds.get(part, 0.0) for sample in samples) / steps
        for part in parts
        if steps
    }


def _acceptance_length(samples: Sequence[Sample]) -> float:
    """tau = 1 + accepted / drafts; 1 where nothing was drafted."""
    drafts = sum(sample.drafts for sample in samples)
    return 1.0 + sum(sample.accepted for sample in samples) / drafts if drafts else 1.0


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _speedup(run: Run, plain: Run, ids: Sequence[str]) -> dict[str, Any]:
    """Ratio of the rates over the prompts `ids`, at equal pace of the machine where both were
    measured beside reference passes, and its 95% interval over prompts.
    """
    usual = _common_pace(run, plain)

    def pair(samples: Sequence[Sample]) -> Pair:
        return samples[0].tokens, _at_equal_pace(samples, usual)

    pairs = [(pair(run.samples[key]), pair(plain.samples[key])) for key in ids]

    def ratio(drawn: Sequence[tuple[Pair, Pair]]) -> float:
        base = _rate([theirs for _, theirs in drawn])
        return _rate([ours for ours, _ in drawn]) / base if base else 0.0

    return {"speedup": ratio(pairs) or None, "speedup_interval": bootstrap_interval(pairs, ratio)}


def summarise(run: Run, plain: Run, tasks: Mapping[str, str]) -> dict[str, Any]:
    """The result of one run as the JSON form states it; `tasks` maps prompt ids to tasks."""
    everything = [sample for samples in run.samples.values() for sample in samples]
    pairs = [(samples[0].tokens, _seconds(samples)) for samples in run.samples.values()]
    repeats = min(map(len, run.samples.values()))
    per_task: dict[str, dict[str, Any]] = {}
    for task in dict.fromkeys(tasks.values()):
        ids = [key for key in run.samples if tasks[key] == task]
        per_task[task] = _task_figures(run, plain, ids)
    config = run.speculative_config
    return {
        "label": run.label,
        "peer": run.peer,
        "speculative_config": None if config is None else dict(config),
        "tokens": sum(samples[0].tokens for samples in run.samples.values()),
        "tokens_per_second": _rate(pairs),
        "tokens_per_second_by_prompt": spread([t / s for t, s in pairs if t and s > 0]),
        "tokens_per_second_by_repeat": spread(
            [_rate([(each[n].tokens, each[n].seconds) for each in run.samples.values()])
             for n in range(repeats)]
        ),
        **_speedup(run, plain, list(run.samples)),
        "mean_acceptance_length": _acceptance_length(everything),
        "mean_emitted_tokens": _ratio(
            sum(sample.tokens for sample in everything), sum(sample.steps for sample in everything)
        ),
        "acceptance_rate": _ratio(
            sum(sample.accepted for sample in everything),
            sum(sample.drafted for sample in everything),
        ),
        "acceptance_by_position": _by_position(everything),
        "identical_to_plain": identical(run, plain),
        "mean_step_cost": _step_cost(run, plain, list(run.samples)),
        "reference_ms": None if (usual := _usual(run)) is None else 1e3 * usual,
        "tokens_per_step_by_stretch": _by_stretch(everything),
        "step_ms": _step_ms(everything),
        "per_task": per_task,
    }  # fmt: skip


def _task_figures(run: Run, plain: Run, ids: Sequence[str]) -> dict[str, Any]:
    samples = [sample for key in ids for sample in run.samples[key]]
    pairs = [(run.samples[key][0].tokens, _seconds(run.samples[key])) for key in ids]
    return {
        "prompts": len(ids),
        "tokens_per_second": _rate(pairs),
        **_speedup(run, plain, ids),
        "mean_acceptance_length": _acceptance_length(samples),
        "acceptance_by_position": _by_position(samples),
        "mean_step_cost": _step_cost(run, plain, ids),
        "step_ms": _step_ms(samples),
    }


def _by_position(samples: Sequence[Sample]) -> list[float]:
    """P(the first i + 1 draft tokens are accepted), over all steps that drafted."""
    drafts = sum(sample.drafts for sample in samples)
    depth = max(len(sample.accepted_by_position) for sample in samples)
    return [
        sum(s.accepted_by_position[i] for s in samples if i < len(s.accepted_by_position)) / drafts
        for i in range(depth if drafts else 0)
    ]


def identical(run: Run, plain: Run) -> bool:
    """Whether every repetition of every prompt gave the token ids of plain decoding's first one."""
    return all(
        sample.token_ids == plain.samples[key][0].token_ids
        for key, samples in run.samples.items()
        for sample in samples
    )
