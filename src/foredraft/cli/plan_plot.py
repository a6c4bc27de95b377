"""What `foredraft plan` found, as a picture. Knows matplotlib, which is an extra."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

WIDTH, HEIGHT = 6.0, 3.8  # inches of one plot
NO_DATE: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None}}


def draw(result: Mapping[str, Any], form: str) -> bytes:
    """The file's bytes; `form` is "png" or "svg"."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = 2 if "loads" in result else 1
    figure = Figure(figsize=(WIDTH * count, HEIGHT), layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(1, count, squeeze=False)[0]
    _by_length(places[0], result)
    if "loads" in result:
        _by_load(places[1], result)
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
