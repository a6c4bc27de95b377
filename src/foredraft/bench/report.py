"""Pages of measured figures, written from the result files and from nothing else.

`python -m foredraft.bench.report docs/figures.md benchmarks/results` shows a folder, files named
instead are shown alone, and `--by-task` shows one result as the drafters' page does. Knows the form
of results; knows nothing of measuring.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from foredraft.bench.drafters_page import drafters_page
from foredraft.bench.load.page import load_section
from foredraft.bench.markdown import Result, median, number, section, table, times
from foredraft.bench.plan_report import agent_loop, plan
from foredraft.bench.training_page import acceptance_section, training_section

BEGIN = "<!-- figures: begin (written by `make report`; do not edit) -->"
END = "<!-- figures: end -->"
ROWS_SHOWN = (1, 4, 256)


def figures(*results: Path) -> str:
    """Markdown for result files, and those of folders, by kind. Raises ValueError for an unknown
    kind.
    """
    files = (sorted(path.glob("*.json")) if path.is_dir() else [path] for path in results)
    loaded = [json.loads(path.read_text(encoding="utf-8")) for each in files for path in each]
    for result in loaded:
        if result.get("kind") not in SECTIONS:
            raise ValueError(
                f"result of kind {result.get('kind')!r}; valid are {', '.join(SECTIONS)}"
            )
    sections = [
        render(result)
        for kind, render in SECTIONS.items()
        for result in loaded
        if result["kind"] == kind
    ]
    return "\n\n".join(sections) if sections else "No results yet: run `make bench`."


def update(page: Path, shown: str) -> bool:
    """Rewrite a page between its markers; True if it changed. ValueError if it has none."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} lacks the markers {BEGIN} and {END}")
    new = f"{before}{BEGIN}\n\n{shown}\n\n{END}{after}"
    page.write_text(new, encoding="utf-8")
    return new != text


def _decode(result: Result) -> str:
    plain = result["runs"][0]
    tasks = list(plain["per_task"])
    rows = [
        [
            run["label"],
            f"{run['tokens_per_second']:.1f}",
            times(run["speedup"]),
            number(run["mean_acceptance_length"]) if not run["peer"] else "-",
            number(run["mean_step_cost"]) if not run["peer"] else "-",
            *(times(run["per_task"][task]["speedup"]) for task in tasks),
            "yes" if run["identical_to_plain"] else "no",
        ]
        for run in result["runs"]
    ]
    heading = ["run", "tokens/s", "speed", "acceptance length", "step cost", *tasks, "identical"]
    limit = result.get("bandwidth_limit_tokens_per_second")
    words = [
        f"**Decoding**, {result['model']}, {result['dtype']}, {result['prompts']} prompts, greedy, "
        f"at most {result['max_tokens']} tokens, one request at a time. Speeds are those after the "
        "prompt, against plain decoding in the same run, as a whole and by task."
    ]
    words.extend(
        f"Plain decoding has {peer['plain_over_peer']:.1f} times the speed of {peer['label']}, "
        f"{name}'s better dtype."
        for name, peer in result.get("peers", {}).items()
        if peer["plain_over_peer"]
    )
    if limit:
        words.append(
            f"Reading the weights once a token allows {limit:.1f} tokens/s of plain decoding here."
        )
    return section(" ".join(words), heading, rows, result)


