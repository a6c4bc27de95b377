"""Results of benchmarks as tables for a terminal. Knows the form of results; measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table


def kernels_table(result: Mapping[str, Any]) -> Group:
    """Linear layers, then whole passes and verification rules."""
    title = (
        f"y[M,N] = x[M,K] W[N,K]^T, {result['instruction_set']}, {result['threads']} threads, "
        f"read bandwidth {result['read_bandwidth_gb_s']:.1f} GB/s"
    )
    linear = _table(title, ("format", "N x K", "rows", "us", "GB/s", "GFLOP/s", "torch us"))
    for each in result["linear"]:
        numbers = (each["us"], each["gb_s"], each["gflop_s"], each["torch_us"])
        shape = " x ".join(map(str, each["shape"]))
        cells = [f"{number:.1f}" for number in numbers]
        linear.add_row(each["format"], shape, str(each["rows"]), *cells)
    passes = _table("whole passes of the model", ("dtype", "context", "rows", "ms"))
    for each in result["forward"]:
        sizes = (str(each["context"]), str(each["rows"]))
        passes.add_row(each["dtype"], *sizes, f"{each['ms']:.2f}")
    rules = _table("verification, every draft accepted", ("rule", "rows", "vocabulary", "ms"))
    for each in result["verify"]:
        sizes = (str(each["rows"]), str(each["vocab"]))
        rules.add_row(each["rule"], *sizes, f"{each['ms']:.3f}")
    return Group(linear, passes, rules)


def _table(title: str, headings: Sequence[str]) -> Table:
    """The first column to the left, the others to the right."""
    table = Table(title=title)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    return table


def decode_table(result: Mapping[str, Any]) -> Table:
    tasks = list(result["runs"][0]["per_task"])
    limit = result["bandwidth_limit_tokens_per_second"]
    caption = f"limit of plain decoding by read bandwidth: {limit:.1f} tokens/s" if limit else None
    title = f"{result['model']}, {result['dtype']}, {result['prompts']} prompts, greedy"
    headings = ("run", "tokens/s", "speedup", "acceptance length", "step cost", "identical", *tasks)
    table = _table(title, headings)
    table.caption = caption
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


def identity_table(result: Mapping[str, Any]) -> Table:
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
