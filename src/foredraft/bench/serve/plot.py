"""Where speculation stops to pay, as a picture: speed against plain decoding by requests at once.

Knows matplotlib, which is an extra, and the form of results; measures nothing.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 6.0, 4.0  # inches of one plot
TITLES = {
    "tokens_per_second": "all requests together (throughput)",
    "tokens_per_second_per_request": "each request (latency)",
}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # told apart by colour-blind readers too


def draw(result: Mapping[str, Any], form: str) -> bytes:
    """The file's bytes; `form` is "png" or "svg". Two plots: each objective's measure by the
    number of requests, and one more of what arrival rates did, if there were any.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    crowds = [point for point in result["points"] if "concurrency" in point]
    rates = [point for point in result["points"] if "rate" in point]
    plots = (len(TITLES) if crowds else 0) + bool(rates)
    figure = Figure(figsize=(WIDTH * plots, HEIGHT), layout="constrained")
    FigureCanvasAgg(figure)
    places = list(figure.subplots(1, plots, squeeze=False)[0])
    if crowds:
        for axes, (measure, title) in zip(places, TITLES.items(), strict=False):
            _by_crowd(axes, result, measure, title)
    if rates:
        _by_rate(places[-1], rates)
    target = io.BytesIO()
    figure.savefig(target, format=form, dpi=120)
    return target.getvalue()


def _by_crowd(axes: Axes, result: Mapping[str, Any], measure: str, title: str) -> None:
    """Ratios to plain decoding, medians over rounds with quartiles; figures of plain beneath."""
    points = [point for point in result["points"] if "concurrency" in point]
    objectives: Mapping[str, str] = result.get("objectives", {})
    fixed = [label for label in result.get("fixed", {}) if label != "plain"]
    comparisons = [each for each in result.get("comparisons", ()) if "concurrency" in each]
    for number, label in enumerate(fixed):
        shade = str(0.75 - 0.5 * number / max(1, len(fixed)))
        crowd, ratios = _ratios(comparisons, label, measure)
        middle = [each["p50"] for each in ratios]
        axes.plot(crowd, middle, ".-", color=shade, linewidth=1.0, label=label)
    for number, label in enumerate(objectives):
        crowd, ratios = _ratios(comparisons, label, measure)
        middle = [each["p50"] for each in ratios]
        spreads = [
            [each["p50"] - each["p25"] for each in ratios],
            [each["p75"] - each["p50"] for each in ratios],
        ]
        own = objectives[label] == measure
        axes.errorbar(
            crowd, middle, yerr=spreads, marker="o", capsize=3, label=label,
            color=COLOURS[number % len(COLOURS)], linestyle="-" if own else "--",
        )  # fmt: skip
    axes.axhline(1.0, color="black", linewidth=0.8)
    plain = [point for point in points if point["label"] == "plain"]
    crowd = [point["concurrency"] for point in plain]
    if comparisons:
        axes.set_ylabel("speed over plain decoding")
    else:
        axes.plot(*_absolute(points, measure), "o-", label=points[0]["label"])
        axes.set_ylabel("tokens a second")
    axes.set_xscale("log", base=2)
    if plain:
        labels = [f"{n}\n{point[measure]:.0f}" for n, point in zip(crowd, plain, strict=True)]
        axes.set_xticks(crowd, labels)
        axes.set_xlabel("requests at once; beneath, plain decoding's tokens a second")
    else:
        axes.set_xlabel("requests at once")
    axes.set_title(title)
    axes.legend()


def _ratios(
    comparisons: Sequence[Mapping[str, Any]], label: str, measure: str
) -> tuple[list[int], list[Mapping[str, float]]]:
    found = [
        (each["concurrency"], each[measure]["over_plain"])
        for each in comparisons
        if each["label"] == label and each[measure]["over_plain"] is not None
    ]
    return [n for n, _ in found], [ratio for _, ratio in found]


def _absolute(points: Sequence[Mapping[str, Any]], measure: str) -> tuple[list[int], list[float]]:
    return [point["concurrency"] for point in points], [point[measure] for point in points]


def _by_rate(axes: Axes, points: Sequence[Mapping[str, Any]]) -> None:
    """Median time to the first token by arrivals a second, a line a configuration."""
    for label in dict.fromkeys(point["label"] for point in points):
        mine = [each for each in points if each["label"] == label and each["ttft_ms"]["p50"]]
        rates = [each["rate"] for each in mine]
        axes.plot(rates, [each["ttft_ms"]["p50"] for each in mine], "o-", label=label)
    axes.set_xlabel("arrivals a second")
    axes.set_ylabel("time to first token, ms (median)")
    axes.set_yscale("log")
    axes.legend()
