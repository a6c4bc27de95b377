"""Streaming ids to text: the pieces together are the whole, none ends inside a character."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from foredraft.models.detokenizer import Detokenizer
from foredraft.models.gguf import GGUFFile
from foredraft.models.gguf_tokenizer import tokenizer_from_gguf
from foredraft.models.tokenizer import Tokenizer

WORDS = ["<s>", "</s>", "▁", "▁hello", "hello", "é", "▁▁", "日本"]


@pytest.fixture(scope="module")
def byte_level(smollm2_path: Path) -> Tokenizer:
    return tokenizer_from_gguf(GGUFFile(smollm2_path))


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """Llama 2's way: "▁" for spaces, single bytes as tokens, the first space dropped."""
    tokens = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>")]
    )
    return Tokenizer(backend)


def streamed(tokenizer: Tokenizer, pushes: list[list[int]], skip: bool) -> list[str]:
    stream = Detokenizer(tokenizer, skip)
    return [*(stream.push(ids) for ids in pushes), stream.finish()]


def pushes(vocab_size: int) -> st.SearchStrategy[list[list[int]]]:
    # Low ids are the control tokens and single bytes; ids at the end are unknown.
    token = st.one_of(st.integers(0, 272), st.integers(0, vocab_size + 3))
    return st.lists(st.lists(token, max_size=4), max_size=12)


@settings(deadline=None, max_examples=300)
@given(parts=pushes(49152), skip=st.booleans())
def test_pieces_are_the_whole_for_byte_level(
    byte_level: Tokenizer, parts: list[list[int]], skip: bool
) -> None:
    pieces = streamed(byte_level, parts, skip)
    assert "".join(pieces) == byte_level.decode(list(chain(*parts)), skip)


@settings(deadline=None, max_examples=300)
@given(parts=pushes(264), skip=st.booleans())
def test_pieces_are_the_whole_for_byte_fallback(
    byte_fallback: Tokenizer, parts: list[list[int]], skip: bool
) -> None:
    pieces = streamed(byte_fallback, parts, skip)
    assert "".join(pieces) == byte_fallback.decode(list(chain(*parts)), skip)


@settings(deadline=None, max_examples=200)
@given(text=st.text(st.characters(max_codepoint=0x2FFFF, categories=["L", "N", "P", "S", "Zs"])))
def test_no_piece_ends_inside_a_character(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    pieces = streamed(byte_level, [[token] for token in ids], True)
    assert "".join(pieces) == byte_level.decode(ids)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_bytes_of_a_character_wait_for_the_last(byte_fallback: Tokenizer) -> None:
    first = len(WORDS)
    sun = [[first + byte] for byte in "日".encode()]
    stream = Detokenizer(byte_fallback)
    assert [stream.push(ids) for ids in [*sun, [4]]] == ["", "", "", "日hello"]
    stream = Detokenizer(byte_fallback)
    assert stream.push([first + 0xE6]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_control_tokens_are_shown_on_demand(byte_level: Tokenizer) -> None:
    ids = [19556, 2]
    assert streamed(byte_level, [ids], True) == ["Hello", ""]
    assert streamed(byte_level, [ids], False) == ["Hello<|im_end|>", ""]
