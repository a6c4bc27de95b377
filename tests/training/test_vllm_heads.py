"""The comparison with vLLM, beside a stand-in that says what it was asked for."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from foredraft.models.fingerprint import fingerprint
from foredraft.models.heads.eagle3_checkpoint import save_eagle3
from foredraft.models.load import load_model
from foredraft.testing.models import write_tiny_checkpoint
from foredraft.training.begin import new_eagle3

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "vllm_heads.py"
STAND_IN = """
import json, os
from types import SimpleNamespace as Thing

__version__ = "9.9"
SamplingParams = Thing

class LLM:
    def __init__(self, **asked):
        with open(os.path.join(os.path.dirname(__file__), "asked.json"), "w") as file:
            json.dump(asked, file)

    def generate(self, prompts, params, use_tqdm):
        answer = Thing(outputs=[Thing(token_ids=[3] * params.max_tokens)])
        return [answer for prompt in prompts if prompt["prompt_token_ids"]]

    def get_metrics(self):
        stem = "vllm:spec_decode_num_"
        return [
            Thing(name=stem + "drafts", value=10), Thing(name="vllm:other", value=1),
            Thing(name=stem + "accepted_tokens_per_pos", values=[5, 2]),
        ]
"""


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("vllm_heads", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_engines_get_the_same_head_and_prompts(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    target = write_tiny_checkpoint(tmp_path / "target", seed=5, num_layers=8)
    loaded = load_model(target, dtype="float32")
    head = new_eagle3(loaded, fingerprint(target), None, seed=0, copied=True)
    save_eagle3(head, tmp_path / "head")
    lines = [{"id": f"{task}/{i}", "task": task, "turns": [f"say {task} {i}"]}
             for task in ("chat", "code", "math", "edit") for i in range(2)]  # fmt: skip
    workload = tmp_path / "prompts.jsonl"
    workload.write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "vllm.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    arguments = ["vllm_heads.py", str(target), "--vllm-python", sys.executable]
    arguments += ["--head", str(tmp_path / "head"), "--workload", str(workload), "--json"]
    arguments += ["--num-speculative-tokens", "2", "--max-tokens", "6", "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--prompts", "5"])
    script.main()
    result = json.loads(capsys.readouterr().out)
    assert result["prompts"] == ["chat/0", "code/0", "math/0", "chat/1", "code/1"]
    (run,) = result["runs"]
    assert run["vllm"] == {
        "drafts": 10,
        "mean_acceptance_length": 1.7,
        "acceptance_by_position": [0.5, 0.2],
    }
    ours = run["foredraft"]
    assert ours["drafts"] > 0
    assert ours["mean_acceptance_length"] == pytest.approx(1 + sum(ours["acceptance_by_position"]))
    assert run["ratio"] == pytest.approx(1.7 / ours["mean_acceptance_length"])
    asked = json.loads((tmp_path / "asked.json").read_text())
    assert asked["model"] == str(target)
    assert asked["speculative_config"]["method"] == "eagle3"
    assert asked["model_loader_extra_config"] == {}
    script.show(result)
    assert "ratio" in capsys.readouterr().out


def test_what_vllm_said_last_is_told(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text("raise RuntimeError('no such instruction')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    arguments = type("Arguments", (), {"vllm_python": sys.executable, "threads": 1})
    with pytest.raises(RuntimeError, match="no such instruction"):
        script.in_vllm(arguments, {"target": "x"})
