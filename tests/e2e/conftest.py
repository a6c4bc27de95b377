"""A tiny random model on disk for the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft.testing.models import write_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory with tokenizer and chat template."""
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(directory)
    return directory


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    """Three prompts of two tasks."""
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"id": "a", "task": "chat", "turns": ["hello there"]},
        {"id": "b", "task": "edit", "turns": ["one two one two"]},
        {"id": "c", "task": "edit", "turns": ["abc abc abc"]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
