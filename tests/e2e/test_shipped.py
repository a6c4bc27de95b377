"""What comes with the package for SmolLM2: the answers it is made of, and drafters that draft."""

from __future__ import annotations

from pathlib import Path

import pytest

from foredraft import LLM, SamplingParams
from foredraft.bench.workload import read_workload
from foredraft.models.fingerprint import fingerprint
from foredraft.models.load import LoadedModel, load_model, open_files
from foredraft.training.answers import Answers

ROOT = Path(__file__).parents[2]


def test_they_are_the_models_own_and_none_is_to_a_benchmark_prompt(smollm2_path: Path) -> None:
    _, _, tokenizer = open_files(smollm2_path)
    answers = Answers.open(ROOT / "data" / "smollm2-135m-answers")
    assert answers.manifest.target_sha256 == fingerprint(smollm2_path)
    assert (len(answers), answers.num_answer_tokens) == (6228, 1204090)
    template = tokenizer.apply_chat_template
    asked = {
        tuple(template([{"role": "user", "content": item.turns[0]}]))
        for item in read_workload(ROOT / "benchmarks" / "data" / "bench.jsonl")
    }
    assert not asked & {tuple(each.prompt.tolist()) for each in answers}


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> LoadedModel:
    return load_model(smollm2_path)


@pytest.mark.parametrize("method", ["ngram_table", "eagle3", "blended"])
def test_a_drafter_that_comes_with_the_model_needs_no_option(
    method: str, smollm2: LoadedModel
) -> None:
    chat = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
    params = SamplingParams(max_tokens=32, temperature=0.0)
    (plain,) = LLM(smollm2, speculative_config=None).chat([chat], params)
    (output,) = LLM(smollm2, speculative_config={"method": method}).chat([chat], params)
    assert output.token_ids == plain.token_ids
    assert output.metrics.num_steps < plain.metrics.num_steps
