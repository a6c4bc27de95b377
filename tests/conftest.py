"""What several folders of tests share: the real model, fetched once into the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from foredraft.models.registry import pull


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file."""
    return pull("smollm2-135m")
