"""What training runs and their drafters measured, in Markdown. Knows the form of results only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foredraft.bench.markdown import Result, number, section

_SHOWN = 8  # measurements of a run, the last among them


def training_section(result: Result) -> str:
    """One table: a line for each measurement that is shown."""
    rows = [
        [
            run["method"],
            f"{each['tokens']:,}",
            number(each["mean_acceptance_length"]),
            *(f"{rate:.1%}" for rate in each["acceptance_by_position"][:3]),
        ]
        for run in result["runs"]
        for each in _some(run["measured"])
    ]
    words = (
        "**Training**: chains of drafts on held-out answers, against the tokens of answers that "
        "each drafter had learned from."
    )
    heading = ["drafter", "tokens", "acceptance length", "first", "second", "third"]
    return section(words, heading, rows, result)


def _some(measured: Sequence[Any]) -> list[Any]:
    """At most `_SHOWN`, evenly spread, ending with the last."""
    step = max(1, -(-len(measured) // _SHOWN))
    return [*measured[::-1][::step]][::-1]


def acceptance_section(result: Result) -> str:
    """A line for each drafter at each temperature."""
    rows = [
        [
            run["label"],
            f"{run['temperature']:g}",
            number(run["mean_acceptance_length"]),
            number(run["tokens_per_step"]),
            *(f"{rate:.1%}" for rate in run["acceptance_by_position"][:3]),
        ]
        for run in result["runs"]
    ]
    words = (
        f"**Acceptance**, {result['model']}, {result['prompts']} prompts of "
        f"{', '.join(result['tasks'])}, at most {result['max_tokens']} tokens."
    )
    heading = [
        "drafter", "temperature", "acceptance length", "tokens a step", "first", "second", "third",
    ]  # fmt: skip
    return section(words, heading, rows, result)
