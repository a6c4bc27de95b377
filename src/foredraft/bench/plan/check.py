"""What became of predictions: configurations that were run beside plain decoding.

Knows predictions and what runs took; runs nothing. What was foretold from passes of some minutes is
compared with what was measured in others at the costs of the latter: passes of a few sizes, none of
them a trial's own, are read all through both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foredraft.bench.plan.measure import Turns
from foredraft.bench.plan.predict import Machine
from foredraft.bench.plan.recommend import Trial

CLOSE = 0.1  # a prediction that is so near to what is measured is right


def checked(
    plain: Turns, runs: Sequence[Turns], trials: Sequence[Trial], machine: Machine
) -> dict[str, Any]:
    """Each trial's prediction beside its run; `machine` has the costs of the minutes of the runs.

    `predicted` is what was foretold, `predicted_at_pace` the same with these costs.
    """
    found = [_compared(*one, plain, machine) for one in zip(runs, trials, strict=True)]
    return {
        "requests": trials[0].predicted.requests,
        "repeats": len(plain.spent),
        "plain_tokens_per_second": plain.tokens_per_second(),
        "plain_tokens_per_second_by_repeat": plain.spread(),
        "configs": found,
        "close": CLOSE,
        "num_close": sum(abs(each["error"]) <= CLOSE for each in found),
        "largest_error": max(abs(each["error"]) for each in found),
    }


def _compared(run: Turns, trial: Trial, plain: Turns, machine: Machine) -> dict[str, Any]:
    expected, spent = trial.on(machine), run.total()
    measured = run.tokens_per_second() / plain.tokens_per_second()
    return {
        "label": trial.label,
        "speculative_config": dict(trial.config),
        "predicted": trial.predicted.speedup,
        "predicted_at_pace": expected.speedup,
        "measured": measured,
        "tokens": {
            "predicted": expected.tokens,
            "measured": spent.tokens_each(expected.requests),
        },
        "measured_by_repeat": [a / b for a, b in zip(run.spread(), plain.spread(), strict=True)],
        "error": expected.speedup / measured - 1.0,
        "tokens_per_second": run.tokens_per_second(),
        "identical_to_plain": run.token_ids[0] == plain.token_ids[0],
    }
