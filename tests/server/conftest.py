"""One engine and one server for most tests: a tiny random model that looks up n-grams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from foredraft import AsyncEngine
from foredraft.models.load import LoadedModel
from foredraft.testing.models import tiny_model

from .rig import Running, serving


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    return tiny_model(3, sharpness=4.0, max_positions=512, num_threads=1)


@pytest.fixture(scope="session")
def server(loaded: LoadedModel) -> Iterator[Running]:
    engine = AsyncEngine(loaded, speculative_config={"method": "ngram"}, max_queued=64)
    with serving(engine) as running:
        yield running
    asyncio.run(engine.close())


@pytest.fixture(scope="session")
def real_server(smollm2_path: Path) -> Iterator[Running]:
    """SmolLM2 with n-gram lookup, for what a random model can't do."""
    config = {"method": "ngram", "num_speculative_tokens": 4}
    engine = AsyncEngine(smollm2_path, speculative_config=config)
    with serving(engine) as running:
        yield running
    asyncio.run(engine.close())
