"""Files of n-gram tables: what is written is read, and what is broken is refused in one line."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.core.errors import ModelError
from foredraft.drafters.ngram_blend import NO_TEXT, BlendLimits
from foredraft.drafters.ngram_table_file import NgramTableFile, total_code, total_of
from foredraft.drafters.ngram_table_source import text_maker
from foredraft.testing.ngram_tables import counted, small_table

V = 50
TEXTS = [[1, 2, 3, 1, 2, 4, 1, 2, 3], [7, 1, 2, 3, 49], list(range(20)) * 2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    small_table(tmp_path / "t.ngrams", TEXTS, V)
    return tmp_path / "t.ngrams"


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[8:16], "little")
    return json.loads(data[16 : 16 + length]), data[16 + length :]


def rewrite(path: Path, header: Any, content: bytes, *, signed: bool = True) -> None:
    if signed and isinstance(header, dict):
        header = header | {"sha256": hashlib.sha256(content).hexdigest()}
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(b"FDNGRAM1" + len(text).to_bytes(8, "little") + text + content)


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        NgramTableFile.open(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_what_was_counted_is_found(path) -> None:
    table = NgramTableFile.open(path)
    levels = counted(TEXTS, 3)
    contexts = [[1], [1, 2], [3, 1, 2], [2, 3, 1], [9, 9], [49], [5, 6, 7, 8], [4, 0, 8]]
    for context in contexts:
        found = table.find(context)
        depth = 0
        while depth < min(3, len(context)):
            if tuple(reversed(context[len(context) - depth - 1 :])) not in levels[depth]:
                break
            depth += 1
        assert len(found) == depth
        for n, each in enumerate(found, start=1):
            counts = levels[n - 1][tuple(reversed(context[len(context) - n :]))]
            assert each.total == counts.total()
            assert set(each.tokens) <= set(counts)
            for token, share in zip(each.tokens, each.shares, strict=True):
                assert share == max(1, 255 * counts[token] // each.total)
            assert list(each.shares) == sorted(each.shares, reverse=True)


@given(st.integers(0, 2**40))
def test_codes_hold_totals_to_an_eighth(total: int) -> None:
    code = total_code(total)
    assert 0 <= code <= 255
    if code < 255:
        assert total_of(code) <= total < total_of(code + 1)
        assert total - total_of(code) <= total / 8


def test_a_large_vocabulary_has_wider_ids(tmp_path) -> None:
    texts = [[70_000, 5, 70_001, 70_000, 5]]
    table = small_table(tmp_path / "w.ngrams", texts, 100_000)
    assert table.find([70_000, 5])[1].tokens == [70_001]
    text = text_maker(table)()
    made = text.draft(table, 0, [70_000, 5], BlendLimits(1, 0.0), None, NO_TEXT)
    assert made.tokens == [70_001]


def changed(name: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda header: header | {name: value}


HEADERS = {
    "lacks fields or has unknown": lambda h: {k: v for k, v in h.items() if k != "target"},
    "has unknown ones: .'more'": changed("more", 1),
    "vocab_size 0": changed("vocab_size", 0),
    "vocab_size True": changed("vocab_size", True),
    "vocab_size 1e": changed("vocab_size", 1e300),
    "own_orders .2, 1": changed("own_orders", [2, 1]),
    "own_orders 5": changed("own_orders", 5),
    "own_orders .65": changed("own_orders", [65]),
    "sizes ..": changed("sizes", []),
    "sizes ..-1": changed("sizes", [[-1, 0]]),
    "sizes ..1, 2, 3": changed("sizes", [[1, 2, 3]]),
    "sizes ..4294967296": changed("sizes", [[2**32, 1]]),
    "sizes": changed("sizes", [[1, 1]] * 9),
    "its header asks for": changed("sizes", [[2**31, 2**31]] * 8),
    "target 5": changed("target", 5),
    "provenance": changed("provenance", {"a": 1}),
    "no JSON object": lambda h: [h],
    "it has .* bytes": changed("own_orders", [1]),
    "an id is too large": changed("vocab_size", 30),
}


@pytest.mark.parametrize("message", HEADERS)
def test_hostile_headers_are_refused(path, message) -> None:
    header, content = parts(path)
    rewrite(path, HEADERS[message](header), content)
    assert message.startswith("it has") or refused(path)
    with pytest.raises(ModelError, match=message):
        NgramTableFile.open(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{" * 5000, "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b'{"a": 1, "a": 2}', "appears twice"),
        (b"[" * 60_000, "no JSON"),
        (b" " * 70_000, "header has 70000 bytes"),
        (b"", "header has 0 bytes"),
    ],
    ids=["braces", "bytes", "twice", "deep", "long", "empty"],
)
def test_headers_that_are_none_are_refused(path, header, message) -> None:
    rewrite(path, header, parts(path)[1])
    assert message in refused(path)


def test_other_files_are_refused(path, tmp_path) -> None:
    data = path.read_bytes()
    for content in (b"", b"GGUF" + data[4:], data[:-1], data + b"\0" * 8, data[:20], b"FDNGRAM1"):
        path.write_bytes(content)
        refused(path)
    refused(tmp_path / "none.ngrams")
    refused(tmp_path)
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    assert "pipe" in refused(fifo)


def test_content_that_was_changed_is_refused(path) -> None:
    header, content = parts(path)
    rewrite(path, header, bytes([content[0] ^ 1]) + content[1:], signed=False)
    assert "checksum" in refused(path)


ARRAYS = {
    "weights": "a weight is no number",
    "tokens": "siblings don't rise",
    "next_starts": "points outside",
    "child_starts": "points outside",
}


@pytest.mark.parametrize("name", ARRAYS)
def test_signed_arrays_that_lie_are_refused(path, name) -> None:
    """A checksum proves nothing: what the arrays say is checked."""
    table = NgramTableFile.open(path)
    header, content = parts(path)
    array = table.weights if name == "weights" else getattr(table.levels[0], name)
    at = array.ctypes.data - table.weights.ctypes.data
    value = np.float32("nan") if name == "weights" else array.dtype.type(array.max() + 1)
    spoilt = array.copy()
    spoilt[0 if name == "weights" else len(array) // 2] = value
    spoilt = spoilt[::-1].copy() if name == "tokens" else spoilt
    rewrite(path, header, content[:at] + spoilt.tobytes() + content[at + array.nbytes :])
    assert ARRAYS[name] in refused(path)


def test_a_file_that_changes_under_a_reader_is_never_left(path) -> None:
    """The compiled reader follows no offset that it has not checked."""
    table = NgramTableFile.open(path)
    make = text_maker(table)
    with path.open("r+b") as file:
        start = path.stat().st_size - len(parts(path)[1]) + 4 * len(table.weights)
        size = path.stat().st_size
        file.seek(start)
        file.write(b"\xff" * (size - start))
    for text in ([1], [1, 2], [49], list(range(20)), [65_535], [65_535] * 6):
        one = make()
        one.draft(table, 0, text, BlendLimits(4, 0.0, True), None, NO_TEXT)
