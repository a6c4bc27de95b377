"""A replayed agent loop: 20 turns of nearly the same tool calls and file edits, decoded plain and
with the suffix drafter, which remembers the responses of the turns before.

Replayed: the history of every turn is given (the last turns of it), and the model answers each
turn by itself. Decoding is measured apart from the prompt. Between the steps, passes over 1 to 33
rows are timed behind as long a context: no draft of K tokens can gain more than K + 1 over the cost
of K + 1 rows, so the best of these is the ceiling.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from foredraft.bench.plan.measure import Bench, Spent, Turns, in_turns, label
from foredraft.bench.plan.readings import Readings
from foredraft.bench.provenance import provenance
from foredraft.models.load import load_model
from foredraft.models.tokenizer import Tokenizer

LOOP = Path(__file__).parent / "data" / "agent-loop.json"
WINDOW = 3  # turns before the one that is answered
MAX_TOKENS = 400
ROWS = (1, 2, 4, 6, 8, 9, 12, 13, 16, 17, 24, 25, 32, 33)
CONFIGS: tuple[Mapping[str, Any], ...] = (
    {"method": "suffix", "num_speculative_tokens": 8},
    {"method": "suffix", "num_speculative_tokens": 11},
    {"method": "suffix", "num_speculative_tokens": 15},
    {"method": "suffix", "num_speculative_tokens": 11, "suffix_decoding_max_cached_requests": 0},
    {"method": "suffix", "num_speculative_tokens": 31, "policy": "adaptive"},
)


def prompts(tokenizer: Tokenizer, loop: Mapping[str, Any], window: int) -> list[list[int]]:
    """Of every turn: the rules, the last turns with what became of them, and what is asked."""
    opening = loop["opening"]
    turns = [*opening, *loop["turns"]]
    found = []
    for asked in range(len(opening), len(turns)):
        messages = [{"role": "system", "content": loop["system"]}]
        first = max(0, asked - window)
        for number in range(first, asked + 1):
            result = "" if number == first else f"{turns[number - 1]['result']}\n"
            messages.append({"role": "user", "content": result + turns[number]["user"]})
            if number < asked:
                messages.append({"role": "assistant", "content": turns[number]["assistant"]})
        found.append(tokenizer.apply_chat_template(messages))
    return found


def figures(run: Turns, plain: Turns, costs: Mapping[int, float]) -> dict[str, Any]:
    """A configuration's speed-up, and its parts."""
    spent = run.total()
    drafted = [step for step in spent.steps if step.nodes]
    ceiling = max(rows / cost for rows, cost in costs.items())
    speedup = run.tokens_per_second() / plain.tokens_per_second()
    return {
        "label": run.label,
        "tokens_per_second": run.tokens_per_second(),
        "speedup": speedup,
        "speedup_by_repeat": [a / b for a, b in zip(run.spread(), plain.spread(), strict=True)],
        "share_of_ceiling": speedup / ceiling,
        "mean_acceptance_length": fmean(step.tokens for step in drafted) if drafted else 1.0,
        "mean_emitted_tokens": spent.tokens_each(1),
        "mean_rows": fmean(step.rows for step in spent.steps),
        "step_ms": spent.step_ms(),
        "identical_to_plain": run.token_ids == plain.token_ids,
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    loop = json.loads(arguments.loop.read_text(encoding="utf-8"))
    loaded = load_model(arguments.model, dtype=arguments.dtype)
    ids = prompts(loaded.tokenizer, loop, WINDOW)
    configs: Sequence[Mapping[str, Any]] = arguments.speculative_config or CONFIGS
    answers = [loaded.tokenizer.encode(turn["assistant"]) for turn in loop["turns"]]
    context = round(fmean(map(len, ids)) + fmean(map(len, answers)) / 2)
    bench = Bench(loaded, {}, MAX_TOKENS)
    readings = Readings(loaded, ROWS, context)

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\rturn {done} of {total}")

    plain, *runs = in_turns(
        [(label(loaded, each), partial(bench.runner, each)) for each in (None, *configs)],
        [[turn] for turn in ids], bench.params, arguments.repeats, progress, readings.read,
    )  # fmt: skip
    taken = readings.taken()
    costs = {rows: seconds / taken[1] for rows, seconds in taken.items()}
    best = max(costs, key=lambda rows: rows / costs[rows])
    return {
        "kind": "agent-loop",
        **provenance(),
        "model": loaded.name,
        "dtype": arguments.dtype,
        "turns": len(ids),
        "prompt_tokens": [len(each) for each in ids],
        "answer_tokens": [len(each) for each in plain.token_ids[0]],
        "repeats": arguments.repeats,
        "context": context,
        "verify_cost": {str(rows): cost for rows, cost in costs.items()},
        "ceiling": {"num_speculative_tokens": best - 1, "speedup": best / costs[best]},
        "plain_tokens_per_second": plain.tokens_per_second(),
        "plain_step_ms": Spent(plain.total().steps).step_ms(),
        "runs": [figures(run, plain, costs) for run in runs],
    }


def show(result: Mapping[str, Any]) -> None:
    ceiling = result["ceiling"]
    print(
        f"{result['turns']} turns, context {result['context']}, plain "
        f"{result['plain_tokens_per_second']:.1f} tokens/s, ceiling {ceiling['speedup']:.2f} at "
        f"K = {ceiling['num_speculative_tokens']}"
    )
    for run in result["runs"]:
        print(
            f"{run['label']}: {run['speedup']:.2f}x plain, {run['share_of_ceiling']:.0%} of the "
            f"ceiling, acceptance length {run['mean_acceptance_length']:.2f}, identical: "
            f"{'yes' if run['identical_to_plain'] else 'no'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--loop", type=Path, default=LOOP)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--speculative-config", type=json.loads, action="append")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)


if __name__ == "__main__":
    main()
