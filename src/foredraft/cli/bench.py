"""`foredraft bench kernels | decode | identity | serve | simulate | replay | rules`: tables, JSON.

Knows options and tables; `foredraft.bench` measures.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from foredraft.cli import serve_bench
from foredraft.cli.delivery import check_output, deliver, progress_bars
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
from foredraft.cli.plots import PNG_OR_SVG, check_plot, write_plot
from foredraft.cli.tables import decode_table, identity_table, kernels_table
from foredraft.core.errors import UserError

MISMATCH = 1

app = typer.Typer(
    help="Measure kernels, decoding and serving, check that outputs are identical, tabulate the "
    "rules.",
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
    check_output(output)
    from foredraft.kernels.catalog import native_available, native_status

    if not native_available():
        raise UserError(f"the native kernels are {native_status()}; there is nothing to measure")
    from foredraft.bench.kernels import KernelSettings, bench_kernels

    def load(dtype: str) -> Any:
        return RuntimeOptions(dtype=DtypeChoice(dtype), threads=threads).load(model)

    with progress_bars() as progress:
        result = bench_kernels(KernelSettings(load, threads, rounds), progress)
    deliver({"kind": "kernels", **result}, output, json_output, kernels_table)


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
    prompt_tokens: Annotated[
        int | None,
        Option(
            help="Make every prompt so long, of the workload's texts.",
            metavar="N",
            min=2,
        ),
    ] = None,
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
    check_output(output)
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
        prompt_tokens,
    )
    with progress_bars() as progress:
        result = bench_decode(loaded, items, settings, progress)
    deliver(result, output, json_output, decode_table)


@app.command("serve", cls=ModelCommand)
@option_groups
def serve(
    model: ModelArgument,
    workload: WorkloadOption,
    limit_per_task: LimitOption = None,
    tasks: TasksOption = None,
    output: OutputOption = None,
    plot: Annotated[
        Path | None, Option(help="Draw it into a PNG or SVG file.", metavar="FILE")
    ] = None,
    json_output: JsonFlag = False,
    *,
    load: serve_bench.LoadOptions,
    compared: serve_bench.ComparedOptions,
    runtime: RuntimeOptions,
) -> None:
    """Many requests at once: plain decoding, fixed widths and the adaptive policy, interleaved."""
    check_output(output)
    check_plot(plot, *PNG_OR_SVG)
    from foredraft.bench.workload import read_workload, select

    items = select(read_workload(workload), tasks or (), limit_per_task)
    with progress_bars() as progress:
        result = serve_bench.measure(model, items, load, compared, runtime, progress)
    deliver(result, output, json_output, serve_bench.serve_table)
    if plot is not None:
        from foredraft.bench.serve.plot import draw

        write_plot(plot, partial(draw, result))


@app.command("simulate")
def simulate(
    result: Annotated[
        Path, typer.Argument(metavar="RESULT", help="Of `bench serve`.", show_default=False)
    ],
    output: OutputOption = None,
    json_output: JsonFlag = False,
) -> None:
    """Play what `bench serve` measured in the simulator: tokens a second, best widths.

    Exit code 1 if they are more than 10% apart anywhere, or best widths differ too often.
    """
    check_output(output)
    found = serve_bench.simulated(result)
    deliver(found, output, json_output, serve_bench.simulated_table)
    if not found["passed"]:
        raise typer.Exit(MISMATCH)


@app.command("replay", cls=ModelCommand)
@option_groups
def replay(
    model: ModelArgument,
    result: Annotated[
        Path, Option("--result", help="Of `bench serve`.", metavar="FILE", show_default=False)
    ],
    workload: WorkloadOption,
    limit_per_task: LimitOption = None,
    tasks: TasksOption = None,
    output: OutputOption = None,
    json_output: JsonFlag = False,
    *,
    runtime: RuntimeOptions,
) -> None:
    """Play the loads of `bench serve` again, in seconds: the model's own answers, the real drafter,
    the policies as they are now, and the costs that the result tells.

    For look-ups and tables, which draft without a pass.
    """
    check_output(output)
    from foredraft.bench.workload import read_workload, select

    items = select(read_workload(workload), tasks or (), limit_per_task)
    with progress_bars() as progress:
        found = serve_bench.replayed(model, result, items, runtime, progress)
    deliver(found, output, json_output, serve_bench.replay_table)


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
    check_output(output)
    from foredraft.bench.workload import read_workload, select

    items = select(read_workload(workload), tasks or (), limit_per_task)
    from foredraft.bench.identity import IdentitySettings, bench_identity
    from foredraft.bench.provenance import usable_cores

    threads = runtime.threads or usable_cores()
    settings = IdentitySettings(max_tokens, threads, runtime.engine_settings())
    with progress_bars() as progress:
        result = bench_identity(
            lambda threads: runtime.with_threads(threads).load(model),
            items,
            settings,
            progress,
        )
    deliver(result, output, json_output, identity_table)
    if not result["passed"]:
        raise typer.Exit(MISMATCH)


@app.command("rules", cls=ModelCommand)
def rules(json_output: JsonFlag = False) -> None:
    """The acceptance rules and their expected tokens a step on stated laws, by enumeration."""
    from foredraft.testing.rules import as_markdown, rules_table

    entries = rules_table()
    if json_output:
        sys.stdout.write(json.dumps([asdict(entry) for entry in entries]) + "\n")
    else:
        sys.stdout.write(as_markdown(entries) + "\n")
