"""What the server's pages show works as it stands, against a tiny model."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from .test_serve import client_of, served

ROOT = Path(__file__).resolve().parents[2]
NAME = "smollm2-135m"


def _block(page: str, language: str, after: str) -> str:
    text = (ROOT / page).read_text()
    text = text[text.index(after) :]
    found = re.search(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_pages_examples_and_the_dashboards_names(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, request = _block("README.md", "", "### The server").replace("\\\n", "").splitlines()
    assert shlex.split(command) == ["foredraft", "serve", NAME]
    curl = shlex.split(request)
    config = tmp_path / "serve.toml"
    toml = _block("docs/server.md", "toml", "## The command")
    (tmp_path / "keys").write_text("none\n")
    toml = toml.replace('"keys"', json.dumps(str(tmp_path / "keys")))
    config.write_text(f'served_model_name = ["{NAME}"]\n{toml}'.replace("port = 8000\n", ""))
    with served(tiny, "--config", config) as (_, said):
        body = json.loads(curl[curl.index("-d") + 1])
        path = curl[1].removeprefix("http://127.0.0.1:8000")
        keys = {"authorization": "Bearer none"}
        answer = httpx.post(said["url"] + path, json=body, headers=keys, timeout=60)
        assert answer.json()["choices"][0]["message"]["role"] == "assistant"
        code = _block("docs/server.md", "python", "OpenAI's protocol")
        capsys.readouterr()
        exec(code.replace("http://127.0.0.1:8000", said["url"]))
        assert capsys.readouterr().out
        client: OpenAI = client_of(said)
        list(client.completions.create(model=NAME, prompt="ab ab", max_tokens=5, stream=True))
        metrics = httpx.get(f"{said['url']}/metrics", headers=keys, timeout=60).text
    dashboard = (ROOT / "docs" / "grafana.json").read_text()
    for name in set(re.findall(r"foredraft:[a-z0-9_]+", dashboard)):
        assert re.search(rf"^(# TYPE )?{name}[{{ ]", metrics, flags=re.MULTILINE), name
