"""`--memory` and what `foredraft info` says of capacity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft.cli.main import main
from foredraft.testing.models import write_tiny_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_info_says_how_many_requests_run_at_once(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = write_tiny_checkpoint(tmp_path / "draft", 3, num_layers=2)
    config = json.dumps({"model": str(draft), "num_speculative_tokens": 2})
    given = ["--memory", "0.0009GiB", "--speculative-config", config]
    assert main(["info", str(tiny), *given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    facts, memory, speculation = (found[key] for key in ("capacity", "memory", "speculation"))
    taken = (
        memory["weight_bytes"] + memory["cache_limit_bytes"]
        + speculation["draft_weight_bytes"] + speculation["draft_cache_limit_bytes"]
    )  # fmt: skip
    assert taken <= 0.0009 * 2**30 < taken + 2 * memory["page_bytes"]
    assert facts["prompt_tokens"] + facts["answer_tokens"] == 256
    assert facts["without_preemption"] <= facts["requests_at_once"] < facts["without_speculation"]
    assert facts["limit"] == "pages"
    requests, without = facts["requests_at_once"], facts["without_speculation"]
    assert f"; {requests} requests of 224 + 32 tokens at once (" in facts["in_a_line"]
    assert f"{without} without speculation" in facts["in_a_line"]


@pytest.mark.parametrize("command", [["generate"], ["info"]])
@pytest.mark.parametrize(("asked", "words"), [("lots", "must be a number"), ("200%", "'200%'")])
def test_a_budget_that_is_none_is_refused_before_anything_is_fetched(
    command: list[str], asked: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*command, "no-such-model", "--memory", asked]
    assert main([*arguments, "hello"] if command == ["generate"] else arguments) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1


def test_too_little_memory_is_one_line(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tiny), "hello", "--memory", "0.00001"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("foredraft: memory '0.00001' (10.5 KiB) is too little: the target's")
    assert message.count("\n") == 1
