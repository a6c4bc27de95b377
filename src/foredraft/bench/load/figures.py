"""Figures of a load: what became of the requests, how long readers waited, what the process took.

Knows what was seen; knows no server and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from statistics import median
from typing import Any

from foredraft.bench.load.process import Vitals
from foredraft.bench.load.stream import Seen
from foredraft.bench.serve.traces import Emission, Window, percentile

FAULTS_SHOWN = 5
MOST_POINTS = 300  # of a robust slope: it looks at all pairs


def requests(seen: Sequence[Seen], sent: int) -> dict[str, Any]:
    """How many ended how; what was sent and is in none of the counts is lost too."""
    finished = sum(each.finished for each in seen)
    aborted = sum(each.left for each in seen)
    faults = [each.fault for each in seen if each.fault is not None]
    return {
        "sent": sent,
        "finished": finished,
        "aborted": aborted,
        "lost": sent - finished - aborted,
        "faults": faults[:FAULTS_SHOWN],
    }


def latencies(seen: Sequence[Seen], window: Window) -> dict[str, Any]:
    """Of what fell into the window; times in milliseconds.

    Between events: what a reader sees, whatever is in them. Between tokens: the same time divided
    among the tokens of the later event, each counted: what it would be if they came evenly.
    """
    tokens, events, waits = 0, 0, []
    between_events: list[float] = []
    between_tokens: list[float] = []
    for each in seen:
        if each.emissions and window.holds(each.sent):
            waits.append(each.emissions[0].at - each.sent)
        inside = [emission for emission in each.emissions if window.holds(emission.at)]
        tokens += sum(emission.tokens for emission in inside)
        events += len(inside)
        for gap, number in _gaps(each.emissions, window):
            between_events.append(gap)
            between_tokens += [gap / number] * number
    return {
        "tokens": tokens,
        "tokens_per_second": tokens / window.seconds,
        "tokens_per_event": tokens / events if events else None,
        "ttft_ms": _milliseconds(waits),
        "between_events_ms": _milliseconds(between_events),
        "between_tokens_ms": _milliseconds(between_tokens),
    }


def _gaps(emissions: Sequence[Emission], window: Window) -> list[tuple[float, int]]:
    return [
        (after.at - before.at, after.tokens)
        for before, after in pairwise(emissions)
        if window.holds(after.at)
    ]


def _milliseconds(seconds: Sequence[float]) -> dict[str, float | None]:
    found = {}
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        value = percentile(seconds, share)
        found[name] = None if value is None else round(1e3 * value, 2)
    return found


def resources(
    vitals: Sequence[Vitals], window: Window, settled: float | None, client_seconds: float
) -> dict[str, Any]:
    """Memory, files, threads and processors.

    `settled`: when every page of keys and values had been written once. Before that the process
    grows by the pages it touches, as it is meant to; None: it never was.
    """
    inside = [each for each in vitals if window.holds(each.at)]
    flat = [each for each in inside if settled is not None and each.at >= settled]
    after = flat or inside
    edge = max(1, len(after) // 10)
    first = median(each.rss_mib for each in after[:edge])
    last = median(each.rss_mib for each in after[-edge:])
    spent = inside[-1].cpu_seconds - inside[0].cpu_seconds
    elapsed = inside[-1].at - inside[0].at or window.seconds
    return {
        "rss_mib": {"first": round(first, 1), "last": round(last, 1)},
        "rss_growth_mib": round(last - first, 1),
        "rss_slope_mib_per_minute": round(60.0 * slope(after), 3),
        "rss_settled": bool(flat),
        "rss_seconds": round(after[-1].at - after[0].at, 1),
        "open_files": _range([each.open_files for each in inside]),
        "threads": _range([each.threads for each in inside]),
        "server_cores": round(spent / elapsed, 2),
        "client_cores": round(client_seconds / window.seconds, 3),
    }


def slope(vitals: Sequence[Vitals]) -> float:
    """MiB a second: the median over all pairs (Theil and Sen), which a few jumps don't move."""
    chosen = vitals[:: max(1, -(-len(vitals) // MOST_POINTS))]
    found = [
        (b.rss_mib - a.rss_mib) / (b.at - a.at) for a, b in combinations(chosen, 2) if b.at > a.at
    ]
    return median(found) if found else 0.0


def _range(values: Sequence[int]) -> dict[str, int]:
    return {"first": values[0], "most": max(values), "last": values[-1]}


def sound(run: Mapping[str, Any]) -> bool:
    """Whether nothing was lost, changed or held in a run."""
    again = run["asked_again"]
    troubles = (run["requests"]["lost"], run["pages_in_use_at_end"], run["exit_status"])
    return not any(troubles) and bool(again["identical"] == again["asked"])
