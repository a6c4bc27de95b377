"""What `foredraft plan` found, as a picture. Knows matplotlib, which is an extra."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WIDTH, HEIGHT = 6.0, 3.8  # inches of one plot
NO_DATE: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None}}


def draw(result: Mapping[str, Any], form: str) -> bytes:
    """The file's bytes; `form` is "png" or "svg"."""
    plots = [_by_length, _by_load] if "loads" in result else [_by_length]
    return _drawn(plots, result, form)


def draw_workload(result: Mapping[str, Any], form: str) -> bytes:
    """The same for a plan with a model: predictions by length and load, and the check."""
    plots = [_measured_by_length, _measured_by_load]
    if result["check"] is not None:
        plots.append(_checked)
    return _drawn(plots, result, form)


def _drawn(
    plots: Sequence[Callable[[Any, Mapping[str, Any]], None]], result: Mapping[str, Any], form: str
) -> bytes:
    """Plots side by side."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH * len(plots), HEIGHT), layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(1, len(plots), squeeze=False)[0]
    for place, plot in zip(places, plots, strict=True):
        plot(place, result)
    target = io.BytesIO()
    with rc_context({"svg.hashsalt": "foredraft"}):  # the same answer is the same file
        figure.savefig(target, format=form, dpi=120, metadata=NO_DATE[form])
    return target.getvalue()


def _by_length(axes: Any, result: Mapping[str, Any]) -> None:
    lengths = [each["num_draft_tokens"] for each in result["by_length"]]
    best = result["best"]
    axes.plot(lengths, [each["speedup"] for each in result["by_length"]], label="speed-up")
    tokens = [each["expected_tokens"] for each in result["by_length"]]
    axes.plot(lengths, tokens, linestyle=":", label="tokens a step")
    axes.plot(best["num_draft_tokens"], best["speedup"], "o", label="best")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xlabel("draft tokens")
    axes.set_title(f"draft cost {result['draft_cost']:g}")
    axes.legend()


def _by_load(axes: Any, result: Mapping[str, Any]) -> None:
    loads = result["loads"]
    requests = [each["requests"] for each in loads]
    for width in range(1, len(loads[0]["fixed_speedup"])):
        speedups = [each["fixed_speedup"][width] for each in loads]
        axes.plot(requests, speedups, color="lightgrey", linewidth=1.0)
    axes.plot([], [], color="lightgrey", label="fixed widths")
    axes.plot(requests, [each["oracle_speedup"] for each in loads], "--", label="oracle")
    axes.plot(requests, [each["policy_speedup"] for each in loads], "o-", label="policy")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("requests at once")
    axes.set_title("simulated speed-up over plain decoding")
    axes.legend()


def _measured_by_length(axes: Any, result: Mapping[str, Any]) -> None:
    load = str(result["loads"][0])
    for drafter in result["drafters"]:
        found = drafter["by_load"][load]
        lengths = [each["num_speculative_tokens"] for each in found]
        axes.plot(lengths, [each["speedup"] for each in found], "o-", label=drafter["label"])
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xlabel("draft tokens")
    axes.set_title(f"predicted speed-up, {load} at once")
    axes.legend()


def _measured_by_load(axes: Any, result: Mapping[str, Any]) -> None:
    for drafter in result["drafters"]:
        best = [
            max(each["speedup"] for each in drafter["by_load"][str(load)])
            for load in result["loads"]
        ]
        axes.plot(result["loads"], best, "o-", label=drafter["label"])
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("requests at once")
    axes.set_title("predicted speed-up, best length for each")
    axes.legend()


def _checked(axes: Any, result: Mapping[str, Any]) -> None:
    configs = result["check"]["configs"]
    predicted = [each["predicted_at_pace"] for each in configs]
    measured = [each["measured"] for each in configs]
    ends = [min(predicted + measured) * 0.95, max(predicted + measured) * 1.05]
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.plot(predicted, measured, "o")
    axes.set_xlabel("predicted speed-up, at the costs of the check")
    axes.set_ylabel("measured")
    axes.set_title("checked by running")
