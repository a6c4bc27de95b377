"""A tokenizer.json made to harm never reaches the library that would panic or abort on it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from foredraft.models.tokenizer_json import read_tokenizer_json
from foredraft.testing.models import write_tiny_checkpoint


def llama_like() -> Backend:
    """Every part that the supported families use."""
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "▁", "a", "b", "▁a"])}
    backend = Backend(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.Digits(True)]
    )
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return backend


def test_a_good_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    llama_like().save(str(path))
    assert read_tokenizer_json(path) == path.read_text()
    assert Backend.from_str(read_tokenizer_json(path)).encode("a b").tokens[0] == "<s>"
    write_tiny_checkpoint(tmp_path / "tiny")
    read_tokenizer_json(tmp_path / "tiny" / "tokenizer.json")


def bpe(**changes: Any) -> dict[str, Any]:
    return {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []} | changes}


def replace(content: str, pattern: str = "a") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def template(special: str, **tokens: list[Any]) -> dict[str, Any]:
    described = {name: {"id": name, "ids": ids, "tokens": [name]} for name, ids in tokens.items()}
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": special, "type_id": 0}}],
        "pair": [],
        "special_tokens": described,
    }


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    # These end the process, or panic, in the library itself.
    "a character map that claims much": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="}},
        "normalizer: Precompiled is not supported",
    ),
    "a character map inside": (
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Sequence", "normalizers": [{"precompiled_charsmap": ""}]}
                ],
            }
        },
        "normalizer: Precompiled is not supported",
    ),
    "a template of a token nobody describes": (
        {"post_processor": template("<none>")},
        "post_processor: token '<none>' is not described",
    ),
    # These give ids that the model has no row for.
    "a template of an id outside": (
        {"post_processor": template("<s>", **{"<s>": [99999]})},
        "post_processor: token id 99999 is not in the vocabulary",
    ),
    "a template of ids that are none": (
        {"post_processor": template("<s>", **{"<s>": ["x"]})},
        "post_processor: token id 'x' is not in the vocabulary",
    ),
    "an end outside": (
        {"post_processor": {"type": "RobertaProcessing", "sep": ["x", 2**31], "cls": ["y", 1]}},
        "token id 2147483648 is not in the vocabulary",
    ),
    # These grow what they are given.
    "a long prefix": (
        {"normalizer": {"type": "Prepend", "prepend": "x" * 10**6}},
        "normalizer: puts in 1000000 characters, at most 32 fit",
    ),
    "twice as much, forty times": (
        {"normalizer": {"type": "Sequence", "normalizers": [replace("aa")] * 40}},
        "normalizer: puts in 80 characters",
    ),
    "twice as much, forty times, when decoded": (
        {"decoder": {"type": "Sequence", "decoders": [replace("aa")] * 40}},
        "decoder: puts in 80 characters",
    ),
    "something everywhere": (
        {"normalizer": replace("x", pattern="")},
        "normalizer: an empty pattern is everywhere",
    ),
    "a long template": (
        {"post_processor": {**template("<s>"), "single": [{"Sequence": {"id": "A"}}] * 9999}},
        "post_processor: single has 9999 pieces, at most 16 fit",
    ),
    "a long control token": (
        {"added_tokens": [{"id": 1, "content": "x" * 9999, "special": True}]},
        r"added token 'x+\.\.\.x+' has 9999 characters, expected 1 to 512",
    ),
    "a control token of nothing": (
        {"added_tokens": [{"id": 1, "content": "", "special": True}]},
        "added token '' has 0 characters",
    ),
    # These fail at the first text.
    "an unknown token that is unknown": (bpe(unk_token="?"), r"unk_token '\?' is not in the voc"),
    "an unknown token that is a list": (bpe(unk_token=["a"]), r"unk_token \['a'\] is not in the"),
    "no unknown token where one is needed": (
        bpe(type="WordLevel"),
        "unk_token None is not in the vocabulary",
    ),
    "no unknown piece": (bpe(type="Unigram", unk_id=None, vocab=[]), "model: unk_id is missing"),
}

RAW: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a valid tokenizer"),
    "a list": (b"[]", r"it is \[\], expected a JSON object"),
    "no text": (b'{"\xff": 1}', r"not UTF-8 text \(byte 2\)"),
    "lists without end": (b"[" * 100_000, "not a valid tokenizer"),
    "a number without end": (b'{"model":' + b"9" * 5000 + b"}", "not a valid tokenizer"),
    "a key twice": (b'{"model": {}, "model": {}}', "'model' appears twice"),
    "two of a token": (b'{"model": {"vocab": {"a": 0, "a": 1}}}', "'a' appears twice"),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokenizer.json"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", CHANGES)
def test_what_would_harm_is_refused(path: Path, refusal: Callable[..., str], kind: str) -> None:
    changes, complaint = CHANGES[kind]
    path.write_text(json.dumps(json.loads(llama_like().to_str()) | changes))
    refusal(path, complaint, read_tokenizer_json)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", RAW)
def test_what_is_no_tokenizer_is_refused(
    path: Path, refusal: Callable[..., str], kind: str
) -> None:
    raw, complaint = RAW[kind]
    path.write_bytes(raw)
    refusal(path, complaint, read_tokenizer_json)


@pytest.mark.parametrize(
    ("part", "value"),
    [(p, v) for p in ("added_tokens", "normalizer", "decoder", "post_processor", "model")
     for v in (None, 7, "x", [], [1], {}, [[{}]], {"single": 1, "ids": {}, "sep": "x"})],
)  # fmt: skip
def test_parts_of_other_types_are_left_to_the_library(path: Path, part: str, value: Any) -> None:
    path.write_text(json.dumps({part: value}))
    assert json.loads(read_tokenizer_json(path)) == {part: value}


@pytest.mark.timeout(60)
def test_a_pipe_is_never_waited_for(path: Path, refusal: Callable[..., str]) -> None:
    os.mkfifo(path)
    refusal(path, "is a pipe, expected a regular file", read_tokenizer_json)


@pytest.mark.timeout(60)
def test_a_sparse_file_is_not_read_to_its_end(path: Path, refusal: Callable[..., str]) -> None:
    path.touch()
    os.truncate(path, 2**40)
    refusal(path, "larger than 134217728 bytes", read_tokenizer_json)
