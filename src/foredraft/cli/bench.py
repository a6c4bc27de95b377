"""`foredraft bench kernels | decode | identity`: measurements, as tables or JSON.

Knows options, progress bars and tables; `foredraft.bench` measures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from typer import Option

from foredraft.cli.console import message_console, output_console
from foredraft.cli.interrupts import ModelCommand
from foredraft.cli.option_groups import option_groups
from foredraft.cli.options import (
    MAX_THREADS,
    DtypeChoice,
    JsonFlag,
    ModelArgument,
    RuntimeOptions,
    parse_config,
)
from foredraft.cli.tables import decode_table, identity_table, kernels_table
from foredraft.core.errors import UserError

MISMATCH = 1

app = typer.Typer(
    help="Measure kernels and decoding, check that outputs are identical, tabulate the rules.",
    no_args_is_help=True,
)
OutputOption = Annotated[
    Path | None, Option("--output", help="Write the JSON result to this file.", metavar="FILE")
]
WorkloadOption = Annotated[
    Path,
    Option(
        "--workload", help="JSON lines with id, task, turns.", metavar="FILE", show_default=False
    ),
]
TasksOption = Annotated[
    list[str] | None, Option("--tasks", help="Only this task; may be repeated.", metavar="TASK")
]
LimitOption = Annotated[
    int | None, Option(help="Prompts of each task at most.", metavar="N", min=1)
]
MaxTokensOption = Annotated[int, Option(help="Tokens to generate at most.", metavar="N", min=2)]
Progress = Callable[[str, int, int], None]


@app.command("kernels", cls=ModelCommand)
def kernels(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Its shapes and whole passes are measured.")
    ] = "smollm2-135m",
    threads: Annotated[
        int | None,
        Option(
            help="Threads of the kernels. (default: all cores)",
            metavar="N",
            min=1,
            max=MAX_THREADS,
        ),
    ] = None,
    rounds: Annotated[
        int, Option(help="Rounds; each figure is their median.", metavar="N", min=1)
    ] = 15,
    output: OutputOption = None,
    json_output: JsonFlag = False,
) -> None:
    """Time the native kernels: few rows against one, against memory and against torch."""
    _check_output(output)
    from foredraft.kernels.catalog import native_available, native_status

    if not native_available():
        raise UserError(f"the native kernels are {native_status()}; there is nothing to measure")
    from foredraft.bench.kernels import KernelSettings, bench_kernels

    def load(dtype: str) -> Any:
        return RuntimeOptions(dtype=DtypeChoice(dtype), threads=threads).load(model)

    with _progress() as progress:
        result = bench_kernels(KernelSettings(load, threads, rounds), progress)
    _deliver({"kind": "kernels", **result}, output, json_output, kernels_table)


@app.command("decode", cls=ModelCommand)
@option_groups
def decode(
    model: ModelArgument,
    workload: WorkloadOption,
    speculative_config: Annotated[
        list[str] | None,
        Option(help='May be repeated. (default: {"method": "auto"})', metavar="JSON"),
    ] = None,
    peer: Annotated[
        list[str] | None, Option(help="Also measure this engine (transformers).", metavar="NAME")
    ] = None,
    max_tokens: MaxTokensOption = 128,
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", help="Go on to --max-tokens after the end of sequence.")
    ] = False,
    limit_per_task: LimitOption = None,
    repeats: Annotated[int, Option(help="Times each prompt is run.", metavar="N", min=1)] = 1,
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
    _check_output(output)
    from foredraft.bench.peers import check_peer
    from foredraft.bench.workload import read_workload, select

    for name in peer or ():
        check_peer(name)
    if peer and ignore_eos:
        raise UserError("--ignore-eos: peers end where the model does; leave out --peer")
    items = select(read_workload(workload), tasks or (), limit_per_task)
    loaded = runtime.load(model)
    from foredraft.cli.download import fetch_draft

    for config in configs:
        fetch_draft(config)
    from foredraft.bench.decode import DecodeSettings, bench_decode

    settings = DecodeSettings(
        [config for config in configs if config is not None],
        max_tokens,
        repeats,
        peer or (),
        runtime.engine_settings(),
        ignore_eos,
    )
    with _progress() as progress:
        result = bench_decode(loaded, items, settings, progress)
    _deliver(result, output, json_output, decode_table)


@app.command("identity", cls=ModelCommand)
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
    _check_output(output)
    from foredraft.bench.workload import read_workload, select

    items = select(read_workload(workload), tasks or (), limit_per_task)
    from foredraft.bench.identity import IdentitySettings, bench_identity
    from foredraft.bench.provenance import usable_cores

    threads = runtime.threads or usable_cores()
    settings = IdentitySettings(max_tokens, threads, runtime.engine_settings())
    with _progress() as progress:
        result = bench_identity(
            lambda threads: runtime.with_threads(threads).load(model),
            items,
            settings,
            progress,
        )
    _deliver(result, output, json_output, identity_table)
    if not result["passed"]:
        raise typer.Exit(MISMATCH)


def _deliver(
    result: Mapping[str, Any],
    output: Path | None,
    json_output: bool,
    table: Callable[[Mapping[str, Any]], RenderableType],
) -> None:
    """Write and show a result; one that can't be written goes to stdout whole, so it isn't lost."""
    text = json.dumps(result, indent=1)
    failure: UserError | None = None
    if output is not None:
        try:
            output.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            reason = f"{error.strerror}; the result is on stdout"
            failure = UserError(f"cannot write --output {str(output)!r}: {reason}")
    if json_output or failure is not None:
        sys.stdout.write(text + "\n")
    else:
        output_console().print(table(result))
    if failure is not None:
        raise failure


def _check_output(output: Path | None) -> None:
    """Whether the result can be written, before an hour is spent on it. Changes no file.

    Raises UserError.
    """
    if output is None:
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        existed = output.exists()
        with output.open("a", encoding="utf-8"):
            pass
        if not existed:
            output.unlink()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"cannot write --output {str(output)!r}: {reason}") from None


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


@app.command("rules", cls=ModelCommand)
def rules(json_output: JsonFlag = False) -> None:
    """The acceptance rules and their expected tokens a step on stated laws, by enumeration."""
    from foredraft.testing.rules import as_markdown, rules_table

    entries = rules_table()
    if json_output:
        sys.stdout.write(json.dumps([asdict(entry) for entry in entries]) + "\n")
    else:
        sys.stdout.write(as_markdown(entries) + "\n")
