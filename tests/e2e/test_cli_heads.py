"""Learned drafters that are damaged or another target's, met by the real commands: one line, exit
code 2, and nothing of the work begun.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from foredraft.cli.main import main
from foredraft.models.fingerprint import fingerprint
from foredraft.models.heads.eagle3_checkpoint import save_eagle3
from foredraft.models.heads.medusa_checkpoint import save_medusa
from foredraft.models.load import load_model
from foredraft.testing.models import write_tiny_checkpoint
from foredraft.training.begin import new_eagle3, new_medusa

# A tensor of each that isn't square.
TENSORS = {
    "eagle3": "lm_head.weight",
    "medusa": "lm_heads.1.weight",
    "draft_model": "model.layers.0.mlp.up_proj.weight",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More tokens than a hidden state has numbers, so that no vocabulary head is square."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("target"), vocab_size=48)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of the same sizes and of another vocabulary."""
    directory = tmp_path_factory.mktemp("other")
    return write_tiny_checkpoint(directory, seed=9, vocab_size=50)


@pytest.fixture(scope="module")
def drafters(target: Path, other: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sound ones, by method; of another target's under `other`."""
    root = tmp_path_factory.mktemp("drafters")
    loaded = load_model(target, kernels="reference", dtype="float32")
    for place, sha256 in (("own", fingerprint(target)), ("other", fingerprint(other))):
        save_eagle3(new_eagle3(loaded, sha256, None, seed=0, copied=False), root / place / "eagle3")
        heads = new_medusa(loaded, sha256, None, num_heads=2, num_layers=1, shared_head=False)
        save_medusa(heads, root / place / "medusa")
    for place, model in (("own", target), ("other", other)):
        directory = root / place / "draft_model"
        assert main(["export", str(model), str(directory), "--layers", "1"]) == 0
    return root


def damaged(source: Path, directory: Path, method: str, damage: str) -> None:
    shutil.copytree(source / method, directory)
    file, name = directory / "model.safetensors", TENSORS[method]
    tensors = load_file(file)
    tensor = tensors.pop(name)
    if damage == "renamed":
        tensors[f"{name}s"] = tensor
    else:
        assert tensor.shape[0] != tensor.shape[1]
        tensors[name] = tensor.T.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("method", "damage", "words"),
    [
        ("eagle3", "renamed", "missing tensor lm_head.weight"),
        ("eagle3", "transposed", "tensor lm_head.weight is bfloat16"),
        ("eagle3", "another target's", "the head was trained for another target"),
        ("medusa", "renamed", "missing tensor lm_heads.1.weight"),
        ("medusa", "transposed", "tensor lm_heads.1.weight is bfloat16"),
        ("medusa", "another target's", "the head was trained for another target"),
        ("draft_model", "renamed", "model.layers.0.mlp.up_proj.weight"),
        ("draft_model", "transposed", "model.layers.0.mlp.up_proj.weight"),
        ("draft_model", "another target's", "vocabular"),
    ],
)
def test_a_damaged_drafter_is_refused_by_every_command(
    method: str,
    damage: str,
    words: str,
    target: Path,
    drafters: Path,
    workload: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Reported fault 73: elsewhere such heads were loaded, and accepted nothing."""
    directory = tmp_path / "drafter"
    if damage == "another target's":
        directory = drafters / "other" / method
    else:
        damaged(drafters / "own", directory, method, damage)
    config = json.dumps({"method": method, "model": str(directory)})
    capsys.readouterr()
    for command in (
        ["generate", str(target), "hello"],
        ["bench", "decode", str(target), "--workload", str(workload)],
        ["certify", str(target)],
    ):
        assert main([*command, "--speculative-config", config]) == 2, command
        written = capsys.readouterr()
        assert written.out == ""
        assert written.err.count("\n") == 1
        assert words in written.err


@pytest.mark.parametrize("method", TENSORS)
def test_a_sound_one_is_taken(
    method: str, target: Path, drafters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.dumps({"method": method, "model": str(drafters / "own" / method)})
    prompt = ["generate", str(target), "hello", "--max-tokens", "8", "--ignore-eos"]
    assert main([*prompt, "--speculative-config", config, "--json"]) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    assert output["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
