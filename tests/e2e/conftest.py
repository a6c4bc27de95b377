"""A tiny random model on disk for the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from foredraft.testing.models import write_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory with tokenizer and chat template."""
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(directory)
    return directory