def _kernels(result: Result) -> str:
    by_shape: dict[tuple[str, ...], dict[int, Result]] = {}
    for each in result["linear"]:
        key = (each["format"], " x ".join(map(str, each["shape"])))
        by_shape.setdefault(key, {})[each["rows"]] = each
    bandwidth = result["read_bandwidth_gb_s"]
    one, four, many = ROWS_SHOWN
    rows = [
        [
            *key,
            f"{found[one]['us']:.0f}",
            f"{found[one]['gb_s'] / found[one]['read_bandwidth_gb_s']:.0%}",
            f"{found[four]['us']:.0f}",
            f"{found[four]['us'] / found[one]['us']:.2f}",
            f"{found[four]['torch_us']:.0f}",
            f"{found[many]['us']:.0f}",
            f"{found[many]['torch_us']:.0f}",
        ]
        for key, found in by_shape.items()
    ]
    words = (
        "**Kernels**: one linear layer, `y[M,N] = x[M,K] W[N,K]^T`, in microseconds, weights from "
        f"memory; read bandwidth, measured between them, {bandwidth:.1f} GB/s; "
        f"{result['instruction_set']}, {result['threads']} threads."
    )
    for name, summary in result.get("summary", {}).items():
        together = summary.get("all_of_a_pass")
        if together:
            words += (
                f" All of a pass together, {name}: one row at "
                f"{together['one_row_share_of_bandwidth']:.0%} of the bandwidth, four rows at "
                f"{together['four_rows_over_one']:.2f} of one and "
                f"{together['four_rows_speed_over_faster_torch']:.1f} times the speed of torch's "
                f"faster dtype, 256 rows at {together['prefill_speed_over_torch_float32']:.1f} "
                "times torch's float32."
            )
    heading = ["format", "N x K", "1 row", "of bandwidth", "4 rows", "4 / 1", "torch, 4 rows"]
    heading += ["256 rows", "torch, 256 rows"]
    return f"{section(words, heading, rows, result)}\n\n{_passes(result)}"


def _passes(result: Result) -> str:
    """Milliseconds of whole passes, a line a dtype."""
    lines: dict[tuple[str, str], dict[tuple[int, int], float]] = {}
    for each in result["forward"]:
        if "tree" in each:  # compared with a chain in its own entry
            continue
        key = (each["model"], each["dtype"])
        lines.setdefault(key, {})[each["rows"], each["context"]] = each["ms"]
    columns = list(next(iter(lines.values())))
    heading = ["model", "dtype"]
    heading += [
        f"{rows} row{'s' if rows > 1 else ''}, context {context}" for rows, context in columns
    ]
    rows = [[*key, *(f"{times[each]:.1f}" for each in columns)] for key, times in lines.items()]
    return f"A whole pass of the model, in milliseconds:\n\n{table(heading, rows)}"


def _identity(result: Result) -> str:
    rows = [
        [
            check["name"],
            str(check["prompts"]),
            str(check["tokens"]),
            "compared" if check["compared_logits"] else "not compared",
            "identical" if check["passed"] else "**differs**",
        ]
        for check in result["checks"]
    ]
    words = (
        f"**Identity** with plain decoding, one prompt at a time: {result['model']}, "
        f"{result['dtype']}, {result['kernels']} kernels, token ids and a hash of the logits "
        "behind each committed token."
    )
    return section(words, ["check", "prompts", "tokens", "logits", "result"], rows, result)


def _serve(result: Result) -> str:
    """A line a load: plain decoding, the best fixed width, and each policy against them."""
    policies = list(result.get("objectives", {}))
    crowds = [point for point in result["points"] if "concurrency" in point]
    rows = []
    for load in dict.fromkeys(point["concurrency"] for point in crowds):
        here = {point["label"]: point for point in crowds if point["concurrency"] == load}
        ratios = {
            each["label"]: each["tokens_per_second"]
            for each in result.get("comparisons", ())
            if each.get("concurrency") == load
        }
        best = next((each["best_fixed"] for each in ratios.values()), None)
        rows.append(
            [
                str(load),
                *(f"{each['tokens_per_second']:.0f}" for each in list(here.values())[:1]),
                "-" if best is None else f"{median(ratios[best]['over_plain'])} ({best})",
                *(
                    f"{median(ratios[label]['over_plain'])}, {_width(here[label], result)}"
                    for label in policies
                ),
                *(f"{here[label]['itl_ms']['p99']:.0f}" for label in (next(iter(here)), *policies)),
            ]
        )
    heading = ["requests at once", "plain, tokens/s", "best fixed width", *policies]
    heading += [f"ms between tokens, p99: {label}" for label in ("plain", *policies)]
    made = result.get("prompt_tokens")
    words = (
        f"**Serving**, {result['model']}, {result.get('dtype', 'unknown dtype')}, "
        f"{result.get('method', 'a server')}, {result['prompts']} prompts"
        f"{f' made {made} tokens long' if made else ''}, at most {result['max_tokens']} tokens, "
        f"temperature {result['temperature']:g}. Output tokens a second while so many requests "
        "run, prompts read in between; speeds over plain decoding are medians of "
        f"{result['rounds']} rounds, each on the same requests."
    )
    return section(words, heading, rows, result)


