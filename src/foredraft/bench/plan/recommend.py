"""One configuration out of many predictions, in words and numbers, and which to try.

Knows predictions; knows no engine. What promises less than `MARGIN` over plain decoding is not
worth its trouble, as for the adaptive policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean
from typing import Any

from foredraft.bench.decode import label_of
from foredraft.bench.plan.predict import Drafting, Machine, Prediction, predict
from foredraft.bench.plan.replay import counts_of

MARGIN = 1.02


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter, what it did, and what is predicted of it by load."""

    config: Mapping[str, Any]
    drafting: Drafting
    predictions: Mapping[int, Sequence[Prediction]]

    @property
    def label(self) -> str:
        config = {k: v for k, v in self.config.items() if k != "num_speculative_tokens"}
        return label_of(str(self.config.get("method", "auto")), config)

    def best(self, load: int) -> Prediction:
        """The width that promises most at a load."""
        return max(self.predictions[load], key=lambda each: each.speedup)

    def gain(self, load: int) -> float:
        """Of the best width, plain decoding being one of them."""
        speedup = self.best(load).speedup
        return speedup if speedup >= MARGIN else 1.0

    def mean_gain(self, loads: Sequence[int]) -> float:
        """The geometric mean over loads."""
        return exp(sum(log(self.gain(load)) for load in loads) / len(loads))

    def with_width(self, width: int) -> dict[str, Any]:
        """Its configuration with drafts of so many tokens."""
        return {**self.config, "num_speculative_tokens": width}


@dataclass(frozen=True, slots=True)
class Trial:
    """A configuration to be run, and what is predicted of it."""

    label: str
    config: Mapping[str, Any]
    predicted: Prediction
    drafting: Drafting

    def on(self, machine: Machine) -> Prediction:
        """The prediction anew, with the costs of other minutes."""
        plain, load = not self.predicted.num_nodes, self.predicted.requests
        if plain:
            return self.predicted
        return predict(self.drafting, machine, self.predicted.num_nodes, load)


def recommend(
    candidates: Sequence[Candidate], machine: Machine, loads: Sequence[int]
) -> dict[str, Any]:
    """The drafter with the largest gain over all `loads`, and its width for each of them."""
    ranked = sorted(candidates, key=lambda each: each.mean_gain(loads), reverse=True)
    best = ranked[0]
    widths = [best.best(load).num_nodes if best.gain(load) > 1.0 else 0 for load in loads]
    if not any(widths):
        return {
            "speculative_config": None,
            "label": "plain",
            "speedup": {str(load): 1.0 for load in loads},
            "reasons": _nothing_pays(ranked, loads),
        }
    return {
        "speculative_config": _config(best, loads, widths),
        "label": best.label,
        "speedup": {str(load): best.gain(load) for load in loads},
        "reasons": _reasons(ranked, machine, loads, widths),
    }


def _config(best: Candidate, loads: Sequence[int], widths: Sequence[int]) -> dict[str, Any]:
    config = best.with_width(max(widths))
    if len(set(widths)) > 1:
        config["num_speculative_tokens_per_batch_size"] = ranges(loads, widths)
    return config


def ranges(loads: Sequence[int], widths: Sequence[int]) -> list[list[int]]:
    """`[start, end, K]` up to the last load at which anything is drafted; loads between two that
    were predicted are as the larger one.
    """
    found: list[list[int]] = []
    start = 1
    for load, width in zip(loads, widths, strict=True):
        if found and found[-1][2] == width:
            found[-1][1] = load
        else:
            found.append([start, load, width])
        start = load + 1
    while found and not found[-1][2]:
        found.pop()
    return found


