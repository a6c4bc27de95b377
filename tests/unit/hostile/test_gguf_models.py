"""GGUF files of models that make no sense: one clear line for each, whatever they ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from foredraft.models.load import load_model
from foredraft.testing.gguf_bytes import (
    BOOL,
    F32,
    F64,
    I8,
    I32,
    STRING,
    TINY_TOKENS,
    U32,
    U64,
    array,
    scalar,
    tiny_llama,
)

INF, NAN = float("inf"), float("nan")
ALL_ONES = 2**64 - 1
Changes = tuple[dict[str, bytes | None], dict[str, list[int] | None]]


def of_key(key: str, value: bytes | None) -> Changes:
    prefix = "" if key.startswith(("general.", "tokenizer.")) else "llama."
    return {prefix + key: value}, {}


def of_tensor(name: str, sizes: list[int] | None) -> Changes:
    return {}, {f"{name}.weight": sizes}


# Well-formed containers of models that contradict themselves.
MODELS: dict[str, tuple[Changes, str]] = {
    "no architecture": (of_key("general.architecture", None), "architecture None is not supported"),
    "an architecture of numbers": (
        of_key("general.architecture", scalar(U32, 7)),
        "architecture 7",
    ),
    "an architecture that is a list": (
        of_key("general.architecture", array(STRING, ["llama"])),
        r"architecture \['llama'\]",
    ),
    "no width": (of_key("embedding_length", None), "embedding_length is missing"),
    "a width of 0": (of_key("embedding_length", scalar(U32, 0)), "embedding_length is 0; expected"),
    "a negative width": (of_key("embedding_length", scalar(I32, -32)), "embedding_length is -32"),
    "a width of all ones": (
        of_key("embedding_length", scalar(U64, ALL_ONES)),
        "is 18446744073709551615",
    ),
    "a width with a fraction": (of_key("embedding_length", scalar(F32, 32.5)), "is 32.5; expected"),
    "a width that is no number": (of_key("embedding_length", scalar(F64, NAN)), "is nan; expected"),
    "a width that is true": (
        of_key("embedding_length", scalar(BOOL, 1)),
        "is True; expected an integer",
    ),
    "a width of text": (
        of_key("embedding_length", scalar(STRING, "32\n")),
        r"is '32\\n'; expected",
    ),
    "a wrong width": (of_key("embedding_length", scalar(U32, 64)), r"has shape \[\d+"),
    "a long list of widths": (
        of_key("embedding_length", array(U32, [1] * 9999)),
        r"is \[1, 1.*\.\.\.",
    ),
    "a billion layers": (
        of_key("block_count", scalar(U32, 10**9)),
        "num_layers is 1000000000, at most",
    ),
    "one layer too many": (
        of_key("block_count", scalar(U32, 2)),
        r"missing tensors model\.layers\.1",
    ),
    "no heads": (of_key("attention.head_count", scalar(U32, 0)), "head_count is 0; expected"),
    "heads that share unevenly": (
        of_key("attention.head_count_kv", scalar(U32, 3)),
        "4 attention heads cannot share 3",
    ),
    "heads of another size for values": (
        of_key("attention.value_length", scalar(U32, 16)),
        "value_length is 16; expected 8",
    ),
    "an odd head": (of_key("attention.key_length", scalar(U32, 7)), "is 7"),
    "no epsilon": (of_key("attention.layer_norm_rms_epsilon", None), "epsilon is missing"),
    "an epsilon that is no number": (
        of_key("attention.layer_norm_rms_epsilon", scalar(F32, NAN)),
        "epsilon is nan; expected a finite",
    ),
    "a negative epsilon": (
        of_key("attention.layer_norm_rms_epsilon", scalar(F32, -1e-5)),
        "expected a finite number above 0",
    ),
    "an infinite base": (of_key("rope.freq_base", scalar(F32, INF)), "freq_base is inf; expected"),
    "a negative base": (
        of_key("rope.freq_base", scalar(F32, -1e4)),
        "freq_base is -10000.0; expected",
    ),
    "an unknown scaling": (of_key("rope.scaling.type", scalar(STRING, "x")), "scaling.type is 'x'"),
    "a scaling of 0": (
        (
            {
                "llama.rope.scaling.type": scalar(STRING, "linear"),
                "llama.rope.scaling.factor": scalar(F32, 0.0),
            },
            {},
        ),
        "scaling.factor is 0.0; expected",
    ),
    "a context of all ones": (
        of_key("context_length", scalar(U32, 2**32 - 1)),
        "is 4294967295, at most",
    ),
    "experts": (of_key("expert_count", scalar(U32, 8)), "expert_count is 8; expected 0"),
    "a key nobody knows": (of_key("attention.surprise", scalar(U32, 1)), "'attention.surprise'"),
    "another vocabulary": (of_key("vocab_size", scalar(U32, 9)), "vocab_size is 9; expected 258"),
    "no embedding": (of_tensor("token_embd", None), r"missing tensor token_embd\.weight"),
    "a flat embedding": (of_tensor("token_embd", [32]), "token_embd.weight of two dimensions"),
    "a missing tensor": (
        of_tensor("blk.0.ffn_up", None),
        "missing tensor model.layers.0.mlp.up_proj",
    ),
    "a tensor of another size": (
        of_tensor("blk.0.ffn_up", [32, 63]),
        r"has shape \[63, 32\], expected",
    ),
    "a tensor turned around": (
        of_tensor("blk.0.ffn_up", [64, 32]),
        r"has shape \[32, 64\], expected",
    ),
    "queries of too few rows": (of_tensor("blk.0.attn_q", [32, 16]), "has 16 rows, expected 32"),
    "a tensor nobody knows": (
        of_tensor("blk.0.surprise", [8]),
        "unknown tensor 'blk.0.surprise.weight'",
    ),
    "a layer with a sign": (
        of_tensor("blk.-1.ffn_up", [32, 64]),
        r"unknown tensor 'blk\.-1\.ffn_up",
    ),
    "a layer of other digits": (of_tensor("blk.\u0661.ffn_up", [32, 64]), "unknown tensor 'blk"),
    "a layer with a zero before": (of_tensor("blk.00.ffn_up", [32, 64]), "unknown tensor 'blk.00"),
    "no tokenizer": (
        of_key("tokenizer.ggml.model", None),
        "tokenizer.ggml.model is None; expected",
    ),
    "no tokens": (
        of_key("tokenizer.ggml.tokens", array(STRING, [])),
        "token_type needs one number",
    ),
    "tokens that are numbers": (
        of_key("tokenizer.ggml.tokens", array(U32, [1])),
        "no list of strings",
    ),
    "a token twice": (
        of_key("tokenizer.ggml.tokens", array(STRING, [*TINY_TOKENS[:-1], "he"])),
        "holds a token twice",
    ),
    "more tokens than rows": (
        (
            {
                "tokenizer.ggml.tokens": array(STRING, [*TINY_TOKENS, "more"]),
                "tokenizer.ggml.token_type": array(I32, [1] * 259),
            },
            {},
        ),
        "the tokenizer has 259 tokens, the model 258",
    ),
    "kinds that are no numbers": (
        of_key("tokenizer.ggml.token_type", array(F32, [NAN] * 258)),
        "holds a number outside 1..6",
    ),
    "too few kinds": (
        of_key("tokenizer.ggml.token_type", array(I32, [1])),
        "one number for each token",
    ),
    "a merge of nothing": (of_key("tokenizer.ggml.merges", array(STRING, [""])), "merges has ''"),
    "a merge of unknown tokens": (
        of_key("tokenizer.ggml.merges", array(STRING, ["x yz"])),
        "'x yz'",
    ),
    "merges that are numbers": (
        of_key("tokenizer.ggml.merges", array(I8, [1])),
        "no list of strings",
    ),
    "an end outside": (of_key("tokenizer.ggml.eos_token_id", scalar(U32, 258)), "258"),
    "a negative end": (
        of_key("tokenizer.ggml.eos_token_id", scalar(I32, -1)),
        "eos_token_id is -1",
    ),
    "an end that is true": (of_key("tokenizer.ggml.eos_token_id", scalar(BOOL, 1)), "is True"),
    "a beginning outside": (of_key("tokenizer.ggml.bos_token_id", scalar(U32, 999)), "999"),
    "a template that is a number": (
        of_key("tokenizer.chat_template", scalar(U32, 1)),
        "is no string",
    ),
    "a template that does not compile": (
        of_key("tokenizer.chat_template", scalar(STRING, "{% if\n %}")),
        "template does not compile",
    ),
    "a template a thousand deep": (
        of_key("tokenizer.chat_template", scalar(STRING, "{% if 1 %}" * 5000)),
        "chat template",
    ),
}


@pytest.mark.parametrize(
    "architecture",
    ["mamba", "mamba2", "rwkv7", "jamba", "falcon-h1", "granitehybrid", "lfm2", "qwen3next"],
)
def test_a_model_with_state_that_cannot_be_rolled_back_is_refused(
    tmp_path: Path, refusal: Callable[..., str], architecture: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_llama({"general.architecture": scalar(STRING, architecture)}))
    refusal(path, f"architecture '{architecture}' is not supported; supported are .*llama")


def test_state_that_cannot_be_rolled_back_inside_a_known_architecture_is_refused(
    tmp_path: Path, refusal: Callable[..., str]
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_llama({"llama.ssm.conv_kernel": scalar(U32, 4)}))
    refusal(path, "unknown metadata 'ssm.conv_kernel'")
    path.write_bytes(tiny_llama(None, {"blk.0.ssm_conv1d.weight": [4, 32]}))
    refusal(path, "unknown tensor 'blk.0.ssm_conv1d.weight'")


# What comes out long, and what would be computed before it is refused.
LENGTHS: dict[str, tuple[Changes, str]] = {
    "a long architecture": (of_key("general.architecture", scalar(STRING, "x" * 9999)), "'xxx"),
    "a long merge": (
        of_key("tokenizer.ggml.merges", array(STRING, ["x" * 9999])),
        "tokenizer.ggml.merges has 'xxx",
    ),
    "keys nobody knows, without end": (
        ({f"llama.k{i}": scalar(U32, 1) for i in range(9999)}, {}),
        "unknown metadata 'k0'",
    ),
    "a long list as an end": (
        of_key("tokenizer.ggml.eos_token_id", array(U32, [1] * 9999)),
        r"eos_token_id is \[1, 1",
    ),
    "a huge head": (
        of_key("attention.key_length", scalar(U64, 2**40)),
        "head_dim is 1099511627776",
    ),
    "frequencies divided by 0": (of_tensor("rope_freqs", [4]), "rope_freqs"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", LENGTHS)
def test_a_message_stays_short_and_nothing_is_computed_first(
    tmp_path: Path, refusal: Callable[..., str], kind: str
) -> None:
    (entries, sizes), complaint = LENGTHS[kind]
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_llama(entries, sizes))
    refusal(path, complaint)


def test_the_model_that_these_changes_spoil_loads(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(tiny_llama())
    load_model(tmp_path / "model.gguf", kernels="reference")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_makes_no_sense_is_refused(
    tmp_path: Path, refusal: Callable[..., str], kind: str
) -> None:
    (entries, sizes), complaint = MODELS[kind]
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_llama(entries, sizes))
    refusal(path, complaint)
