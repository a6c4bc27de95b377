"""The replayed agent loop: its conversation, its windows, and a run on a tiny model."""

from __future__ import annotations

import argparse
import importlib.util
import json
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from foredraft.testing.models import write_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("agent_loop", ROOT / "benchmarks/agent_loop.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Words:
    """A tokenizer that keeps the messages."""

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        return list(messages)


def test_the_loop_is_twenty_turns_of_nearly_the_same_calls() -> None:
    loop = json.loads((ROOT / "benchmarks/data/agent-loop.json").read_text())
    assert len(loop["turns"]) == 20
    assert all(turn["assistant"].startswith('<tool name="') for turn in loop["turns"])
    files = [t["assistant"].splitlines() for t in loop["turns"] if "write_file" in t["assistant"]]
    assert len(files) == 16
    for before, after in pairwise(files):
        assert sum(a != b for a, b in zip(before, after, strict=True)) == 1


def test_every_turn_is_asked_with_the_last_ones_as_they_should_have_been() -> None:
    loop: dict[str, Any] = json.loads((ROOT / "benchmarks/data/agent-loop.json").read_text())
    module = script()
    asked: Any = module.prompts(Words(), loop, 3)
    assert len(asked) == 20
    roles = [message["role"] for message in asked[5]]
    assert roles == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert asked[5][4]["content"] == loop["turns"][3]["assistant"]
    assert asked[5][-1]["content"].startswith(loop["turns"][4]["result"])
    assert asked[5][-1]["content"].endswith(loop["turns"][5]["user"])


def test_it_measures_speed_and_ceiling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = script()
    path = tmp_path / "loop.json"
    turn = {"user": "ab", "assistant": "abab", "result": "ok"}
    path.write_text(json.dumps({"system": "s", "opening": [turn], "turns": [turn, turn]}))
    arguments = argparse.Namespace(
        model=str(write_tiny_checkpoint(tmp_path / "tiny", max_positions=1024)), loop=path,
        dtype="float32", repeats=1, speculative_config=[{"method": "suffix"}],
    )  # fmt: skip
    result = module.measure(arguments)
    assert result["turns"] == 2
    assert result["verify_cost"]["1"] == 1.0
    (run,) = result["runs"]
    assert run["identical_to_plain"] is True
    assert run["share_of_ceiling"] == pytest.approx(run["speedup"] / result["ceiling"]["speedup"])
    module.show(result)
    assert "of the ceiling" in capsys.readouterr().out