def _reasons(
    ranked: Sequence[Candidate], machine: Machine, loads: Sequence[int], widths: Sequence[int]
) -> list[str]:
    best, load = ranked[0], loads[0]
    width = widths[0] or max(widths)
    chosen = next(each for each in best.predictions[load] if each.num_nodes == width)
    lines = [
        f"{best.label} with {width} draft token{'s' if width > 1 else ''}: predicted speed-up "
        f"{chosen.speedup:.2f} for {_requests(load)} = {chosen.tokens:.2f} tokens a step / a "
        f"step's cost of {chosen.step_cost:.2f} plain steps",
        _acceptance(best),
        _costs(best, machine, width, load),
    ]
    if len(set(widths)) > 1:
        by_load = ", ".join(f"{k} at {n}" for n, k in zip(loads, widths, strict=True))
        lines.append(f"the more requests, the dearer a row: draft tokens by load {by_load}")
    if len(ranked) > 1:
        second = ranked[1]
        lines.append(
            f"next best: {second.label}, {second.mean_gain(loads):.2f} over these loads, where "
            f"{best.label} has {best.mean_gain(loads):.2f}"
        )
    return lines


def _acceptance(best: Candidate) -> str:
    counts = counts_of(best.drafting.texts)
    rates = counts.conditional_acceptance_by_position[:4]
    share = counts.num_drafts / counts.num_steps if counts.num_steps else 0.0
    shown = ", ".join(f"{rate:.0%}" for rate in rates)
    return f"it finds a draft in {share:.0%} of its steps; accepted by position: {shown}"


def _costs(best: Candidate, machine: Machine, width: int, load: int) -> str:
    position = fmean(step.position for text in best.drafting.texts for step in text)
    plain = machine.pass_seconds(load, position, load)
    passes = machine.pass_seconds(load * (width + 1), position, load) / plain
    own = best.drafting.drafter.at(width) / machine.pass_seconds(1, position)
    return (
        f"a pass over {load * (width + 1)} rows costs {passes:.2f} of one over {load}, finding a "
        f"draft {own:.3f} of one over 1"
    )


def _nothing_pays(ranked: Sequence[Candidate], loads: Sequence[int]) -> list[str]:
    lines = ["plain decoding: nothing pays here"]
    for each in ranked:
        load = max(loads, key=lambda load: each.best(load).speedup)
        best = each.best(load)
        lines.append(
            f"{each.label}: at its best {best.speedup:.2f}, {best.num_nodes} draft tokens for "
            f"{_requests(load)}: {best.tokens:.2f} tokens a step for {best.step_cost:.2f}"
        )
    return lines


def _named(candidate: Candidate, prediction: Prediction) -> str:
    return f"{candidate.label} K={prediction.num_nodes}"


def _requests(load: int) -> str:
    return "one request" if load == 1 else f"{load} requests at once"


def choose_trials(
    candidates: Sequence[Candidate], advice: Mapping[str, Any], load: int, count: int
) -> list[Trial]:
    """What is to be run at `load`: what `recommend` found, then from the worst to the best of what
    is predicted, evenly, so that losers are among them.
    """
    others: list[Trial] = []
    chosen: list[Trial] = []
    for each in candidates:
        recommended = advice["speculative_config"] is not None and each.label == advice["label"]
        best = each.best(load)
        if recommended:
            # At this load it may be plain decoding, and drafts at others.
            predicted = best if each.gain(load) > 1.0 else Prediction(0, load, 1.0, 1.0)
            config = advice["speculative_config"]
            name = f"{_named(each, predicted)}, recommended"
            chosen.append(Trial(name, config, predicted, each.drafting))
        others += [
            Trial(
                _named(each, prediction),
                each.with_width(prediction.num_nodes),
                prediction,
                each.drafting,
            )
            for prediction in each.predictions[load]
            if not (chosen and prediction == chosen[-1].predicted)
        ]
    others.sort(key=lambda trial: trial.predicted.speedup)
    wanted = min(count - len(chosen), len(others))
    if wanted > 0:
        step = (len(others) - 1) / max(1, wanted - 1)
        chosen += [others[round(i * step)] for i in range(wanted)]
    return chosen[:count]
