"""Training runs as pictures: loss, and acceptance as it rose.

Knows matplotlib, which is an extra, and runs' logs.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, HEIGHT = 6.0, 3.8  # inches of one plot


def training_png(records: Sequence[Mapping[str, Any]], title: str) -> bytes:
    """The plots of a log (`run_directory.read_log`) as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 * WIDTH, HEIGHT), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    left, right = figure.subplots(1, 2)
    losses = [each for each in records if "loss" in each]
    left.plot([each["tokens"] for each in losses], [each["loss"] for each in losses])
    left.set_ylabel("loss")
    measured = [each for each in records if "mean_acceptance_length" in each]
    tokens = [each["tokens"] for each in measured]
    depth = max((len(each["acceptance_by_position"]) for each in measured), default=0)
    for k in range(depth):
        rates = [(*each["acceptance_by_position"], *[0.0] * depth)[k] for each in measured]
        right.plot(tokens, rates, marker=".", label=f"first {k + 1}")
    right.set_ylabel("accepted, held-out answers")
    right.set_ylim(0.0, 1.0)
    for axes in (left, right):
        axes.set_xlabel("tokens learned from")
    if depth:
        right.legend(fontsize=8)
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=120)
    return target.getvalue()


def curves_svg(runs: Sequence[Mapping[str, Any]]) -> bytes:
    """Mean acceptance length of several runs against the tokens they had learned from, as SVG.

    Each of `runs` has its `method` and what it `measured`, records of a log.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    for run in runs:
        measured = run["measured"]
        axes.plot(
            [each["tokens"] / 1000 for each in measured],
            [each["mean_acceptance_length"] for each in measured],
            marker=".",
            label=run["method"],
        )
    axes.set_xlabel("thousand tokens learned from")
    axes.set_ylabel("mean acceptance length, held-out answers")
    axes.grid(alpha=0.3)
    axes.legend()
    target = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "foredraft"}):
        figure.savefig(target, format="svg", metadata={"Date": None})
    return target.getvalue()
