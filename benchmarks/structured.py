"""Answers held to schemas, plain and under speculation: whether all are valid and equal, how fast
they are, what tokens that the grammar forces bring by themselves, and what masks cost.

Requests run one after the other, the configurations of a request in turns; decoding is measured
apart from the prompt. Every schema bounds its strings and lists, so that an answer can end.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from jsonschema import Draft202012Validator, ValidationError

from foredraft import LLM, RequestOutput, SamplingParams, StructuredOutputs
from foredraft.bench.provenance import provenance
from foredraft.grammar.compiler import compiler_of
from foredraft.models.load import LoadedModel, load_model

TEXT = {"type": "string", "maxLength": 24}
COUNT = {"type": "integer", "minimum": 0, "maximum": 9999}
SCHEMAS: Mapping[str, Any] = {
    "person": {"name": TEXT, "age": COUNT, "email": TEXT},
    "book": {"title": TEXT, "author": TEXT, "year": COUNT, "in_print": {"type": "boolean"}},
    "weather": {
        "city": TEXT,
        "temperature_celsius": COUNT,
        "conditions": {"enum": ["sunny", "cloudy", "rain", "snow"]},
    },
    "order": {
        "customer": {"type": "object", "properties": {"name": TEXT, "city": TEXT}},
        "items": {
            "type": "array",
            "maxItems": 2,
            "items": {"type": "object", "properties": {"product": TEXT, "quantity": COUNT}},
        },
        "paid": {"type": "boolean"},
    },
    "sentiment": {
        "sentiment": {"enum": ["positive", "neutral", "negative"]},
        "confidence_percent": COUNT,
        "explanation": {"type": "string", "maxLength": 60},
    },
}
CONFIGS: Mapping[str, Mapping[str, Any] | None] = {
    "plain": None,
    "grammar": {"method": "grammar", "num_speculative_tokens": 8},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
}


def closed(schema: Any) -> Any:
    """`schema` with every property required and no other allowed, in every object."""
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if schema.get("type") == "object":
        properties = {key: closed(value) for key, value in schema["properties"].items()}
        found |= {"properties": properties, "required": list(properties)}
        found["additionalProperties"] = False
    return found


def workload(count: int) -> list[tuple[str, Any, SamplingParams]]:
    """Prompts with their schemas, every other one greedy."""
    made = []
    for number in range(count):
        name = list(SCHEMAS)[number % len(SCHEMAS)]
        schema = closed({"type": "object", "properties": SCHEMAS[name]})
        structured = StructuredOutputs(json=schema, disable_any_whitespace=number % 3 > 0)
        prompt = f"Make up a {name}, number {number + 1}, and answer with one JSON object."
        params = SamplingParams(
            temperature=0.0 if number % 2 else 0.8,
            seed=number,
            max_tokens=240,
            structured_outputs=structured,
        )
        made.append((prompt, schema, params))
    return made


def mask_costs(loaded: LoadedModel, said: Sequence[tuple[SamplingParams, str]]) -> dict[str, float]:
    """Microseconds a mask, a fork and an accepted token take, along answers given."""
    compiler = compiler_of(loaded.tokenizer, loaded.config.vocab_size)
    spent: dict[str, list[float]] = {"mask": [], "fork": [], "accept": []}
    for params, text in said:
        structured = params.structured_outputs
        assert structured is not None
        matcher = compiler.compile(structured).matcher(loaded.eos_ids)
        for token in loaded.tokenizer.encode(text):
            times = [time.perf_counter()]
            matcher.mask()
            times.append(time.perf_counter())
            matcher.fork()
            times.append(time.perf_counter())
            if not matcher.accept(token):
                break
            times.append(time.perf_counter())
            for i, name in enumerate(spent):
                spent[name].append(1e6 * (times[i + 1] - times[i]))
    found = {f"{name}_median_us": round(median(each), 1) for name, each in spent.items()}
    return found | {f"{name}_mean_us": round(fmean(each), 1) for name, each in spent.items()}


def summary(outputs: Sequence[RequestOutput], plain: Sequence[RequestOutput]) -> dict[str, Any]:
    """Of one configuration, beside plain decoding."""

    def speed(each: Sequence[RequestOutput]) -> float:
        tokens = sum(o.metrics.num_generated_tokens - o.metrics.num_first_step_tokens for o in each)
        return tokens / sum(o.metrics.decode_seconds for o in each)

    def number(name: str) -> int:
        return sum(getattr(o.metrics.speculative_decoding, name) for o in outputs)

    drafted, accepted = number("num_draft_tokens"), number("num_accepted_draft_tokens")
    return {
        "tokens_per_second": round(speed(outputs), 2),
        "speedup": round(speed(outputs) / speed(plain), 3),
        "equal_to_plain": sum(a.text == b.text for a, b in zip(outputs, plain, strict=True)),
        "steps": sum(o.metrics.num_steps for o in outputs),
        "draft_tokens": drafted,
        "accepted": accepted,
        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
    }


def valid(output: RequestOutput, schema: Any) -> bool:
    """Whether an answer that came to its end is JSON that fits; one cut by length is not."""
    try:
        Draft202012Validator(schema).validate(json.loads(output.text))
    except (json.JSONDecodeError, ValidationError):
        return False
    return output.finish_reason == "stop"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    loaded = load_model(options.model, num_threads=options.num_threads)
    engines = {label: LLM(loaded, speculative_config=each) for label, each in CONFIGS.items()}
    requests = workload(options.requests)
    outputs: dict[str, list[RequestOutput]] = {label: [] for label in engines}
    for prompt, _, params in requests:
        ids = loaded.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        for label, engine in engines.items():
            outputs[label] += engine.generate([ids], params)
    said = [(p, o.text) for (_, _, p), o in zip(requests, outputs["plain"], strict=True)]
    runs = {}
    for label, each in outputs.items():
        runs[label] = {"speculative_config": CONFIGS[label]} | summary(each, outputs["plain"])
        fits = [valid(o, schema) for o, (_, schema, _) in zip(each, requests, strict=True)]
        runs[label]["valid"] = sum(fits)
    results = {
        "requests": len(requests),
        "schemas": list(SCHEMAS),
        "runs": runs,
        "masks": mask_costs(loaded, said),
    }
    written = json.dumps(
        {"kind": "structured", **provenance(), "model": loaded.name, **results}, indent=2
    )
    print(written)
    if options.out is not None:
        options.out.write_text(written + "\n")
    whole = all(run["valid"] == run["equal_to_plain"] == len(requests) for run in runs.values())
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
