"""Mean acceptance length of several drafters on the benchmark's prompts, at several temperatures.

    python benchmarks/acceptance.py --task chat --task code --task math --temperature 0 \
        --temperature 1 --output benchmarks/results/acceptance.json

Counts, not times: prompts run many at once, and a busy machine changes nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foredraft import LLM, SamplingParams
from foredraft.bench.decode import label_of
from foredraft.bench.provenance import provenance
from foredraft.bench.workload import Item, read_workload, select
from foredraft.models.load import LoadedModel, load_model

WORKLOAD = Path(__file__).parent / "data" / "bench.jsonl"
LENGTH = 3  # of all drafts
CONFIGS: tuple[dict[str, Any], ...] = (
    {"method": "ngram_table", "ngram_table_tree": False, "ngram_table_min_token_prob": 0.0},
    {"method": "ngram_table", "ngram_table_min_token_prob": 0.0},
    {"method": "eagle3", "draft_sample_method": "greedy"},
    {"method": "eagle3", "draft_sample_method": "greedy", "draft_tree": "top_k"},
    {"method": "blended", "blended_min_gain": 0},
    {"method": "blended"},
)


def counted(
    loaded: LoadedModel,
    config: Mapping[str, Any],
    items: Sequence[Item],
    params: SamplingParams,
    at_once: int,
) -> dict[str, Any]:
    """The counts of one drafter over all prompts."""
    llm = LLM(loaded, speculative_config=config, seed=0, max_num_seqs=at_once)
    chats = [[{"role": "user", "content": item.turns[0]}] for item in items]
    outputs = llm.chat(chats, params)
    kept: list[int] = []
    for output in outputs:
        counts = output.metrics.speculative_decoding
        histogram = () if counts is None else counts.acceptance_histogram
        kept += [0] * max(0, len(histogram) - len(kept))
        for number, steps in enumerate(histogram):
            kept[number] += steps
    drafts = max(1, sum(kept))
    return {
        "label": label_of(config["method"], config),
        "temperature": params.temperature,
        "drafts": sum(kept),
        "mean_acceptance_length": 1 + sum(n * steps for n, steps in enumerate(kept)) / drafts,
        "acceptance_by_position": [sum(kept[n:]) / drafts for n in range(1, len(kept))],
        "tokens_per_step": sum(len(each.token_ids) for each in outputs)
        / sum(each.metrics.num_steps for each in outputs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Mean acceptance length of several drafters.")
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--workload", type=Path, default=WORKLOAD)
    parser.add_argument("--task", action="append", help="may be repeated (default: all)")
    parser.add_argument("--limit-per-task", type=int)
    parser.add_argument("--temperature", type=float, action="append", help="may be repeated")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--speculative-config", type=json.loads, action="append")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    loaded = load_model(arguments.model)
    items = select(
        read_workload(arguments.workload), arguments.task or (), arguments.limit_per_task
    )
    runs: list[dict[str, Any]] = []
    for temperature in arguments.temperature or [0.0]:
        params = SamplingParams(max_tokens=arguments.max_tokens, temperature=temperature)
        for config in arguments.speculative_config or CONFIGS:
            config = {"num_speculative_tokens": LENGTH, **config}
            runs.append(counted(loaded, config, items, params, arguments.at_once))
            print(json.dumps(runs[-1]), flush=True)
    result = {
        "kind": "acceptance",
        **provenance(),
        "model": loaded.name,
        "prompts": len(items),
        "tasks": list(dict.fromkeys(item.task for item in items)),
        "max_tokens": arguments.max_tokens,
        "runs": runs,
    }
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
