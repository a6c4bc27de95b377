"""How much sooner does the second turn of a conversation begin when the first is still known?

    python benchmarks/prefix_cache.py smollm2-135m --dtype bfloat16 --output FILE

Conversations of about 1,000 tokens, made of the benchmark prompts; then a message of at most 50
tokens. Two engines over one loaded model, with and without the prefix cache, take turns; each run
is another conversation. Prints the median time to the first token of the second answer.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from foredraft import LLM, SamplingParams
from foredraft.bench.intervals import spread
from foredraft.bench.provenance import provenance
from foredraft.models.load import LoadedModel, load_model

PROMPTS = Path(__file__).parent / "data" / "bench.jsonl"
MESSAGE = "Thank you. Now say the same in one short paragraph for somebody who is new to it."


def main() -> None:
    arguments = _arguments()
    loaded = load_model(arguments.model, dtype=arguments.dtype, num_threads=arguments.threads)
    config = json.loads(arguments.speculative_config)
    engines = {
        caching: LLM(loaded, speculative_config=config, seed=0, enable_prefix_caching=caching)
        for caching in (False, True)
    }
    seconds: dict[bool, list[float]] = {False: [], True: []}
    runs = []
    for run in range(arguments.runs + 1):  # the first warms up
        first = [{"role": "user", "content": _long_message(loaded, arguments.tokens - 64, run)}]
        for caching in (False, True) if run % 2 else (True, False):
            found = _second_turn(engines[caching], first)
            if run:
                seconds[caching].append(found["seconds"])
                runs.append({"prefix_caching": caching, **found})
                print(json.dumps(runs[-1]))
    without, cached = median(seconds[False]), median(seconds[True])
    print(
        f"{without * 1e3:.0f} ms without, {cached * 1e3:.0f} ms with: "
        f"{without / cached:.1f} times sooner"
    )
    if arguments.output is not None:
        document = {
            **provenance(),
            "model": loaded.name,
            "dtype": arguments.dtype,
            "speculative_config": config,
            "ttft_seconds": {"without": spread(seconds[False]), "cached": spread(seconds[True])},
            "ratio_of_medians": without / cached,
            "runs": runs,
        }
        arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _second_turn(llm: LLM, first: list[dict[str, str]]) -> dict[str, Any]:
    """The first turn, untimed; then the seconds to the first token of the second."""
    params = SamplingParams(temperature=0.0, max_tokens=64)
    (answer,) = llm.chat(first, params)
    second = [
        *first,
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": MESSAGE},
    ]
    scheduler = llm.engine.scheduler
    known, asked = scheduler.prefix_hit_tokens, len(llm.tokenizer.apply_chat_template(second))
    begin = time.perf_counter()
    stream = llm.stream_chat(second, params)
    next(stream)
    took = time.perf_counter() - begin
    for _ in stream:
        pass
    return {
        "seconds": took,
        "prompt_tokens": asked,
        "tokens_of_first_turn": len(answer.prompt_token_ids) + len(answer.token_ids),
        "cached_tokens": scheduler.prefix_hit_tokens - known,
    }


def _long_message(loaded: LoadedModel, num_tokens: int, run: int) -> str:
    """A message of about `num_tokens` tokens, another one for each run."""
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    turns = [turn for line in lines for turn in json.loads(line)["turns"]]
    turns = turns[run * 7 % len(turns) :] + turns
    ids = loaded.tokenizer.encode("\n".join(turns))[:num_tokens]
    return loaded.tokenizer.decode(ids)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=1000, help="of the first turn, about")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--speculative-config", default="null", metavar="JSON")
    parser.add_argument("--output", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
