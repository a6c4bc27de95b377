"""Acceptance as `foredraft train eval` measures it on answers, and as a server's metrics show it
for the same prompts.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from foredraft import AsyncEngine
from foredraft.cli.main import main
from foredraft.models.fingerprint import fingerprint
from foredraft.models.load import LoadedModel
from foredraft.server.app import create_app
from foredraft.server.settings import ServerSettings
from foredraft.training.answers import Answers
from foredraft.training.begin import new_eagle3, new_medusa
from foredraft.training.eagle3 import Eagle3Student
from foredraft.training.medusa import MedusaStudent
from foredraft.training.student import Objective, Student
from foredraft.training.target import Target

from .conftest import HELD_OUT, MAX_TOKENS
from .test_acceptance import teach

WIDTH = 3
PREFIX = "foredraft:spec_decode_num_"


def student(method: str, loaded: LoadedModel, target: Target, answers: Answers) -> Student:
    """Taught a little, so that some of its drafts are right."""
    sha256 = fingerprint(loaded.path)
    made: Student
    if method == "eagle3":
        head = new_eagle3(loaded, sha256, None, seed=0, copied=True)
        made = Eagle3Student(head, target, WIDTH, Objective())
    else:
        heads = new_medusa(loaded, sha256, None, num_heads=WIDTH, num_layers=1, shared_head=False)
        made = MedusaStudent(heads, target, Objective())
    teach(made, answers)
    return made


def served(loaded: LoadedModel, config: dict[str, Any], answers: Answers) -> list[float]:
    """Accepted at each position, of all drafts, by the metrics after answering the prompts."""
    engine = AsyncEngine(loaded, speculative_config=config)
    client = TestClient(create_app(engine, ServerSettings(model_names=("tiny",))))
    for each in answers:
        body = {"model": "tiny", "prompt": each.prompt.tolist(), "temperature": 0,
                "max_tokens": MAX_TOKENS}  # fmt: skip
        answer = client.post("/v1/completions", json=body | {"return_token_ids": True})
        assert answer.json()["choices"][0]["token_ids"] == each.answer.tolist()
    text = client.get("/metrics").text
    asyncio.run(engine.close())
    drafts, accepted = 0.0, [0.0] * WIDTH
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"{PREFIX}drafts_total":
                drafts += sample.value
            elif sample.name == f"{PREFIX}accepted_tokens_per_pos_total":
                accepted[int(sample.labels["position"])] += sample.value
    return [each / drafts for each in accepted]


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_a_servers_metrics_show_what_eval_measured(
    method: str,
    loaded: LoadedModel,
    target: Target,
    answers: tuple[Answers, Answers],
    answers_directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Reported fault 74: within 0.02 at each position."""
    training, held_out = answers
    student(method, loaded, target, training).save(tmp_path / "head")
    command = ["train", "eval", str(tmp_path / "head"), "--data", str(answers_directory)]
    options = ["--held-out", str(HELD_OUT), "--num-speculative-tokens", str(WIDTH), "--json"]
    place = ["--dtype", "float32", "--kernels", "reference", "--threads", "1"]
    assert main([*command, *options, *place]) == 0
    offline = json.loads(capsys.readouterr().out)["acceptance_by_position"]
    config = {
        "method": method, "model": str(tmp_path / "head"), "num_speculative_tokens": WIDTH,
        "draft_tree": "none", "policy": "fixed",
    }  # fmt: skip
    assert served(loaded, config, held_out) == pytest.approx(offline, abs=0.02)
    assert offline[0] > 0.1
