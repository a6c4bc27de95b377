"""GGUF files written byte by byte, right or wrong, so that readers can be shown both.

Knows the layout (ggml-org/ggml, docs/gguf.md) and a tiny Llama in it; checks nothing: counts,
lengths and places are written as they are given.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from foredraft.models.tokenizer import BYTE_OF_CHARACTER

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {
    U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B",
    U64: "Q", I64: "q", F64: "d",
}  # fmt: skip
TINY_TOKENS = (*BYTE_OF_CHARACTER, "he", "<eot>")


def pack(kind: int, *values: Any) -> bytes:
    """Numbers of a metadata type."""
    return struct.pack(f"<{len(values)}{_FORMATS[kind]}", *values)


def text(value: str | bytes) -> bytes:
    """A length and its characters."""
    raw = value.encode() if isinstance(value, str) else value
    return pack(U64, len(raw)) + raw


def scalar(kind: int, value: Any) -> bytes:
    """The value of a metadata entry, its type before it."""
    return pack(U32, kind) + _value(kind, value)


def array(kind: int, values: Sequence[Any], count: int | None = None) -> bytes:
    """A list as the value of a metadata entry, with the true count or another."""
    body = b"".join(_value(kind, value) for value in values)
    return pack(U32, ARRAY, kind) + pack(U64, len(values) if count is None else count) + body


def place(name: str | bytes, sizes: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    """An entry of the table of tensors; `sizes` has the columns first, `kind` 0 is float32."""
    where = pack(U32, kind) + pack(U64, offset)
    return text(name) + pack(U32, len(sizes)) + pack(U64, *sizes) + where


def gguf(
    entries: Sequence[bytes],
    places: Sequence[bytes],
    data: bytes = bytes(64),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_entries: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file of entries (`text(key) + value`) and places; counts are true unless given."""
    raw = magic + pack(U32, version)
    raw += pack(U64, len(places) if num_tensors is None else num_tensors)
    raw += pack(U64, len(entries) if num_entries is None else num_entries)
    raw += b"".join([*entries, *places])
    return raw + bytes(-len(raw) % alignment) + data


def tiny_llama(
    entries: Mapping[str, bytes | None] | None = None,
    tensors: Mapping[str, Sequence[int] | None] | None = None,
) -> bytes:
    """A Llama of one layer and zeros; entries and tensors' sizes changed, added or (None) left out.

    `{"llama.block_count": scalar(U32, 2)}` and `{"output_norm.weight": [32]}` are examples.
    """
    values = {**_ENTRIES, **(entries or {})}
    sizes = {f"{name}.weight": size for name, size in _SIZES.items()} | dict(tensors or {})
    places, offset = [], 0
    for name, size in sizes.items():
        if size is not None:
            places.append(place(name, size, offset=offset))
            offset += -(-4 * math.prod(size) // 32) * 32
    written = [text(key) + value for key, value in values.items() if value is not None]
    return gguf(written, places, bytes(offset))


def _value(kind: int, value: Any) -> bytes:
    return text(value) if kind == STRING else pack(kind, value)


_ENTRIES: Mapping[str, bytes | None] = {
    "general.architecture": scalar(STRING, "llama"),
    "llama.embedding_length": scalar(U32, 32),
    "llama.block_count": scalar(U32, 1),
    "llama.feed_forward_length": scalar(U32, 64),
    "llama.attention.head_count": scalar(U32, 4),
    "llama.attention.head_count_kv": scalar(U32, 2),
    "llama.attention.layer_norm_rms_epsilon": scalar(F32, 1e-5),
    "llama.context_length": scalar(U32, 64),
    "llama.rope.freq_base": scalar(F32, 1e4),
    "tokenizer.ggml.model": scalar(STRING, "gpt2"),
    "tokenizer.ggml.pre": scalar(STRING, "gpt-2"),
    "tokenizer.ggml.tokens": array(STRING, TINY_TOKENS),
    "tokenizer.ggml.token_type": array(I32, [1] * (len(TINY_TOKENS) - 1) + [3]),
    "tokenizer.ggml.merges": array(STRING, ["h e"]),
    "tokenizer.ggml.eos_token_id": scalar(U32, len(TINY_TOKENS) - 1),
}
_SIZES = {
    "token_embd": [32, len(TINY_TOKENS)], "output_norm": [32], "output": [32, len(TINY_TOKENS)],
    "blk.0.attn_norm": [32], "blk.0.attn_q": [32, 32], "blk.0.attn_k": [32, 16],
    "blk.0.attn_v": [32, 16], "blk.0.attn_output": [32, 32], "blk.0.ffn_norm": [32],
    "blk.0.ffn_gate": [32, 64], "blk.0.ffn_up": [32, 64], "blk.0.ffn_down": [64, 32],
}  # fmt: skip
