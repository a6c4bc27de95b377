"""`foredraft bench serve --url` against our own server, which asks for a key."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from foredraft import AsyncEngine
from foredraft.cli.main import main
from foredraft.models.load import LoadedModel

from .rig import NAME, serving


def test_our_server_is_measured_as_any_other(
    loaded: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload, keys = tmp_path / "prompts.jsonl", tmp_path / "keys"
    lines = [{"id": word, "task": "chat", "turns": [f"{word} {word}"]} for word in ("ab", "cd")]
    workload.write_text("".join(json.dumps(line) + "\n" for line in lines))
    load = ("--max-tokens", "12", "--requests", "4", "--rounds", "1", "--concurrency", "1,3")
    engine = AsyncEngine(loaded, speculative_config={"method": "ngram"})
    with serving(engine, api_keys=("secret",)) as running:
        command = ["bench", "serve", NAME, "--url", running.url, "--workload", str(workload), *load]
        assert main(command) == 2
        assert "answered 401" in capsys.readouterr().err
        keys.write_text("secret\n")
        assert main([*command, "--api-key-file", str(keys), "--json"]) == 0
        text = capsys.readouterr().out
        running.wait_until_free()
    asyncio.run(engine.close())
    assert "secret" not in text
    points = json.loads(text)["points"]
    assert [(point["label"], point["concurrency"]) for point in points] == [
        ("server", 1), ("server", 3)
    ]  # fmt: skip
    for point in points:
        assert point["tokens"] > point["requests_ended"] >= 4
        assert point["mean_acceptance_length"] >= 1.0
        assert point["ttft_ms"]["p50"] > 0


def test_a_key_needs_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = tmp_path / "prompts.jsonl"
    workload.write_text('{"id": "a", "task": "chat", "turns": ["a"]}\n')
    command = ["bench", "serve", "nowhere", "--workload", str(workload), "--api-key-file", "keys"]
    assert main(command) == 2
    assert "--api-key-file needs --url" in capsys.readouterr().err