def _width(point: Result, result: Result) -> str:
    if result.get("hopeless"):
        return f"width 0 in {point['width_0_share']:.0%} of steps"
    return f"width {point['width']:.1f}"


def _simulated(result: Result) -> str:
    rows = [
        [
            str(best["concurrency"]),
            str(best["measured"]),
            ", ".join(map(str, best["tied"])),
            str(best["simulated"]),
            *(
                f"{point['error']:+.0%}"
                for point in result["points"]
                if point["concurrency"] == best["concurrency"]
            ),
        ]
        for best in result["best"]
    ]
    widths = dict.fromkeys(point["width"] for point in result["points"])
    heading = ["requests at once", "best width measured", "not told apart from it", "simulated"]
    heading += [f"simulated tokens/s, K={width}" for width in widths]
    words = (
        f"**The simulator** beside that, {result['model']}: {result['near_share']:.0%} of the "
        f"points within 10% round by round ({result['near_share_of_medians']:.0%} where medians of "
        f"rounds are compared); its width is within 1% of the best measured at "
        f"{result['same_share']:.0%} of the loads, and at {result['agree_share']:.0%} it is one "
        "that the rounds don't tell apart from the best (of widths chosen at random: "
        f"{result['agree_share_at_random']:.0%})."
    )
    return section(words, heading, rows, result)


def _replayed(result: Result) -> str:
    """A line a configuration: how far it is from what was measured."""
    errors = result["errors"]
    loads = dict.fromkeys(each["concurrency"] for each in errors)
    rows = [
        [label, *(f"{each['error']:+.1%}" for each in errors if each["label"] == label)]
        for label in dict.fromkeys(each["label"] for each in errors)
    ]
    near = sum(each["near"] for each in errors)
    words = (
        f"**The replay** of that, {result['model']}: its own answers, the real drafter, the "
        f"policies, and costs as they were measured. Tokens/s are within 10% at {near} of "
        f"{len(errors)} points, the worst {result['largest_error']:.1%} off."
    )
    return section(words, ["run", *(f"{load} at once" for load in loads)], rows, result)


def _structured(result: Result) -> str:
    """A line a configuration."""
    rows = [
        [
            label,
            f"{run['tokens_per_second']:.1f}",
            times(run["speedup"]),
            f"{run['accepted']} of {run['draft_tokens']}",
            f"{run['valid']} of {result['requests']}",
            f"{run['equal_to_plain']} of {result['requests']}",
        ]
        for label, run in result["runs"].items()
    ]
    words = (
        f"**Answers held to a JSON schema**, {result['model']}: {result['requests']} requests, "
        f"{len(result['schemas'])} schemas in turn, one request at a time. `grammar` drafts only "
        "the tokens that the schema forces. A mask takes "
        f"{result['masks']['mask_median_us']:.0f} us a row (median)."
    )
    heading = ["run", "tokens/s", "speed", "accepted drafts", "valid", "equal to plain"]
    return section(words, heading, rows, result)


SECTIONS: dict[str, Callable[[Result], str]] = {
    "decode": _decode,
    "kernels": _kernels,
    "identity": _identity,
    "serve": _serve,
    "simulated": _simulated,
    "replay": _replayed,
    "plan": plan,
    "agent-loop": agent_loop,
    "structured": _structured,
    "load": load_section,
    "training": training_section,
    "acceptance": acceptance_section,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Update one page; says what it did on stderr."""
    parser = argparse.ArgumentParser(prog="python -m foredraft.bench.report")
    parser.add_argument("page", type=Path)
    parser.add_argument("results", type=Path, nargs="+", help="result files, or folders of them")
    parser.add_argument("--by-task", action="store_true", help="one result, as drafters by task")
    options = parser.parse_args(arguments)
    if options.by_task:
        shown = drafters_page(json.loads(options.results[0].read_bytes()))
    else:
        shown = figures(*options.results)
    changed = update(options.page, shown)
    sys.stderr.write(f"{options.page} {'updated' if changed else 'is up to date'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
