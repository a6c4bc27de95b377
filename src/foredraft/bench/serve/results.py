"""A sweep as its JSON result: a point for each configuration and level, and how they compare.

Knows samples and ratios; knows no server and no bound that a ratio should reach.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from foredraft.bench.intervals import spread
from foredraft.bench.serve.steps import StepCounts
from foredraft.bench.serve.sweep import Level, Measured, Sample
from foredraft.bench.serve.traces import percentile

PLAIN = "plain"
Measure = Callable[[Sample], float]
# What is compared: all requests together, and what the reader of one sees.
MEASURES: Mapping[str, Measure] = {
    "tokens_per_second": lambda sample: sample.figures.tokens_per_second,
    "tokens_per_second_per_request": lambda sample: sample.figures.tokens_per_second_per_request,
}


def points(measured: Measured) -> list[dict[str, Any]]:
    """The form of DESIGN's section 8, with more beside it; a line a configuration and level."""
    found = []
    for level in measured.levels:
        plain = measured.samples.get((PLAIN, level))
        for label in measured.labels:
            samples = measured.samples[label, level]
            same = None if plain is None else _identical(samples, plain)
            found.append(
                {
                    "label": label,
                    **level.key,
                    **_point(samples),
                    "slowness_by_round": [measured.slowness(each) for each in samples],
                    "identical_to_plain": same,
                }
            )
    return found


def _point(samples: Sequence[Sample]) -> dict[str, Any]:
    all_figures = [sample.figures for sample in samples]
    return {
        "tokens_per_second": median(each.tokens_per_second for each in all_figures),
        "tokens_per_second_by_round": [each.tokens_per_second for each in all_figures],
        "tokens_per_second_per_request": median(
            each.tokens_per_second_per_request for each in all_figures
        ),
        "ttft_ms": _milliseconds([t for each in all_figures for t in each.ttft]),
        "itl_ms": _milliseconds([t for each in all_figures for t in each.gaps]),
        "tokens_per_emission": _ratio(
            sum(each.tokens for each in all_figures), sum(each.emissions for each in all_figures)
        ),
        "tokens": sum(each.tokens for each in all_figures),
        "seconds": sum(each.seconds for each in all_figures),
        "requests_ended": sum(each.finished for each in all_figures),
        "waiting_at_end": [sample.waiting for sample in samples],
        **_of_steps(samples),
    }


def _milliseconds(seconds: Sequence[float]) -> dict[str, float | None]:
    found = {}
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        value = percentile(seconds, share)
        found[name] = None if value is None else 1e3 * value
    return found


def _of_steps(samples: Sequence[Sample]) -> dict[str, Any]:
    """What an engine's own log says; of a server that is seen from outside, what it states."""
    counts = [sample.counts for sample in samples]
    total = StepCounts.sum(counts)
    if not total.steps:
        stated = [s.mean_acceptance_length for s in samples if s.mean_acceptance_length is not None]
        return {"mean_acceptance_length": median(stated) if stated else None, "width": None}
    parts: dict[str, float] = {}
    for sample in samples:
        for name, seconds in sample.counters.part_seconds.items() if sample.counters else ():
            parts[name] = parts.get(name, 0.0) + seconds
    all_seconds = sum(sample.figures.seconds for sample in samples)
    return {
        "mean_acceptance_length": total.mean_acceptance_length,
        "width": total.width,
        "width_0_share": total.undrafted_share,
        "acceptance_by_position": total.acceptance,
        "filled_by_position": total.filled,
        "acceptance_by_round": [each.acceptance for each in counts],
        "filled_by_round": [each.filled for each in counts],
        "steps": total.steps,
        # Of decoding steps: all that is neither pass, over the passes.
        "step_overhead": _ratio(parts.get("rest", 0.0), parts.get("target", 0.0)),
        "part_share": {name: _ratio(each, sum(parts.values())) for name, each in parts.items()},
        "outside_steps_share": 1.0 - total.seconds / all_seconds if all_seconds else None,
        "drafter_seconds_per_step": _ratio(total.drafter_seconds, total.steps),
        "preemptions": sum(s.counters.preemptions for s in samples if s.counters),
    }


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _identical(samples: Sequence[Sample], plain: Sequence[Sample]) -> bool:
    """Whether every answer begins as plain decoding's does, as far as both had come."""
    for ours, theirs in zip(samples, plain, strict=True):
        for index, ids in ours.outputs.items():
            other = theirs.outputs.get(index, ())
            length = min(len(ids), len(other))
            if tuple(ids[:length]) != tuple(other[:length]):
                return False
    return True


def comparisons(measured: Measured, fixed: Sequence[str]) -> list[dict[str, Any]]:
    """Each configuration against plain decoding and the best of the `fixed` widths, round by round
    on the same requests, which they served in turns: medians and quartiles of the ratios, for both
    measures.
    """
    found = []
    for level in measured.levels:
        for label in measured.labels:
            if label == PLAIN:
                continue
            entry: dict[str, Any] = {"label": label, **level.key}
            for name, measure in MEASURES.items():
                best = best_of(measured, fixed, level, measure)
                better = best_of(measured, [PLAIN, *fixed], level, measure)
                entry[name] = {
                    "over_plain": _over(measured, label, PLAIN, level, measure),
                    "best_fixed": best,
                    "over_best_fixed": _over(measured, label, best, level, measure),
                    "better": better,
                    "over_better": _over(measured, label, better, level, measure),
                }
            found.append(entry)
    return found


def best_of(
    measured: Measured, labels: Sequence[str], level: Level, measure: Measure
) -> str | None:
    """The configuration with the best median; None of none."""
    known = [label for label in labels if (label, level) in measured.samples]
    return max(
        known,
        key=lambda label: median(map(measure, measured.samples[label, level])),
        default=None,
    )


def _over(
    measured: Measured, label: str, other: str | None, level: Level, measure: Measure
) -> dict[str, float] | None:
    """Quartiles of the ratios, a round each; None without the other."""
    if other is None or (other, level) not in measured.samples:
        return None
    ours = map(measure, measured.samples[label, level])
    theirs = map(measure, measured.samples[other, level])
    return spread([a / b for a, b in zip(ours, theirs, strict=True) if b])
