"""`foredraft certify`: prove on the user's own pair that speculation changes nothing.

Knows options, progress bars and the table of checks; `foredraft.bench.certificate` proves.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer import Option

from foredraft.cli.bench import MISMATCH, MaxTokensOption
from foredraft.cli.console import output_console, visible
from foredraft.cli.delivery import progress_bars
from foredraft.cli.option_groups import option_groups
from foredraft.cli.options import JsonFlag, ModelArgument, RuntimeOptions, SpeculationOptions
from foredraft.cli.plots import PNG, check_plot, write_plot
from foredraft.core.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.bench.certificate.certify import Certificate
    from foredraft.bench.certificate.check import Check

NARROWEST_TABLE = 100  # columns; below it the checks come as a list


@option_groups
def certify(
    model: ModelArgument,
    prompts: Annotated[
        Path | None,
        Option(help="JSON lines with id, task, turns. (default: four short ones)", metavar="FILE"),
    ] = None,
    max_tokens: MaxTokensOption = 32,
    draws: Annotated[
        int | None,
        Option(
            help="Samples at each place. (default: as many as show a total variation of 0.02)",
            metavar="N",
            min=1000,
        ),
    ] = None,
    seed: Annotated[int, Option(help="Of all that is drawn.", metavar="N")] = 0,
    plot: Annotated[
        Path | None, Option(help="Draw frequencies and acceptance into a PNG.", metavar="FILE")
    ] = None,
    json_output: JsonFlag = False,
    *,
    speculation: SpeculationOptions,
    runtime: RuntimeOptions,
) -> None:
    """Prove on your own pair that speculation changes nothing: same texts, same laws.

    Exit code 1 where a check fails.
    """
    config = speculation.config()
    if config is None:
        raise ConfigError("plain decoding needs no certificate: name a method of speculation")
    check_plot(plot, PNG)
    from foredraft.bench.certificate.certify import CertifySettings, certify
    from foredraft.bench.certificate.law import LawSettings
    from foredraft.bench.certificate.prompts import PROMPTS
    from foredraft.bench.workload import read_workload

    items = PROMPTS if prompts is None else read_workload(prompts)
    loaded = runtime.load(model)
    law = LawSettings(draws=draws, seed=seed)
    settings = CertifySettings(config, max_tokens, law, runtime.engine_settings())
    with progress_bars() as progress:
        certificate = certify(loaded, items, settings, progress)
    if json_output:
        sys.stdout.write(json.dumps(certificate.as_json(), indent=1) + "\n")
    else:
        output_console().print(CheckTable(certificate))
    if plot is not None:
        from foredraft.bench.certificate.plot import certificate_png

        write_plot(plot, lambda _: certificate_png(certificate, loaded.tokenizer.token_text))
    if not certificate.passed:
        raise typer.Exit(MISMATCH)


class CheckTable:
    """The checks as a table, as a list where the terminal is narrow, and the verdict."""

    def __init__(self, certificate: Certificate) -> None:
        self._certificate = certificate

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        certificate = self._certificate
        facts = certificate.facts
        title = f"{facts['model']} with {facts['method']}, {facts['rule']} rule, {facts['dtype']}"
        yield Text(visible(title), style="bold")
        if options.max_width >= NARROWEST_TABLE:
            yield _table(certificate.checks)
        else:
            yield from _list(certificate.checks)
        if certificate.worth is not None:
            yield Text(str(certificate.worth))
        failed = sum(not check.passed for check in certificate.checks)
        yield Text(
            f"{failed} of {len(certificate.checks)} checks FAILED"
            if failed
            else f"all {len(certificate.checks)} checks passed; a pair whose laws are right fails "
            f"with probability {facts['family_error']:g} at most"
        )


def _table(checks: Sequence[Check]) -> Table:
    table = Table(box=SIMPLE, pad_edge=False, show_edge=False)
    table.add_column("check", overflow="fold", ratio=2)
    table.add_column("result", no_wrap=True)
    table.add_column("statistic", justify="right", no_wrap=True)
    table.add_column("p", justify="right", no_wrap=True)
    table.add_column("detail", overflow="fold", ratio=3)
    for check in checks:
        table.add_row(visible(check.name), *_figures(check), visible(check.detail))
    return table


def _list(checks: Sequence[Check]) -> RenderResult:
    for check in checks:
        result, statistic, p_value = _figures(check)
        yield Text(visible(check.name), style="bold")
        figures = f"{result}, statistic {statistic}, p {p_value}"
        yield Padding(Text(figures), (0, 0, 0, 2), expand=False)
        yield Padding(Text(visible(check.detail)), (0, 0, 0, 2), expand=False)


def _figures(check: Check) -> tuple[str, str, str]:
    return (
        "passed" if check.passed else "FAILED",
        "-" if check.statistic is None else f"{check.statistic:.4g}",
        "-" if check.p_value is None else f"{check.p_value:.3g}",
    )
