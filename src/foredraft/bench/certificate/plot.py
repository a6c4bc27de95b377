"""A certificate as a picture: frequencies against the law, and acceptance by position.

Knows matplotlib, which is an extra, and the draws of a certificate; judges nothing.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foredraft.bench.certificate.certify import Certificate, by_position
from foredraft.bench.certificate.law import SiteResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 10.0, 3.6  # inches of one plot
LONGEST_LABEL = 14
DEVIATIONS = 3.0  # of the counts, shown as bars around what is expected


def certificate_png(certificate: Certificate, token_text: Callable[[int], str]) -> bytes:
    """The plots of a certificate as a PNG file; `token_text` names a token."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(certificate.sites) + 1
    figure = Figure(figsize=(WIDTH, HEIGHT * count), layout="constrained")
    FigureCanvasAgg(figure)
    axes: list[Axes] = list(figure.subplots(count, 1, squeeze=False)[:, 0])
    for place, result in zip(axes, certificate.sites, strict=False):
        _plot_law(place, result, token_text)
    curves: dict[str, Sequence[float]] = dict(certificate.acceptance)
    for result in certificate.sites:
        accepted = result.draws.accepted
        histogram = [accepted[j] for j in range(max(accepted, default=-1) + 1)]
        curves[f"draws, {result.place.setting.name}"] = by_position([histogram])
    _plot_acceptance(axes[-1], curves)
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=120)
    return target.getvalue()


def _plot_law(axes: Axes, result: SiteResult, token_text: Callable[[int], str]) -> None:
    """Observed frequencies of the first token's cells beside the expected ones."""
    site, draws = result.place.site, result.draws
    cells = range(site.cells.num_possible)
    count = len(draws.sequences)
    expected = site.cells.probs[: len(cells)]
    observed = site.cells.counts(draws.tokens)[: len(cells)] / count
    spread = DEVIATIONS * (expected * (1.0 - expected) / count).sqrt()
    axes.bar(list(cells), observed.tolist(), color="#9ecae1", label="observed")
    marks: Mapping[str, Any] = {"fmt": "_", "color": "black", "capsize": 3, "markersize": 12}
    label = f"expected, {DEVIATIONS:g} standard deviations"
    axes.errorbar(list(cells), expected.tolist(), spread.tolist(), label=label, **marks)
    names = [_label(token_text, site.cells.tokens.get(cell)) for cell in cells]
    axes.set_xticks(list(cells), names, rotation=60, ha="right", fontsize=7)
    axes.set_title(f"{result.place.setting.name}: first token, {count} draws", fontsize=10)
    axes.set_ylabel("frequency")
    axes.margins(y=0.25)  # room for the legend
    axes.legend(fontsize=8)


def _plot_acceptance(axes: Axes, curves: Mapping[str, Sequence[float]]) -> None:
    from matplotlib.ticker import MaxNLocator

    for name, rates in curves.items():
        axes.plot(range(1, len(rates) + 1), list(rates), marker="o", label=name)
    axes.set_ylim(0.0, 1.05)
    axes.set_xlabel("draft position")
    axes.set_ylabel("accepted so far")
    axes.set_title("acceptance by position", fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if curves:
        axes.legend(fontsize=8)


def _label(token_text: Callable[[int], str], token: int | None) -> str:
    """The token, or that several share the cell; `$` would start a formula."""
    if token is None:
        return "pooled"
    text = ascii(token_text(token))
    return (text if len(text) <= LONGEST_LABEL else f"{text[:LONGEST_LABEL]}...").replace(
        "$", r"\$"
    )
