"""Heads for other engines: what each is told, what is complete, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foredraft.cli.main import main
from foredraft.core.errors import ModelError
from foredraft.models.fingerprint import fingerprint
from foredraft.models.heads.eagle3 import Eagle3
from foredraft.models.heads.eagle3_checkpoint import load_eagle3, save_eagle3
from foredraft.models.heads.medusa_checkpoint import load_medusa, save_medusa
from foredraft.models.heads.other_engines import export_head
from foredraft.models.load import LoadedModel, load_model
from foredraft.testing.models import write_tiny_checkpoint
from foredraft.training.begin import StoredWeights, new_eagle3, new_medusa

IDS = torch.tensor([1, 3, 4, 7, 30])
LAYERS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A target in which EAGLE's three depths rise: 2, 4, 5."""
    directory = write_tiny_checkpoint(tmp_path_factory.mktemp("deep"), num_layers=8)
    return load_model(directory, dtype="float32", kernels="reference")


@pytest.fixture
def eagle(deep: LoadedModel, tmp_path: Path) -> Path:
    head = new_eagle3(deep, fingerprint(deep.path), IDS, seed=0, copied=True)
    save_eagle3(head, tmp_path / "eagle")
    return tmp_path / "eagle"


@pytest.fixture
def medusa(deep: LoadedModel, tmp_path: Path) -> Path:
    sha256 = fingerprint(deep.path)
    heads = new_medusa(deep, sha256, IDS, num_heads=3, num_layers=1, shared_head=True)
    save_medusa(heads, tmp_path / "medusa")
    return tmp_path / "medusa"


def _config(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


def _with(head: Eagle3, **changes: Any) -> Eagle3:
    head.config = replace(head.config, **changes)
    return head


def test_vllm_is_told_the_depths(eagle: Path, deep: LoadedModel, tmp_path: Path) -> None:
    written = export_head(eagle, tmp_path / "out", "vllm", deep, 3)
    assert written.speculative_config == {
        "method": "eagle3",
        "model": str(tmp_path / "out"),
        "num_speculative_tokens": 3,
    }
    assert _config(tmp_path / "out")[LAYERS] == [2, 4, 5]
    before, after = (load_file(path / "model.safetensors") for path in (eagle, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    load_eagle3(tmp_path / "out", deep.config, target_sha256=fingerprint(deep.path))


def test_sglang_counts_what_leaves_a_layer(eagle: Path, deep: LoadedModel, tmp_path: Path) -> None:
    """EAGLE's own three are its default and told by silence; others are one less."""
    written = export_head(eagle, tmp_path / "out", "sglang", deep)
    values = _config(tmp_path / "out")
    assert LAYERS not in values
    assert LAYERS not in values["eagle_config"]
    assert "--speculative-num-draft-tokens 5" in " ".join(written.arguments)
    head = _with(load_eagle3(eagle), feature_layers=(1, 4, 6))
    save_eagle3(head, tmp_path / "other")
    export_head(tmp_path / "other", tmp_path / "out", "sglang", deep)
    assert _config(tmp_path / "out")["eagle_config"][LAYERS] == [0, 3, 5]


def test_a_head_for_anything_else_has_its_embedding(
    eagle: Path, deep: LoadedModel, tmp_path: Path
) -> None:
    export_head(eagle, tmp_path / "out", "hf", deep)
    head = load_eagle3(tmp_path / "out")
    tokens = torch.arange(deep.config.vocab_size)
    expected = deep.model.embed(tokens).to(torch.bfloat16).float()
    assert torch.equal(head.embed(tokens[None])[0], expected)


def test_medusa_heads_get_the_targets_vocabulary_head(
    medusa: Path, deep: LoadedModel, tmp_path: Path
) -> None:
    written = export_head(medusa, tmp_path / "out", "vllm", deep)
    assert written.speculative_config["num_speculative_tokens"] == 3
    assert written.arguments == (
        "--model-loader-extra-config",
        '{"enable_weights_track": false}',
    )
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    rows = StoredWeights(deep).head()[IDS].to(torch.bfloat16)
    assert torch.equal(tensors["lm_head.weight"], rows)
    assert tensors["token_map"].tolist() == IDS.tolist()
    assert _config(tmp_path / "out")["original_lm_head"] is True
    x = torch.randn(1, 4, deep.config.hidden_size)
    shared = load_medusa(medusa, deep.config, head=StoredWeights(deep).head())
    for one, other in zip(shared(x), load_medusa(tmp_path / "out")(x), strict=True):
        assert torch.allclose(one, other, atol=0.05)


@pytest.mark.parametrize(
    ("engine", "changes", "words"),
    [
        ("vllm", {"feature_layers": (2, 2, 1)}, "each depth once, lowest first"),
        ("sglang", {"feature_layers": (0, 2, 3)}, "can't tell a head the embedding"),
        ("sglang", {"norm_before_residual": True}, "norm_before_residual is not read by sglang"),
        ("vllm", {"norm_output": True}, "norm_output is not read by vllm"),
    ],
)
def test_what_an_engine_would_not_honour_is_refused(
    engine: str,
    changes: dict[str, Any],
    words: str,
    eagle: Path,
    deep: LoadedModel,
    tmp_path: Path,
) -> None:
    save_eagle3(_with(load_eagle3(eagle), **changes), tmp_path / "other")
    with pytest.raises(ModelError, match=words):
        export_head(tmp_path / "other", tmp_path / "out", engine, deep)
    assert not (tmp_path / "out").exists()


def test_vllm_reads_a_reduced_vocabulary_only_where_heads_share_it(
    deep: LoadedModel, tmp_path: Path
) -> None:
    sha256 = fingerprint(deep.path)
    own = new_medusa(deep, sha256, IDS, num_heads=2, num_layers=1, shared_head=False)
    save_medusa(own, tmp_path / "own")
    with pytest.raises(ModelError, match="only where all heads share it"):
        export_head(tmp_path / "own", tmp_path / "out", "vllm", deep)
    export_head(tmp_path / "own", tmp_path / "out", "hf", deep)
    whole = new_medusa(deep, sha256, None, num_heads=2, num_layers=1, shared_head=False)
    save_medusa(whole, tmp_path / "whole")
    assert export_head(tmp_path / "whole", tmp_path / "out", "vllm", deep).arguments == ()


def test_other_mistakes_are_named(
    eagle: Path, medusa: Path, deep: LoadedModel, loaded: LoadedModel, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(ModelError, match="SGLang runs no Medusa"):
        export_head(medusa, out, "sglang", deep)
    with pytest.raises(ModelError, match="4 drafts were asked for"):
        export_head(medusa, out, "vllm", deep, 4)
    with pytest.raises(ModelError, match="another target"):
        export_head(eagle, out, "vllm", loaded)
    with pytest.raises(ModelError, match="valid are vllm, sglang, hf"):
        export_head(eagle, out, "tgi", deep)


def test_the_command_says_how_to_draft(
    eagle: Path, deep: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["export", str(deep.path), str(tmp_path / "out"), "--head", str(eagle)]
    assert main([*arguments, "--to", "vllm", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["speculative_config"]["model"] == str(tmp_path / "out")
    assert main([*arguments, "--to", "sglang"]) == 0
    assert "draft with it: --speculative-algorithm EAGLE3" in capsys.readouterr().out
    for wrong, words in (
        ([], "say what to export"),
        (["--to", "vllm", "--layers", "1"], "give one of them"),
    ):
        assert main([*arguments, *wrong]) == 2
        assert words in capsys.readouterr().err
