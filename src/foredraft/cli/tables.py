"""Results of benchmarks as tables for a terminal. Knows the form of results; measures nothing.

No figure is ever cut: where a terminal is too narrow for a table, the same figures come as a list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from foredraft.cli.console import visible

LABEL_WIDTH = 24  # columns that a label may take before its words are broken
GAP = 3  # columns between two columns


@dataclass(frozen=True, slots=True)
class Figures:
    """A titled table: labels to the left, figures to the right. Headings may hold line breaks."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(visible(self.title), style="bold")
        if self._width() <= options.max_width:
            yield self._table()
        else:
            yield from self._list()
        yield ""

    def _width(self) -> int:
        """Columns that the table needs at least."""
        words = [word for row in [self.headings, *self.rows] for word in row[0].split()]
        label = min(LABEL_WIDTH, max(map(len, words), default=0))
        figures = [
            max(len(line) for row in [self.headings, *self.rows] for line in row[at].splitlines())
            for at in range(1, len(self.headings))
        ]
        return label + sum(figures) + GAP * len(figures)

    def _table(self) -> Table:
        table = Table(box=SIMPLE, pad_edge=False, show_edge=False)
        for index, heading in enumerate(self.headings):
            if index:
                table.add_column(heading, justify="right", no_wrap=True)
            else:
                table.add_column(heading, overflow="fold")
        for label, *figures in self.rows:
            table.add_row(visible(label), *figures)
        return table

    def _list(self) -> RenderResult:
        for label, *figures in self.rows:
            yield Text(visible(label), style="bold")
            for heading, figure in zip(self.headings[1:], figures, strict=True):
                yield Padding(
                    Text(f"{' '.join(heading.split())}: {figure}"), (0, 0, 0, 2), expand=False
                )


def kernels_table(result: Mapping[str, Any]) -> Group:
    """Linear layers, then whole passes and verification rules."""
    title = (
        f"y[M,N] = x[M,K] W[N,K]^T, {result['instruction_set']}, {result['threads']} threads, "
        f"read bandwidth {result['read_bandwidth_gb_s']:.1f} GB/s"
    )
    linear = [
        (
            each["format"],
            " x ".join(map(str, each["shape"])),
            str(each["rows"]),
            *(f"{each[key]:.1f}" for key in ("us", "gb_s", "gflop_s", "torch_us")),
        )
        for each in result["linear"]
    ]
    passes = [
        (
            each["dtype"],
            str(each["context"]),
            f"{each['rows']}, a tree" if "tree" in each else str(each["rows"]),
            f"{each['ms']:.2f}",
        )
        for each in result["forward"]
    ]
    headings = ("format", "N x K", "rows", "us", "GB/s", "GFLOP/s", "torch us")
    return Group(
        Figures(title, headings, linear),
        Figures("whole passes of the model", ("dtype", "context", "rows", "ms"), passes),
        _rules(result["verify"]),
        _attention(result["attention"]),
    )


def _rules(entries: Sequence[Mapping[str, Any]]) -> Figures:
    rows = [
        (
            each["rule"],
            str(each["requests"]),
            str(each["rows"]),
            f"{each['ms']:.3f}",
            f"{each['share_of_pass']:.1%}",
        )
        for each in entries
    ]
    headings = ("rule", "requests", "rows of each", "ms", "of the pass")
    return Figures("verification, every draft accepted", headings, rows)


def _attention(entries: Sequence[Mapping[str, Any]]) -> Figures:
    rows = [
        (
            str(each["context"]),
            str(each["rows"]),
            *(f"{each[key]:.1f}" for key in ("us", "bytes_limit_us", "flops_limit_us")),
            f"{each['over_limit']:.2f}",
        )
        for each in entries
    ]
    headings = ("context", "rows", "us", "bytes limit", "flops limit", "over the larger")
    return Figures(
        "attention of a layer, float32 cache, without the call from Python", headings, rows
    )


def decode_table(result: Mapping[str, Any]) -> Group:
    """The runs as a whole, then their speedups by task."""
    runs = result["runs"]
    tasks = list(runs[0]["per_task"])
    title = f"{result['model']}, {result['dtype']}, {result['prompts']} prompts, greedy"
    headings = (
        "run", "tokens/s", "speedup", "acceptance\nlength", "step\ncost",
        "ms a step: drafter,\ntarget, rest", "identical",
    )  # fmt: skip
    rows = [
        (
            run["label"],
            f"{run['tokens_per_second']:.1f}" if run["tokens_per_second"] else "-",
            _number(run["speedup"], "x"),
            _number(run["mean_acceptance_length"]),
            _number(run["mean_step_cost"]),
            ", ".join(f"{ms:.2f}" for ms in run["step_ms"].values()) or "-",
            "yes" if run["identical_to_plain"] else "no",
        )
        for run in runs
    ]
    by_task = [
        (run["label"], *(_number(run["per_task"][task]["speedup"], "x") for task in tasks))
        for run in runs
    ]
    parts: list[Figures | Text] = [
        Figures(title, headings, rows),
        Figures("speedup by task", ("run", *map(visible, tasks)), by_task),
    ]
    limit = result["bandwidth_limit_tokens_per_second"]
    if limit:
        words = f"limit of plain decoding by read bandwidth: {limit:.1f} tokens/s"
        with_cache = result.get("bandwidth_limit_with_cache_tokens_per_second")
        if with_cache:
            words += f", {with_cache:.1f} with the keys and values of the context"
        parts.append(Text(words, style="dim"))
    return Group(*parts)


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"


def identity_table(result: Mapping[str, Any]) -> Group:
    """A line a check, and where the last one left plain decoding if it did."""
    title = (
        f"{result['model']}, {result['dtype']}, {result['kernels']} kernels, against plain decoding"
    )
    rows = [
        (
            check["name"],
            str(check["prompts"]),
            str(check["tokens"]),
            "compared" if check["compared_logits"] else "not compared",
            "identical" if check["passed"] else "DIFFERS",
        )
        for check in result["checks"]
    ]
    found = [check["mismatch"] for check in result["checks"] if check["mismatch"] is not None]
    return Group(
        Figures(title, ("check", "prompts", "tokens", "logits", "result"), rows),
        *(Text(visible(_mismatch(each))) for each in found),
    )


def _mismatch(found: Mapping[str, Any]) -> str:
    return (
        f"DIFFERS: {found['prompt_id']} at position {found['position']}, token {found['token']}, "
        f"plain {found['plain_token']}, logits {'equal' if found['same_logits'] else 'differ'}, "
        f"plain's best two logits {found['plain_top2_margin']} apart"
    )
