"""A load's figures as Markdown. Knows the form of the result only."""

from __future__ import annotations

from foredraft.bench.markdown import Result, number, section

HEADING = (
    "run", "finished, aborted, lost", "the same alone", "tokens/s", "ms to first token, p50, p99",
    "ms between events, p50, p99", "ms between tokens, p50, p99", "acceptance length",
    "memory, MiB", "server, client cores",
)  # fmt: skip


def load_section(result: Result) -> str:
    """A line a configuration."""
    rows = []
    for run in result["runs"]:
        counts, again = run["requests"], run["asked_again"]
        rows.append(
            [
                run["label"],
                f"{counts['finished']}, {counts['aborted']}, {counts['lost']}",
                f"{again['identical']} of {again['asked']}",
                f"{run['tokens_per_second']:.0f}",
                *(_two(run[key]) for key in ("ttft_ms", "between_events_ms", "between_tokens_ms")),
                number(run["mean_acceptance_length"]),
                _memory(run),
                f"{run['server_cores']:.2f}, {run['client_cores']:.2f}",
            ]
        )
    words = (
        f"**Load**, {result['model']}: {result['streams']} streams at once for "
        f"{result['minutes']:g} minutes a configuration, answers of up to {result['max_tokens']} "
        f"tokens, {result['abort_share']:.0%} of them left at a random token, greedy and at "
        "temperature 0.8 by turns of chance; clients are one process on the same cores. Between "
        "tokens: the time before an event divided among its tokens. Memory: what the process "
        "takes at the end, and its growth since all pages of keys and values had been written."
    )
    return section(words, list(HEADING), rows, result)


def _two(each: Result) -> str:
    return ", ".join("-" if value is None else f"{value:.0f}" for value in each.values())


def _memory(run: Result) -> str:
    last = f"{run['rss_mib']['last']:.0f}"
    if not run["rss_settled"]:
        return f"{last}, pages not all written"
    return f"{last}, {run['rss_growth_mib']:+.1f} in {run['rss_seconds'] / 60:.0f} min"
