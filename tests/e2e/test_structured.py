"""Structured answers of the real model: valid JSON for every schema, the same whatever drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from foredraft import LLM, SamplingParams, StructuredOutputs
from foredraft.kernels.catalog import native_available
from foredraft.models.load import load_model

TEXT = {"type": "string", "maxLength": 12}
SCHEMAS = {
    "person": {"name": TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
    "tags": {
        "tags": {"type": "array", "maxItems": 2, "items": {"enum": ["new", "used", "ümlaut"]}}
    },
    "nested": {
        "inner": {
            "type": "object",
            "properties": {
                "ok": {"type": "boolean"},
                "note": {"type": ["string", "null"], "maxLength": 9},
            },
            "required": ["ok", "note"],
            "additionalProperties": False,
        }
    },
}


def schema_of(name: str) -> dict[str, object]:
    properties = SCHEMAS[name]
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


@pytest.mark.slow
def test_answers_are_valid_and_equal_plain_decodings(smollm2_path: Path) -> None:
    # Without a compiler the reference kernels run: slow, so only the shortest answer.
    names = list(SCHEMAS) if native_available() else ["tags"]
    loaded = load_model(smollm2_path, num_threads=2)
    plain = LLM(loaded)
    prompts = [loaded.tokenizer.encode_prompt(f"A {name} as JSON: ") for name in names]
    for temperature, method in ((0.0, "ngram"), (0.8, "grammar")):
        params = [
            SamplingParams(
                temperature=temperature,
                seed=seed,
                max_tokens=80,
                structured_outputs=StructuredOutputs(
                    json=schema_of(name), disable_any_whitespace=True
                ),
            )
            for seed, name in enumerate(names)
        ]
        want = plain.generate(prompts, params)
        for name, output in zip(names, want, strict=True):
            assert output.finish_reason == "stop"
            Draft202012Validator(schema_of(name)).validate(json.loads(output.text))
        got = LLM(loaded, speculative_config={"method": method}).generate(prompts, params)
        assert [o.token_ids for o in got] == [o.token_ids for o in want]
        assert sum(o.metrics.speculative_decoding.num_accepted_draft_tokens for o in got) > 0
