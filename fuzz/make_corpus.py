"""Writes the seeds of both fuzz targets: small files of each kind that is read.

Run: python fuzz/make_corpus.py FOLDER
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import torch
from safetensors.torch import save

from foredraft.models.gguf_quants import BLOCKS, TYPE_NAMES
from foredraft.testing.gguf_bytes import (
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    STRING,
    U8,
    U16,
    U32,
    U64,
    array,
    gguf,
    place,
    scalar,
    text,
    tiny_llama,
)


def gguf_seeds() -> dict[str, bytes]:
    """By name: each type of value, each storage type, and a whole model."""
    values = {
        "u8": scalar(U8, 7), "i8": scalar(I8, -7), "u16": scalar(U16, 7), "i16": scalar(I16, -7),
        "u32": scalar(U32, 7), "i32": scalar(I32, -7), "u64": scalar(U64, 7),
        "i64": scalar(I64, -7), "f32": scalar(F32, 0.5), "f64": scalar(F64, 0.5),
        "bool": scalar(BOOL, 1), "text": scalar(STRING, "grüße"),
        "texts": array(STRING, ["a", "", "bc"]), "numbers": array(I32, [1, 2, 3]),
        "flags": array(BOOL, [0, 1]), "general.alignment": scalar(U32, 64),
    }  # fmt: skip
    seeds = {"metadata": gguf([text(key) + value for key, value in values.items()], [])}
    for kind, block in BLOCKS.items():
        size = 2 * block.values
        data = bytes(range(256)) * 2
        seeds[f"tensor-{TYPE_NAMES[kind]}"] = gguf([], [place("w", [size], kind)], data)
    pair = [place("a", [8], 0), place("b", [4, 2], 1, offset=32)]
    seeds["two-tensors"] = gguf([text("k") + scalar(U8, 1)], pair, bytes(64))
    seeds["version-2"] = gguf([], [], version=2)
    seeds["model"] = small_model()
    return seeds


def small_model() -> bytes:
    """A model of two kilobytes with a vocabulary of four tokens: it is read to its end."""
    tokens = ["h", "e", "he", "<eot>"]
    entries = {
        "llama.embedding_length": scalar(U32, 8),
        "llama.feed_forward_length": scalar(U32, 8),
        "llama.attention.head_count": scalar(U32, 2),
        "llama.attention.head_count_kv": scalar(U32, 1),
        "tokenizer.ggml.tokens": array(STRING, tokens),
        "tokenizer.ggml.token_type": array(I32, [1, 1, 1, 3]),
        "tokenizer.ggml.eos_token_id": scalar(U32, 3),
        "tokenizer.chat_template": scalar(STRING, "{{ messages[0].content }}<eot>"),
    }
    norms = {f"{name}.weight": [8] for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")}
    squares = ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    tensors = {f"blk.0.{name}.weight": [8, 8] for name in squares}
    tensors |= {f"blk.0.{name}.weight": [8, 4] for name in ("attn_k", "attn_v")}
    tensors |= {f"{name}.weight": [8, 4] for name in ("token_embd", "output")}
    return tiny_llama(entries, tensors | norms)


def safetensors_seeds() -> dict[str, bytes]:
    """By name: each type of tensor, scalars, metadata, and a header that is not padded."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool)
    mixed = {str(dtype): torch.ones(2, 3).to(dtype) for dtype in dtypes}
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    odd = json.dumps({"w": entry}).encode() + b" "
    return {
        "mixed": save(mixed),
        "scalar": save({"s": torch.tensor(1.0)}),
        "metadata": save({"w": torch.ones(2, 2)}, {"format": "pt"}),
        "layers": save({f"model.layers.{i}.w": torch.ones(4) for i in range(3)}),
        "not-padded": struct.pack("<Q", len(odd)) + odd + bytes(8),
        "no-tensors": struct.pack("<Q", 2) + b"{}",
    }


def main(folder: Path) -> None:
    for name, seeds in (("gguf", gguf_seeds()), ("safetensors", safetensors_seeds())):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for seed, raw in seeds.items():
            (folder / name / seed).write_bytes(raw)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
