"""Drafters side by side, by task: the page docs/drafters/README.md, from one result.

Knows the form of results; knows nothing of measuring.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from foredraft.bench.markdown import Result, number, section, table, times

POSITIONS = 4  # of acceptance that are shown


def drafters_page(result: Result) -> str:
    """Markdown of a decode result: all drafters by task, then a table a task."""
    runs = result["runs"]
    tasks = list(runs[0]["per_task"])
    words = (
        f"**Drafters**, {result['model']}, {result['dtype']}, {result['prompts']} prompts, greedy, "
        f"at most {result['max_tokens']} tokens, one request each, all in one run, in turns "
        "step by step. Speed against plain decoding, as a whole and by task."
    )
    rows = [
        [
            name(run),
            times(run["speedup"]),
            *(times(run["per_task"][task]["speedup"]) for task in tasks),
            "yes" if run["identical_to_plain"] else "no",
        ]
        for run in runs
    ]
    parts = [section(words, ["drafter", "all", *tasks, "identical"], rows, result)]
    parts += [_of_task(task, runs) for task in tasks]
    return "\n\n".join(parts)


def name(run: Mapping[str, Any]) -> str:
    """The method and what was set of it, short."""
    config = dict(run["speculative_config"] or {"method": "plain"})
    length = config.pop("num_speculative_tokens", None)
    words = [str(config.pop("method", "auto"))]
    if length is not None:
        words.append(f"K={length}")
    if config.pop("policy", None) == "adaptive":
        words.append("adaptive")
    words += [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in config.items()
    ]
    return ", ".join(words)


def _of_task(task: str, runs: Sequence[Mapping[str, Any]]) -> str:
    heading = ["drafter", "tokens/s", "speed", "acceptance length"]
    heading += [f"accepted to position {i + 1}" for i in range(POSITIONS)]
    heading += ["ms a step: drafter", "target", "rest"]
    rows = [_row(name(run), run["per_task"][task]) for run in runs]
    count = runs[0]["per_task"][task]["prompts"]
    return f"**{task}**, {count} prompt{'s' if count > 1 else ''}:\n\n{table(heading, rows)}"


def _row(label: str, figures: Mapping[str, Any]) -> list[str]:
    rates = [f"{rate:.0%}" for rate in figures["acceptance_by_position"][:POSITIONS]]
    return [
        label,
        f"{figures['tokens_per_second']:.1f}",
        times(figures["speedup"]),
        number(figures["mean_acceptance_length"]),
        *(rates + ["-"] * POSITIONS)[:POSITIONS],
        *(f"{figures['step_ms'][part]:.2f}" for part in ("drafter", "target", "rest")),
    ]
