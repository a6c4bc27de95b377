"""Acceptance against tokens learned from, of finished or going runs of `foredraft train`.

    python benchmarks/training_curves.py heads/eagle3 heads/medusa heads/draft \
        --output benchmarks/results/training.json --plot docs/training/curves.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from foredraft.bench.provenance import provenance
from foredraft.training.plot import curves_svg
from foredraft.training.run_directory import read_log

ASKED = ("method", "draft_vocab_size", "epochs", "batch_tokens", "learning_rate", "precision")


def curve(directory: Path) -> dict[str, Any]:
    """One run: what was asked, and every measurement of it."""
    asked = json.loads((directory / "run.json").read_text("utf-8"))
    measured = [each for each in read_log(directory) if "mean_acceptance_length" in each]
    return {**{name: asked[name] for name in ASKED}, "measured": measured}


def main() -> None:
    parser = argparse.ArgumentParser(description="Collect what runs of training measured.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    runs = [curve(each) for each in arguments.runs]
    result = {"kind": "training", **provenance(), "runs": runs}
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.plot is not None:
        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        arguments.plot.write_bytes(curves_svg(runs))
    for run in runs:
        best = max(run["measured"], key=lambda each: each["mean_acceptance_length"])
        print(
            f"{run['method']}: {best['mean_acceptance_length']:.2f} after {best['tokens']:,} tokens"
        )


if __name__ == "__main__":
    main()
