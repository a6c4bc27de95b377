"""`foredraft bench kernels | decode | identity`: measurements, as tables or JSON.

Knows options, progress bars and tables; `foredraft.bench` measures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer import Option

from foredraft.cli.console import message_console, output_console
from foredraft.cli.options import (
    JsonFlag,
    ModelArgument,
    RuntimeOptions,
    option_groups,
    parse_config,
)
from foredraft.core.errors import UserError

MISMATCH = 1

app = typer.Typer(
    help="Measure kernels and decoding, and check that outputs are identical.",
    no_args_is_help=True,
)
OutputOption = Annotated[
    Path | None, Option("--output", help="Write the JSON result to this file.")
]
WorkloadOption = Annotated[
    Path, Option("--workload", help="JSON lines with id, task and turns.", show_default=False)
]
TasksOption = Annotated[
    list[str] | None, Option("--tasks", help="Only this task; may be repeated.")
]
LimitOption = Annotated[int | None, Option(help="Prompts of each task at most.", min=1)]
MaxTokensOption = Annotated[int, Option(help="Tokens to generate at most.", min=2)]
Progress = Callable[[str, int, int], None]


@app.command("decode")
@option_groups
def decode(
    model: ModelArgument,
    workload: WorkloadOption,
    speculative_config: Annotated[
        list[str] | None,
        Option(help='JSON; may be repeated.  [default: {"method": "auto"}]'),
    ] = None,
    peer: Annotated[
        list[str] | None, Option(help="Also measure this engine (transformers).")
    ] = None,
    max_tokens: MaxTokensOption = 128,
    limit_per_task: LimitOption = None,
    repeats: Annotated[int, Option(help="Times each prompt is run.", min=1)] = 1,
    tasks: TasksOption = None,
    output: OutputOption = None,
    json_output: JsonFlag = False,
    *,
    runtime: RuntimeOptions,
) -> None:
    """Speed of decoding, one request at a time: plain decoding beside each configuration."""
    configs = [parse_config(text) for text in speculative_config or ['{"method": "auto"}']]
    if None in configs:
        raise UserError("--speculative-config null: plain decoding is measured anyway")
    from foredraft.bench.peers import check_peer
    from foredraft.bench.workload import read_workload, select

    for name in peer or ():
        check_peer(name)
    items = select(read_workload(workload), tasks or (), limit_per_task)
    loaded = runtime.load(model)
    from foredraft.bench.decode import DecodeSettings, bench_decode

    settings = DecodeSettings(
        [config for config in configs if config is not None], max_tokens, repeats, peer or ()
    )
    with _progress() as progress:
        result = bench_decode(loaded, items, settings, progress)
    _deliver(result, output, json_output, _decode_table)


@app.command("identity")
@option_groups
def identity(
    model: ModelArgument,
    workload: WorkloadOption,
    max_tokens: MaxTokensOption = 128,
    limit_per_task: LimitOption = None,
    tasks: TasksOption = None,
    output: OutputOption = None,
    json_output: JsonFlag = False,
    *,
    runtime: RuntimeOptions,
) -> None:
    """Compare tokens and logits with plain decoding's: drafts, seeds, chunks, batches, threads.

    Exit code 1 at the first difference.
    """
    from foredraft.bench.workload import read_workload, select

    items = select(read_workload(workload), tasks or (), limit_per_task)
    from foredraft.bench.identity import bench_identity
    from foredraft.bench.provenance import usable_cores

    with _progress() as progress:
        result = bench_identity(
            lambda threads: runtime.with_threads(threads).load(model),
            items,
            progress,
            max_tokens=max_tokens,
            threads=runtime.threads or usable_cores(),
        )
    _deliver(result, output, json_output, _identity_table)
    if not result["passed"]:
        raise typer.Exit(MISMATCH)


def _deliver(
    result: Mapping[str, Any],
    output: Path | None,
    json_output: bool,
    table: Callable[[Mapping[str, Any]], Table],
) -> None:
    text = json.dumps(result, indent=1)
    if output is not None:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write --output {str(output)!r}: {error.strerror}") from None
    if json_output:
        sys.stdout.write(text + "\n")
    else:
        output_console().print(table(result))


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar a phase on stderr, where that is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = message_console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:
        known: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in known:
                known[what] = bars.add_task(what, total=total)
            bars.update(known[what], completed=done)

        yield show


def _decode_table(result: Mapping[str, Any]) -> Table:
    tasks = list(result["runs"][0]["per_task"])
    limit = result["bandwidth_limit_tokens_per_second"]
    table = Table(
        title=f"{result['model']}, {result['dtype']}, {result['prompts']} prompts, greedy",
        caption=f"limit of plain decoding by read bandwidth: {limit:.1f} tokens/s"
        if limit
        else None,
    )
    headings = ("run", "tokens/s", "speedup", "acceptance length", "step cost", "identical", *tasks)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for run in result["runs"]:
        table.add_row(
            run["label"],
            f"{run['tokens_per_second']:.1f}",
            _number(run["speedup"], "x"),
            _number(run["mean_acceptance_length"]),
            _number(run["mean_step_cost"]),
            "yes" if run["identical_to_plain"] else "no",
            *(_number(run["per_task"][task]["speedup"], "x") for task in tasks),
        )
    return table


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"


def _identity_table(result: Mapping[str, Any]) -> Table:
    title = (
        f"{result['model']}, {result['dtype']}, {result['kernels']} kernels, against plain decoding"
    )
    table = Table(title=title)
    for heading in ("check", "prompts", "tokens", "logits", "result"):
        table.add_column(heading, justify="right" if heading in ("prompts", "tokens") else "left")
    for check in result["checks"]:
        verdict = "identical" if check["passed"] else _mismatch(check["mismatch"])
        logits = "compared" if check["compared_logits"] else "not compared"
        table.add_row(check["name"], str(check["prompts"]), str(check["tokens"]), logits, verdict)
    return table


def _mismatch(found: Mapping[str, Any]) -> str:
    return (
        f"DIFFERS: {found['prompt_id']} at position {found['position']}, token {found['token']}, "
        f"plain {found['plain_token']}, logits {'equal' if found['same_logits'] else 'differ'}, "
        f"plain's best two logits {found['plain_top2_margin']} apart"
    )
