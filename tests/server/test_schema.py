"""Requests made from the served OpenAPI document, valid and not: answers are as it says."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator

import pytest
import schemathesis
import schemathesis.engine
from schemathesis.config import SchemathesisConfig
from schemathesis.engine.events import FatalError, NonFatalError, ScenarioFinished

from foredraft import AsyncEngine
from foredraft.testing.models import tiny_model

from .rig import PATIENCE, Running, serving

KEY = "fuzz"
EXAMPLES = int(os.environ.get("FOREDRAFT_SCHEMA_EXAMPLES", "15"))  # drawn for each path
# What is valid by its types may contradict itself, or be more than this model holds.
REFUSED_THOUGH_VALID = ("400", "413", "429")


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    """Short answers: a request without a limit ends with the context."""
    loaded = tiny_model(3, sharpness=4.0, max_positions=48, num_threads=1)
    engine = AsyncEngine(loaded, speculative_config={"method": "ngram"}, max_queued=16)
    with serving(engine, api_keys=(KEY,)) as running:
        yield running
        running.wait_until_free()
    asyncio.run(engine.close())


CONFIG = {
    "seed": 8,
    "request-timeout": PATIENCE,
    "auth": {"openapi": {"bearer": {"bearer": KEY}}},
    "generation": {"deterministic": True, "max-examples": EXAMPLES, "database": "none"},
    "phases": {"stateful": {"enabled": False}},
    "checks": {
        # 501 is what the path for embeddings is there to say.
        "not_a_server_error": {"expected-statuses": ["2xx", "4xx", "501"]},
        "positive_data_acceptance": {"expected-statuses": ["2xx", "501", *REFUSED_THOUGH_VALID]},
    },
}


def test_answers_are_as_the_document_says(small: Running) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    schema = schemathesis.openapi.from_url(
        f"{small.url}/openapi.json", config=SchemathesisConfig.from_dict(CONFIG), headers=headers
    )
    wrong, asked = [], Counter[str]()
    for event in schemathesis.engine.from_schema(schema).execute():
        if isinstance(event, NonFatalError | FatalError):
            pytest.fail(str(event))
        if isinstance(event, ScenarioFinished):
            asked[event.label or ""] += len(event.recorder.interactions)
            wrong += _failures(event)
    assert wrong == []
    assert len(asked) >= 11
    assert min(asked.values()) > 0


def _failures(event: ScenarioFinished) -> list[str]:
    found = []
    for checks in event.recorder.checks.values():
        for each in checks:
            if each.failure_info is not None:
                info = each.failure_info
                found.append(f"{event.label}: {info.failure} {info.code_sample}")
    return found
