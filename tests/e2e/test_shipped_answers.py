"""The answers of which the shipped drafters are made: whole, the model's own, no benchmark's."""

from __future__ import annotations

from pathlib import Path

from foredraft.bench.workload import read_workload
from foredraft.models.fingerprint import fingerprint
from foredraft.models.load import open_files
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
