"""A server under load: `foredraft serve` as a process of its own, and a crowd of streams that ask
all the time and often leave early. Nothing may be lost, no text may change, memory must stay flat;
how long readers wait is measured without speculation, with it, and with `--pace`.

The clients are one process on the same cores, which takes from the server what `client_cores`
tells. Configurations run one after the other, each for the given minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foredraft.bench.load.crowd import Habits
from foredraft.bench.load.figures import sound
from foredraft.bench.load.run import measure
from foredraft.bench.provenance import provenance
from foredraft.bench.workload import read_workload
from foredraft.core.errors import UserError

PROMPTS = Path(__file__).parent / "data" / "bench.jsonl"
ADAPTIVE = ("--speculative-config", '{"method": "auto", "policy": "adaptive"}')
# Prompts have the first claim on the rows of a pass: with the usual 256 they leave drafts none.
FIXED = (
    "--speculative-config",
    '{"method": "auto", "num_speculative_tokens": 2}',
    "--max-num-batched-tokens",
    "512",
)
# With so many streams the adaptive policy drafts next to nothing and leaves nothing to smooth: what
# bursts and `--pace` do to readers is seen where drafts are as long whatever the load.
CONFIGS: Mapping[str, Sequence[str]] = {
    "plain": ("--no-speculation",),
    "adaptive": ADAPTIVE,
    "adaptive-paced": (*ADAPTIVE, "--pace"),
    "fixed": FIXED,
    "fixed-paced": (*FIXED, "--pace"),
}


def show(line: str) -> None:
    """A line that replaces itself, where a person looks."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()


def told(run: Mapping[str, Any]) -> str:
    """A run in a line."""
    counts, again = run["requests"], run["asked_again"]
    return (
        f"{run['label']}: {counts['finished']} finished, {counts['aborted']} aborted, "
        f"{counts['lost']} lost; {again['identical']} of {again['asked']} the same alone; "
        f"{run['tokens_per_second']:.0f} tokens/s, p99 between events "
        f"{run['between_events_ms']['p99'] or 0:.0f} ms, between tokens "
        f"{run['between_tokens_ms']['p99'] or 0:.0f} ms; memory {run['rss_growth_mib']:+.1f} MiB"
    )


async def run_all(options: argparse.Namespace, habits: Habits) -> list[dict[str, Any]]:
    prompts = [item.turns[0] for item in read_workload(options.workload)]
    runs = []
    for label in options.only or CONFIGS:
        arguments = [*CONFIGS[label], *shlex.split(options.serve_options)]
        runs.append(await measure(options.model, label, arguments, prompts, habits, show))
        show("")
        print(told(runs[-1]), file=sys.stderr)
    return runs


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--minutes", type=float, default=10.0, help="of each configuration")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128, help="of the longest answers")
    parser.add_argument("--abort-share", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workload", type=Path, default=PROMPTS)
    parser.add_argument("--only", action="append", choices=list(CONFIGS), help="may be repeated")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve-options", default="", help="more options of `foredraft serve`")
    options = parser.parse_args(arguments)
    habits = Habits(
        options.streams,
        60.0 * options.minutes,
        options.max_tokens,
        options.abort_share,
        options.seed,
    )
    try:
        runs = asyncio.run(run_all(options, habits))
    except UserError as error:
        print(f"load: {error}", file=sys.stderr)
        return 2
    result = {
        "kind": "load",
        **provenance(),
        "model": options.model,
        "streams": habits.streams,
        "minutes": options.minutes,
        "max_tokens": habits.longest,
        "abort_share": habits.abort_share,
        "seed": habits.seed,
        "client": "one process on the server's own cores",
        "runs": runs,
    }
    written = json.dumps(result, indent=2)
    if options.output is None:
        print(written)
    else:
        options.output.write_text(written + "\n")
    return 0 if all(map(sound, runs)) else 1


if __name__ == "__main__":
    sys.exit(main())
