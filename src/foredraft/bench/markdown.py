"""Tables in Markdown with where their figures come from. Knows the form of results only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]


def section(
    words: str, heading: Sequence[str], rows: Iterable[Sequence[str]], result: Result
) -> str:
    machine, versions = result["machine"], result["versions"]
    source = (
        f"{machine['cpu']}, {machine['cores']} cores, torch {versions.get('torch', '?')}, revision "
        f"{result['revision']}, {result['date'][:10]}: `{' '.join(result['arguments'])}`"
    )
    return f"{words}\n\n{table(heading, rows)}\n\n<sub>{source}</sub>"


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def median(ratios: Mapping[str, float] | None) -> str:
    return "-" if ratios is None else f"{ratios['p50']:.2f}x"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
