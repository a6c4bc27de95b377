"""A model's first layers on their own: the same numbers, the same tokens, nothing else touched."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from foredraft.core.errors import ModelError
from foredraft.kernels.catalog import native_available
from foredraft.kernels.interface import Segment
from foredraft.models import export
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import activation_dtype, new_cache
from foredraft.models.export import export_layers
from foredraft.models.hf_config import config_from_json, read_json
from foredraft.models.hf_writer import config_to_json
from foredraft.models.load import LoadedModel, load_model
from foredraft.models.rope import Divisors, Rope
from foredraft.models.tokenizer import Tokenizer
from foredraft.testing.models import random_weights, tiny_config, write_tiny_checkpoint

KERNELS = ["reference", "native"] if native_available() else ["reference"]
PROMPT = [(7 * i * i + 3 * i + 5) % 61 for i in range(40)]
MESSAGES = [
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "it is 1984"},
    {"role": "user", "content": "<s>no</s>"},
]
TOLERANCE = 1e-4
PAGE_SIZE, NUM_PAGES = 16, 4


@torch.inference_mode()
def first_layers(loaded: LoadedModel, num_layers: int, ids: list[int] = PROMPT) -> Tensor:
    """Logits behind that many layers and the final norm, for all of `ids`."""
    model, activation = loaded.model, activation_dtype(loaded.dtype)
    cache = new_cache(loaded.config, NUM_PAGES, PAGE_SIZE, activation, "cpu")
    plan = model.kernels.prepare([Segment(0, len(ids), (), range(NUM_PAGES))], PAGE_SIZE)
    return model.head(model.layers(0, num_layers, model.embed(ids), plan, cache)).logits


def assert_first_layers(
    source: Path, exported: Path, num_layers: int, *, kernels: str, dtype: str,
    ids: list[int] = PROMPT,
) -> None:  # fmt: skip
    target, draft = (load_model(p, kernels=kernels, dtype=dtype) for p in (source, exported))
    assert draft.config.num_layers == num_layers
    ours, expected = first_layers(draft, num_layers, ids), first_layers(target, num_layers, ids)
    assert torch.equal(ours, expected)
    if num_layers < target.config.num_layers:
        assert not torch.equal(ours, first_layers(target, num_layers + 1, ids))


@torch.inference_mode()
def assert_transformers_agrees(exported: Path, ids: list[int] = PROMPT) -> None:
    peer = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    loaded = load_model(exported, kernels="reference", dtype="float32")
    expected = peer(torch.tensor([ids])).logits[0]
    assert (first_layers(loaded, len(peer.model.layers), ids) - expected).abs().max() < TOLERANCE


def assert_same_tokenizer(ours: Tokenizer, expected: Tokenizer, texts: list[str]) -> None:
    assert ours.vocabulary == expected.vocabulary
    assert (ours.bos_id, ours.eos_ids) == (expected.bos_id, expected.eos_ids)
    assert ours.control_ids == expected.control_ids
    for text in texts:
        assert ours.encode(text) == expected.encode(text)
        assert ours.encode_prompt(text) == expected.encode_prompt(text)
        assert ours.encode_with_special(text) == expected.encode_with_special(text)
        assert ours.decode(ours.encode(text)) == expected.decode(expected.encode(text))
    assert ours.has_chat_template == expected.has_chat_template
    if expected.has_chat_template:
        assert ours.render_chat(MESSAGES) == expected.render_chat(MESSAGES)
        assert ours.apply_chat_template(MESSAGES) == expected.apply_chat_template(MESSAGES)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(
        tmp_path / "source", 3, num_layers=4, vocab_size=61, dtype="float32"
    )


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_layers", [1, 3, 4])
def test_logits_are_those_of_the_first_layers_to_the_bit(
    source: Path, tmp_path: Path, kernels: str, dtype: str, num_layers: int
) -> None:
    written = export_layers(source, tmp_path / "draft", num_layers)
    assert (written.num_layers, written.source_layers) == (num_layers, 4)
    assert_first_layers(source, written.directory, num_layers, kernels=kernels, dtype=dtype)


def test_a_directorys_tensors_and_files_are_copied_as_they_are(
    source: Path, tmp_path: Path
) -> None:
    for name in ("LICENSE", "generation_config.json", "special_tokens_map.json"):
        (source / name).write_text('{"eos_token_id": 1}')
    (source / "notes.txt").write_text("mine")
    written = export_layers(source, tmp_path / "new" / "draft", 2)
    before, after = (load_file(d / "model.safetensors") for d in (source, written.directory))
    assert set(after) == {
        n for n in before if not n.startswith(("model.layers.2", "model.layers.3"))
    }
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert written.num_parameters == sum(tensor.numel() for tensor in after.values())
    names = {file.name for file in written.directory.iterdir()}
    assert names == {file.name for file in source.iterdir()} - {"notes.txt"}
    for name in names - {"config.json", "model.safetensors"}:
        assert (written.directory / name).read_bytes() == (source / name).read_bytes()
    sizes = [file.stat().st_size for file in written.directory.iterdir()]
    assert written.num_bytes == sum(sizes)
    kept = read_json(source / "config.json") | {"num_hidden_layers": 2}
    assert read_json(written.directory / "config.json") == kept
    ours, expected = (load_model(d).tokenizer for d in (written.directory, source))
    assert_same_tokenizer(ours, expected, ["hello <s> there</s>"])
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["draft"]


def test_another_dtype_is_for_matrices_alone(source: Path, tmp_path: Path) -> None:
    written = export_layers(source, tmp_path / "draft", 2, dtype="bfloat16")
    tensors = load_file(written.directory / "model.safetensors")
    dtypes = {tensor.dim(): tensor.dtype for tensor in tensors.values()}
    assert dtypes == {1: torch.float32, 2: torch.bfloat16}
    assert read_json(written.directory / "config.json")["torch_dtype"] == "bfloat16"
    assert_first_layers(source, written.directory, 2, kernels="reference", dtype="bfloat16")


def test_shards_and_a_copied_head_become_one_file(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "source", vocab_size=61, tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    table = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(table.values()):
        save_file({n: t for n, t in tensors.items() if table[n] == file}, source / file)
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    written = export_layers(source, tmp_path / "draft", 1)
    assert not list(written.directory.glob("*part*")) + list(written.directory.glob("*index*"))
    assert_first_layers(source, written.directory, 1, kernels="reference", dtype="float32")
    assert_transformers_agrees(written.directory)


SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "pad_token_id": None,
    "eos_token_id": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.3, 2.0, 4.5],
    "long_factor": [2.0, 3.0, 5.0, 9.0],
    "original_max_position_embeddings": 64,
}
GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9}
FAMILIES: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama3": (LlamaForCausalLM, {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": (MistralForCausalLM, {"sliding_window": 11}),
    "qwen2": (
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1},
    ),
    "qwen2 with yarn": (Qwen2ForCausalLM, {"rope_parameters": YARN}),
    "qwen3": (Qwen3ForCausalLM, {"head_dim": 16, "attention_bias": True}),
    "phi3": (
        Phi3ForCausalLM,
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
    ),
    "gemma2": (Gemma2ForCausalLM, GEMMA),
    "gemma3": (
        Gemma3ForCausalLM,
        GEMMA | {"layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 8000.0, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        }},
    ),
}  # fmt: skip


def write_family(directory: Path, name: str) -> PreTrainedModel:
    """transformers' own checkpoint, random, with the tiny tokenizer."""
    write_tiny_checkpoint(directory, vocab_size=61)
    family, changes = FAMILIES[name]
    torch.manual_seed(3)
    model = family(family.config_class(**copy.deepcopy(SIZES | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model.eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_cut_for_us_and_for_transformers(tmp_path: Path, name: str) -> None:
    write_family(tmp_path / "source", name)
    written = export_layers(tmp_path / "source", tmp_path / "draft", 3)
    for kernels in KERNELS:
        assert_first_layers(
            tmp_path / "source", written.directory, 3, kernels=kernels, dtype="float32"
        )
    assert_transformers_agrees(written.directory)


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_a_written_config_is_the_model_for_transformers(tmp_path: Path, name: str) -> None:
    expected = write_family(tmp_path, name)(torch.tensor([PROMPT])).logits
    config = config_from_json(read_json(tmp_path / "config.json"), "config.json")
    values = config_to_json(config)
    assert config_from_json(values, "config.json") == config
    (tmp_path / "config.json").write_text(json.dumps(values))
    peer = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert (peer(torch.tensor([PROMPT])).logits - expected).abs().max() < 1e-6


# A tokenizer of SentencePiece's kind: specials, all bytes, pieces with scores.
PIECES = ["▁", *"helothr w", "he", "ll", "llo", "▁the", "▁he", "th", "re", "there"]
TOKENS = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *dict.fromkeys(PIECES),
]
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
DIVISORS = np.array([1.0, 1.7, 3.1, 8.0], np.float32)


def gguf_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Random weights as llama.cpp lays them out: rotated rows side by side."""
    tensors = {}
    for name, weight in random_weights(config, 5).items():
        part, _, kind = name.removeprefix("model.layers.").rpartition(".")
        index, _, rest = part.partition(".")
        block = f"blk.{index}." if index.isdecimal() else ""
        if part.endswith(("q_proj", "k_proj")):
            halves = weight.reshape(-1, 2, config.head_dim // 2, config.hidden_size)
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        tensors[f"{block}{GGUF_NAMES[rest if block else part]}.{kind}"] = weight.float()
    return tensors


def write_gguf(path: Path, **metadata: Any) -> Path:
    """A Llama of three layers: BOS before every prompt, a divisor for each frequency, Q8_0."""
    config = tiny_config(vocab_size=len(TOKENS), num_layers=3)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([-float(i) for i in range(len(TOKENS))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(TOKENS) - 259))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in metadata.items():
        getattr(writer, f"add_{name}")(value)
    for name, tensor in gguf_tensors(config).items():
        kind = gguf.GGMLQuantizationType.Q8_0 if tensor.dim() > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.add_tensor("rope_freqs.weight", DIVISORS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("stored", "loaded"),
    [("auto", "bfloat16"), ("float32", "float32"), ("float32", "bfloat16")],
)
def test_a_gguf_files_layers_are_the_same_to_the_bit(
    tmp_path: Path, kernels: str, stored: str, loaded: str
) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    written = export_layers(source, tmp_path / "draft", 2, dtype=stored)
    assert_first_layers(source, written.directory, 2, kernels=kernels, dtype=loaded)
    assert load_model(written.directory).config.rope == Rope(
        10000.0, Divisors(tuple(DIVISORS.tolist()))
    )


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_transformers_reads_a_gguf_files_layers(tmp_path: Path, stored: str) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    written = export_layers(source, tmp_path / "draft", 2, dtype=stored)
    tensors = load_file(written.directory / "model.safetensors")
    assert {t.dtype for t in tensors.values() if t.dim() == 2} == {getattr(torch, stored)}
    assert {t.dtype for t in tensors.values() if t.dim() == 1} == {torch.float32}
    assert_transformers_agrees(written.directory)


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("template", [None, "{{ bos_token }}{{ messages[0]['content'] }}"])
def test_a_gguf_files_tokenizer_is_the_same(
    tmp_path: Path, add_bos: bool, template: str | None
) -> None:
    metadata = {} if template is None else {"chat_template": template}
    source = write_gguf(tmp_path / "tiny.gguf", add_bos_token=add_bos, **metadata)
    written = export_layers(source, tmp_path / "draft", 1)
    ours, expected = (load_model(p, kernels="reference") for p in (written.directory, source))
    texts = ["hello there", " the  wörld\n", "", "<s>he</s>", "hello </s> there"]
    assert_same_tokenizer(ours.tokenizer, expected.tokenizer, texts)
    assert ours.eos_ids == expected.eos_ids == (2,)
    assert ours.config.bos_token_id == 1
    peer = AutoTokenizer.from_pretrained(written.directory)
    assert (peer.bos_token_id, peer.eos_token_id) == (1, 2)
    for text in texts[:2]:
        ids = expected.tokenizer.encode_prompt(text)
        assert peer.encode(text) == ids
        assert (ids[0] == 1) == add_bos
        assert peer.decode(ids, skip_special_tokens=True) == expected.tokenizer.decode(ids)
    pair = peer("he", "he").input_ids
    assert pair.count(1) == 2 * add_bos


SMOLLM2_TEXTS = [
    "Hello world", "The year 1984, and 3.14159.", "a1234 5 x007", "", "  spaces \n\n\tlines ",
    "it's WE'LL", "日本語 и русский", "🎉👩‍👩‍👧‍👦 ½ ²", "def f(x):\n    return x**2",
    "<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|>",
]  # fmt: skip


@pytest.mark.slow
def test_smollm2s_first_8_layers(smollm2_path: Path, tmp_path: Path) -> None:
    written = export_layers("smollm2-135m", tmp_path / "draft", 8)
    draft, target = (load_model(p, dtype="bfloat16") for p in (written.directory, smollm2_path))
    assert_same_tokenizer(draft.tokenizer, target.tokenizer, SMOLLM2_TEXTS)
    assert (draft.tokenizer.bos_id, draft.eos_ids) == (1, (2,))
    ids = target.tokenizer.apply_chat_template(MESSAGES)
    assert torch.equal(first_layers(draft, 8, ids), first_layers(target, 8, ids))
    assert written.num_parameters == 49152 * 576 + 8 * (576 * 6144 + 2 * 576) + 576
    assert draft.config.num_layers == 8
    assert_transformers_agrees(written.directory, ids)
    peer = AutoTokenizer.from_pretrained(written.directory)
    for text in SMOLLM2_TEXTS:
        assert peer.encode(text) == target.tokenizer.encode_with_special(text)
    assert peer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) == (
        target.tokenizer.render_chat(MESSAGES)
    )
    assert peer.special_tokens_map == {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>",
    }  # fmt: skip


@pytest.mark.parametrize("num_layers", [0, -1, 5])
def test_more_layers_than_there_are_is_an_error_with_the_range(
    source: Path, tmp_path: Path, num_layers: int
) -> None:
    with pytest.raises(ModelError) as caught:
        export_layers(source, tmp_path / "draft", num_layers)
    assert str(caught.value) == f"{source} has 4 layers; expected 1 to 4, got {num_layers}"
    assert not (tmp_path / "draft").exists()


def test_an_unknown_dtype_is_an_error(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'int8'; valid are auto, bfloat16, float32"):
        export_layers(source, tmp_path / "draft", 1, dtype="int8")


def test_models_that_cannot_be_used_are_named(source: Path, tmp_path: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    last = "model.layers.3.mlp.up_proj.weight"
    for changes, words in (
        ({last: None}, f"missing tensor {last}"),
        ({"surplus": torch.zeros(1)}, "unknown tensor surplus"),
        ({"model.norm.weight": torch.zeros(7)}, "has shape [7], expected [32]"),
        ({"model.norm.weight": torch.zeros(32, dtype=torch.int32)}, "has dtype int32"),
    ):
        changed = {k: v for k, v in (tensors | changes).items() if v is not None}
        save_file(changed, source / "model.safetensors")
        with pytest.raises(ModelError) as caught:
            export_layers(source, tmp_path / "draft", 1)
        assert words in str(caught.value)
        assert str(caught.value).startswith(str(source))
    (source / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="adapters are refused"):
        export_layers(source, tmp_path / "draft", 1)
    with pytest.raises(ModelError, match="'absent' does not exist"):
        export_layers("absent", tmp_path / "draft", 1)
    assert not (tmp_path / "draft").exists()


def test_a_config_that_no_file_can_say_is_refused_by_name() -> None:
    odd = tiny_config()
    with pytest.raises(ModelError, match=r"config\.json of LlamaForCausalLM cannot say head_norms"):
        config_to_json(replace(odd, head_norms=True))
    with pytest.raises(ModelError, match="of OtherForCausalLM cannot be written; supported are"):
        config_to_json(replace(odd, architecture="OtherForCausalLM"))


def test_the_licence_of_a_built_in_model_goes_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "GEMMA_TERMS.html").write_text("terms")
    monkeypatch.setattr(export, "resolve", lambda _: path)
    monkeypatch.setattr(export, "licence_path", lambda _: tmp_path / "GEMMA_TERMS.html")
    for name, copied in (("gemma3-270m", True), (str(path), False)):
        directory = export_layers(name, tmp_path / name.replace("/", "-"), 1).directory
        assert (directory / "GEMMA_TERMS.html").exists() == copied
        export_layers(name, directory, 2, force=True)
