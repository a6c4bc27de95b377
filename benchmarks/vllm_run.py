"""vLLM's side of `vllm_heads.py`: one run in vLLM's own environment, which foredraft isn't in.

`python vllm_run.py REQUEST ANSWER` reads a JSON file of what to run and writes one of what came of
it: token ids, seconds, and vLLM's own counters of speculative decoding.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

PREFIX = "vllm:spec_decode_num_"


def counters(engine: Any) -> dict[str, Any]:
    """vLLM's counters so far: drafts, draft_tokens, accepted_tokens, accepted_tokens_per_pos."""
    found = {}
    for metric in engine.get_metrics():
        if metric.name.startswith(PREFIX):
            name = metric.name.removeprefix(PREFIX)
            found[name] = metric.values if hasattr(metric, "values") else metric.value
    return found


def run(request: dict[str, Any]) -> dict[str, Any]:
    import vllm

    engine = vllm.LLM(
        model=request["target"],
        dtype=request["dtype"],
        max_model_len=request["max_model_len"],
        max_num_seqs=request["max_num_seqs"],
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=request["speculative_config"],
        model_loader_extra_config=request["model_loader_extra_config"],
    )
    params = vllm.SamplingParams(temperature=0.0, max_tokens=request["max_tokens"])
    start = time.perf_counter()
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    return {
        "version": vllm.__version__,
        "seconds": time.perf_counter() - start,
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "counters": counters(engine),
    }


if __name__ == "__main__":
    asked, answered = map(Path, sys.argv[1:])
    result = run(json.loads(asked.read_text(encoding="utf-8")))
    answered.write_text(json.dumps(result), encoding="utf-8")
