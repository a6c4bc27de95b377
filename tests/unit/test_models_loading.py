"""Loading is strict: what is missing, unknown or of the wrong shape or kind is named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft import LLM
from foredraft.core.errors import ConfigError, ModelError
from foredraft.kernels.catalog import native_available
from foredraft.models.load import load_model
from foredraft.models.weights import expected_shapes
from foredraft.testing.models import write_tiny_checkpoint

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
Change = Callable[[dict[str, Tensor]], Any]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path)


def change_tensors(directory: Path, change: Change) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_a_loaded_model_tells(checkpoint: Path) -> None:
    loaded = load_model(checkpoint, kernels="reference")
    count = sum(torch.Size(s).numel() for s in expected_shapes(loaded.config).values())
    assert loaded.weight_bytes == 4 * count
    assert (loaded.name, loaded.path) == (str(checkpoint), checkpoint)
    assert (loaded.dtype, loaded.device) == (torch.float32, torch.device("cpu"))
    assert loaded.eos_ids == loaded.config.eos_token_ids == (1,)
    assert load_model(checkpoint, dtype="float64", kernels="reference").dtype == torch.float64


BAD_TENSORS: dict[str, tuple[Change, str]] = {
    "missing": (lambda t: t.pop(Q_PROJ), f"missing tensor {Q_PROJ}"),
    "several missing": (lambda t: [t.pop(k) for k in list(t) if "mlp" in k], "and 3 more"),
    "unknown": (lambda t: t.update(surplus=torch.zeros(1)), "unknown tensor surplus"),
    "bias not in the config": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
        "unknown tensor model.layers.0.self_attn.q_proj.bias",
    ),
    "shape": (
        lambda t: t.update({Q_PROJ: torch.zeros(32, 31)}),
        f"tensor {Q_PROJ} has shape [32, 31], expected [32, 32]",
    ),
    "kind": (
        lambda t: t.update({Q_PROJ: torch.zeros(32, 32, dtype=torch.int8)}),
        f"tensor {Q_PROJ} has dtype int8, expected one of float32",
    ),
}


@pytest.mark.parametrize("kind", BAD_TENSORS)
def test_wrong_tensors_are_named(checkpoint: Path, kind: str) -> None:
    change, complaint = BAD_TENSORS[kind]
    change_tensors(checkpoint, change)
    with pytest.raises(ModelError) as caught:
        load_model(checkpoint)
    assert complaint in str(caught.value)
    assert str(checkpoint) in str(caught.value)


def test_frequencies_kept_by_old_checkpoints_are_left_out(checkpoint: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(checkpoint, lambda t: t.update({name: torch.zeros(4)}))
    load_model(checkpoint)


def test_a_copied_head_must_be_a_copy(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(tmp_path, lambda t: t.update({"lm_head.weight": embedding.clone()}))
    load_model(tmp_path)
    change_tensors(tmp_path, lambda t: t.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(ModelError, match=r"lm_head\.weight differs from the embedding") as caught:
        load_model(tmp_path)
    assert str(tmp_path) in str(caught.value)
    change_tensors(tmp_path, lambda t: t.pop("model.embed_tokens.weight"))
    with pytest.raises(ModelError, match=r"missing tensor model\.embed_tokens\.weight"):
        load_model(tmp_path)


def shard(directory: Path) -> Path:
    """The checkpoint in two files; returns the index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    table = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(table.values()):
        save_file({n: tensors[n] for n in names if table[n] == file}, directory / file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": table}))
    return index


def test_shards_that_disagree_with_their_index(checkpoint: Path) -> None:
    index = shard(checkpoint)
    load_model(checkpoint)
    table = json.loads(index.read_text())["weight_map"]
    for changed, complaint in (
        (table | {"surplus": "part-0.safetensors"}, "surplus is not in part-0.safetensors"),
        (table | {"surplus": "part-9.safetensors"}, "part-9.safetensors is missing"),
        (
            {name: file for name, file in table.items() if name != Q_PROJ},
            f"does not list {Q_PROJ}, found in part-",
        ),
        (table | {"surplus": "../part-0.safetensors"}, "not a plain file name"),
        ([1], "weight_map is not an object"),
    ):
        index.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(ModelError) as caught:
            load_model(checkpoint)
        assert complaint in str(caught.value)


def test_damaged_and_missing_files(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    raw = weights.read_bytes()
    for damaged in (raw[: len(raw) // 2], b"", b"\xff" * 64, raw[:4]):
        weights.write_bytes(damaged)
        with pytest.raises(ModelError, match="not readable as safetensors"):
            load_model(checkpoint)
    weights.unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        load_model(checkpoint)
    (checkpoint / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match="pickled weights"):
        load_model(checkpoint)


def test_a_directory_that_is_no_model_says_what_it_lacks(tmp_path: Path) -> None:
    for directory in (tmp_path, Path(os.path.relpath(tmp_path))):
        with pytest.raises(ModelError) as caught:
            load_model(directory)
        assert f"the directory {tmp_path} has no config.json" in str(caught.value)
        assert "tokenizer.json and model.safetensors" in str(caught.value)
    (tmp_path / "x.gguf").touch()
    with pytest.raises(ModelError, match=r"give the \.gguf file itself"):
        load_model(tmp_path)


def test_adapters_are_refused(checkpoint: Path) -> None:
    (checkpoint / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"adapter_config\.json: adapters are refused"):
        load_model(checkpoint)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; expected 'llama'"),
        ({"model_type": 3}, "model_type is 3; expected a string"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8'; expected one of float32"),
        ({"dtype": 3}, "dtype is 3; expected one of float32"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"num_key_value_heads": 3}, "cannot share 3 key/value heads"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "'ntk'"),
    ],
    ids=str,
)
def test_a_config_that_contradicts_itself_is_named_with_its_file(
    checkpoint: Path, changes: dict[str, Any], complaint: str
) -> None:
    change_json(checkpoint / "config.json", **changes)
    with pytest.raises(ModelError) as caught:
        load_model(checkpoint)
    assert complaint in str(caught.value)
    assert str(caught.value).count(str(checkpoint / "config.json")) == 1


def test_heads_that_the_native_kernels_cannot_read(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, head_dim=6)
    assert load_model(tmp_path).model.kernels.name == "reference"
    if native_available():
        with pytest.raises(ModelError, match="multiple of 8 up to 256, the model's is 6"):
            load_model(tmp_path, kernels="native")


def test_a_cache_dtype_that_the_kernels_cannot_read(checkpoint: Path) -> None:
    if native_available():
        with pytest.raises(ConfigError, match="auto, float32, bfloat16 on the native kernels"):
            LLM(checkpoint, kv_dtype="float64", kernels="native")
    LLM(checkpoint, kv_dtype="float64", kernels="reference", kv_cache_gib=0.01)


def test_a_template_that_does_not_compile_is_named_with_its_model(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ModelError, match="chat template does not compile") as caught:
        load_model(checkpoint)
    assert str(caught.value).startswith(str(checkpoint))


def test_a_template_file_must_be_text(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: not UTF-8 text"):
        load_model(checkpoint)


def test_tokenizer_files(checkpoint: Path) -> None:
    tokenizer = checkpoint / "tokenizer.json"
    text = tokenizer.read_text()
    tokenizer.write_text(text[:-40])
    with pytest.raises(ModelError, match="not a valid tokenizer"):
        load_model(checkpoint)
    tokenizer.unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_model(checkpoint)


def test_a_tokenizer_larger_than_the_vocabulary(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "a", vocab_size=40)
    write_tiny_checkpoint(tmp_path / "b", vocab_size=32)
    (tmp_path / "a" / "tokenizer.json").rename(tmp_path / "b" / "tokenizer.json")
    with pytest.raises(ModelError, match="the tokenizer has 40 tokens, the model 32"):
        load_model(tmp_path / "b")


def test_what_ends_a_generation(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    assert load_model(checkpoint).eos_ids == (1, 7)
    (checkpoint / "generation_config.json").unlink()
    change_json(checkpoint / "config.json", eos_token_id=None)
    assert load_model(checkpoint).eos_ids == (1,)  # the tokenizer's eos_token


def test_a_template_file_goes_before_the_one_in_the_settings(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = load_model(checkpoint).tokenizer
    assert tokenizer.render_chat([{"role": "user", "content": "abc"}]) == "abc"


def test_several_templates_by_name(checkpoint: Path) -> None:
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    change_json(checkpoint / "tokenizer_config.json", chat_template=templates)
    assert load_model(checkpoint).tokenizer.chat_template == "d"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"name_or_path": "no-such-model"}, "built-in names: gemma3-270m, smollm2-135m"),
        ({"name_or_path": __file__}, "is no .gguf file"),
        ({"dtype": "int8"}, "unknown dtype 'int8'; valid are auto, float32"),
        ({"kernels": "fast"}, "unknown kernels 'fast'"),
        ({"kernels": "native", "dtype": "float64"}, "native kernels compute in float32"),
        ({"kernels": None}, "unknown kernels None"),
        ({"dtype": torch.float32}, "unknown dtype torch.float32"),
        ({"dtype": []}, "unknown dtype []"),
        ({"device": "quantum"}, "device 'quantum' cannot be used; valid are cpu, cuda and cuda:N"),
        ({"device": "meta"}, "device 'meta' cannot be used; valid are cpu, cuda and cuda:N"),
        ({"device": None}, "device None cannot be used"),
        ({"num_threads": 0}, "num_threads must be an integer from 1 to 1024"),
        ({"num_threads": "2"}, "got '2'"),
        ({"num_threads": 2.0}, "got 2.0"),
        ({"num_threads": True}, "got True"),
        ({"num_threads": 10**12}, "num_threads must be an integer from 1 to 1024"),
        ({"name_or_path": None}, "a model must be a name, a path or a loaded model"),
        ({"name_or_path": b"x"}, "got b'x'"),
        ({"name_or_path": ""}, "model '' does not exist"),
        ({"name_or_path": "x" * 300}, "File name too long"),
        ({"name_or_path": "~no-such-user/x"}, "'~no-such-user/x': no such user"),
    ],
)
def test_arguments_that_cannot_be_honoured(
    checkpoint: Path, arguments: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(**({"name_or_path": checkpoint} | arguments))
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
