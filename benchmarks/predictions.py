"""How far a fixed prediction is followed that is nearly right: prints the table of
docs/drafters/prediction.md.

The prediction is the model's own answer with random edits, so that the number of edits is known.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

from foredraft import LLM, RequestOptions, SamplingParams
from foredraft.bench.workload import read_workload
from foredraft.models.load import load_model

WORKLOAD = Path(__file__).parent / "data" / "bench.jsonl"
EACH_TASK = 2
TOKENS = 96
RATES = (0.0, 0.05, 0.15)
CONFIGS = {
    **{
        f"prediction_rejoin {n}": {"method": "prediction", "prediction_rejoin": n}
        for n in (1, 2, 3)
    },
    "1, no fallback": {"method": "prediction", "prediction_fallback": "none"},
    "n-gram lookup": {"method": "ngram"},
}


def edited(ids: Sequence[int], rate: float, rng: random.Random) -> list[int]:
    """At each token, with probability `rate`, one to three are replaced, put in or left out."""
    out: list[int] = []
    at = 0
    while at < len(ids):
        if rng.random() >= rate:
            out.append(ids[at])
            at += 1
            continue
        kind, count = rng.choice(("replace", "insert", "delete")), rng.randint(1, 3)
        if kind != "delete":
            out += [rng.randrange(1_000, 20_000) for _ in range(count)]
        if kind != "insert":
            at += count
        else:
            out.append(ids[at])
            at += 1
    return out


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    loaded = load_model("smollm2-135m", dtype="bfloat16")
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    chosen: dict[str, list[list[int]]] = {}
    for item in read_workload(WORKLOAD):
        messages = [{"role": "user", "content": item.turns[0]}]
        chosen.setdefault(item.task, []).append(loaded.tokenizer.apply_chat_template(messages))
    prompts = [prompt for task in chosen.values() for prompt in task[:EACH_TASK]]
    answers = [list(output.token_ids) for output in LLM(loaded).generate(prompts, params)]
    sys.stdout.write(_line("edits", *CONFIGS) + "|---" * (len(CONFIGS) + 1) + "|\n")
    for rate in RATES:
        cells = []
        for config in CONFIGS.values():
            speculative = {"num_speculative_tokens": 5, **config}
            llm = LLM(loaded, speculative_config=speculative, max_num_seqs=1)
            rng = random.Random(1)
            predictions = [edited(answer, rate, rng) for answer in answers]
            predicts = config["method"] == "prediction"
            options = [
                RequestOptions(prediction=each if predicts else None) for each in predictions
            ]
            outputs = llm.generate(prompts, params, options)
            if [list(output.token_ids) for output in outputs] != answers:
                raise SystemExit("the text has changed")
            steps = sum(output.metrics.num_steps + 1 for output in outputs)
            cells.append(f"{TOKENS * len(outputs) / steps:.2f}")
        sys.stdout.write(_line(f"{rate:.0%}", *cells))


if __name__ == "__main__":
    main()
