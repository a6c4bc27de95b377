"""safetensors files and indexes made to harm: one clear line for each, whatever they claim."""

from __future__ import annotations

import json
import os
import socket
import struct
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from foredraft.models.safetensors_weights import SafetensorsWeights

GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DATA = bytes(8)


def file_of(header: Any, data: bytes = DATA, length: int | None = None) -> bytes:
    """`header` as JSON, or bytes as they are, behind its length or another."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def of(**changes: Any) -> bytes:
    """A file of one tensor `w`, its entry changed; None leaves a key out."""
    return file_of({"w": {k: v for k, v in (GOOD | changes).items() if v is not None}})


def pair(first: tuple[int, int], second: tuple[int, int], data: int = 16) -> bytes:
    """A file of bytes: tensors `a` and `b` at the given places."""
    places = {"a": first, "b": second}
    return file_of(
        {
            n: {"dtype": "U8", "shape": [e - s], "data_offsets": [s, e]}
            for n, (s, e) in places.items()
        },
        bytes(data),
    )


def zipped() -> bytes:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
    return buffer.getvalue()


ENTRY = b'{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "its 0 bytes are too few for a header"),
    "seven bytes": (bytes(7), "its 7 bytes are too few for a header"),
    "only zeros": (bytes(64), "its header is not valid JSON"),
    "only ones": (b"\xff" * 64, "a header of 18446744073709551615 bytes does not fit"),
    "a header beyond the end": (file_of({}, b"", 10**6), "a header of 1000000 bytes does not fit"),
    "a header of 2^63 bytes": (file_of({}, b"", 2**63), "of 9223372036854775808 bytes does not"),
    "a header too long": (
        file_of(b"{}" + b" " * 2**24),
        "its header has 16777224 bytes, at most 16777216 fit",
    ),
    "a header cut short": (file_of({"w": GOOD}, b"", 40), "its header is not valid JSON"),
    "a zip archive": (zipped(), "it is a zip archive, as torch.save writes; pickled"),
    "a pickle": (b"\x80\x04\x95" + bytes(60), "it is a pickle; pickled weights are not read"),
    "a GGUF file": (b"GGUF\x03" + bytes(60), "it is a GGUF file; name it .gguf"),
    "a Git LFS pointer": (
        b"version https://git-lfs.example/spec/v1\noid sha256:0\nsize 1\n",
        "it is a Git LFS pointer; fetch the file itself",
    ),
    "an HTML page": (b"<!DOCTYPE html><html><body>Sign in", "it is an HTML page"),
    "a gzip archive": (b"\x1f\x8b\x08" + bytes(40), "it is a gzip archive"),
    "no JSON": (file_of(b"tensors: none"), "its header is not valid JSON"),
    "a list": (file_of([]), r"its header is \[\], expected a JSON object"),
    "a number": (file_of(b"7"), "its header is 7, expected a JSON object"),
    "UTF-16": (file_of('{"w": 1}'.encode("utf-16")), "its header is not valid JSON"),
    "bytes that are no text": (file_of(b'{"\xff": 1}'), "its header is not valid JSON"),
    "lists without end": (file_of(b"[" * 100_000), "its header is not valid JSON"),
    "objects without end": (file_of(b'{"a":' * 100_000), "its header is not valid JSON"),
    "deep but closed": (file_of({"w": [[[[[[[[[[1]]]]]]]]]]}), r"tensor w has \[\[\[.*\.\.\."),
    "a number without end": (file_of(b'{"w": ' + b"9" * 5000 + b"}"), "not valid JSON"),
    "a tensor twice": (file_of(b'{"w":' + ENTRY + b',"w":' + ENTRY + b"}"), "'w' appears twice"),
    "a key twice": (
        file_of(b'{"w":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}}'),
        "'shape' appears twice",
    ),
    "a tensor without a name": (file_of({"": GOOD}), "a tensor is called ''; expected"),
    "a name of two lines": (file_of({"a\nb": GOOD}), r"a tensor is called 'a\\nb'"),
    "a name that turns text around": (file_of({"a\u202eb": GOOD}), r"called 'a\\u202eb'"),
    "half a surrogate pair": (file_of(b'{"\\ud800":' + ENTRY + b"}"), r"called '\\ud800'"),
    "a long name": (file_of({"w" * 9999: GOOD}), r"called 'w+\.\.\.w+'; expected 1 to 255"),
    "no entry": (file_of({"w": None}), "tensor w has None, expected dtype, shape, data_offsets"),
    "a list as entry": (file_of({"w": [1, 2]}), r"tensor w has \[1, 2\], expected dtype"),
    "no type": (of(dtype=None), r"tensor w has \['shape', 'data_offsets'\], expected dtype"),
    "a surplus key": (of(strides=[1]), "tensor w has .*'strides'.*, expected dtype"),
    "an unknown type": (of(dtype="F128"), "tensor w has dtype 'F128', which is unknown"),
    "a type in small letters": (of(dtype="f32"), "tensor w has dtype 'f32', which is unknown"),
    "a type that is a list": (of(dtype=["F32"]), r"tensor w has dtype \['F32'\], which is unknown"),
    "a shape of text": (of(shape="2"), "tensor w has shape '2', expected integers"),
    "a shape that is a number": (of(shape=2), "tensor w has shape 2, expected integers"),
    "a negative size": (of(shape=[-2]), r"tensor w has shape \[-2\], expected integers from 0"),
    "a size with a fraction": (of(shape=[2.0]), r"tensor w has shape \[2\.0\], expected integers"),
    "a size that is true": (of(shape=[True, 2]), r"tensor w has shape \[True, 2\], expected"),
    "a size that is no number": (
        file_of(b'{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}'),
        r"tensor w has shape \[nan\], expected integers",
    ),
    "a huge size": (of(shape=[2**70]), r"tensor w has shape \[1180591620717411303424\], expected"),
    "a size of 0": (of(shape=[0], data_offsets=[0, 0]), "tensor w has a dimension of size 0"),
    "sizes whose product overflows": (
        of(shape=[2**33, 2**33]),
        r"tensor w of shape \[8589934592, 8589934592\] and dtype F32 needs 2\.95\d*e\+20 bytes",
    ),
    "sizes whose product is small in 64 bits": (
        of(shape=[2**32, 2**32]),
        "its data_offsets give 8",
    ),
    "many dimensions": (of(shape=[1] * 9999 + [2]), "tensor w has 10000 dimensions, at most 8"),
    "a size that does not fit": (of(shape=[3]), r"\[3\] and dtype F32 needs 12 bytes, .* give 8"),
    "half a byte": (
        file_of({"w": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, bytes(1)),
        "needs 1.5 bytes, its data_offsets give 1",
    ),
    "no place": (of(data_offsets=[]), r"tensor w has data_offsets \[\], expected its first byte"),
    "three places": (of(data_offsets=[0, 8, 16]), r"has data_offsets \[0, 8, 16\], expected"),
    "a place turned around": (of(data_offsets=[8, 0]), r"has data_offsets \[8, 0\], expected"),
    "a negative place": (of(data_offsets=[-8, 0]), r"data_offsets \[-8, 0\], expected integers"),
    "a place of all ones": (of(data_offsets=[0, 2**64 - 1]), "expected integers from 0 to"),
    "data beyond the end": (
        file_of({"w": GOOD}, bytes(4)),
        "ends at byte 8 of the data, .* holds 4",
    ),
    "data that nobody owns": (file_of({"w": GOOD}, bytes(24)), "the last 16 bytes belong to no"),
    "no tensors but data": (file_of({}), "the last 8 bytes belong to no tensor"),
    "an overlap": (pair((0, 10), (8, 16)), "tensor b overlaps a"),
    "two in one place": (pair((0, 16), (0, 16)), "tensor b overlaps a"),
    "one inside another": (pair((0, 16), (4, 8)), "tensor b overlaps a"),
    "a hole": (pair((0, 4), (8, 16)), "4 bytes before tensor b belong to no tensor"),
    "a hole at the start": (pair((8, 12), (12, 16)), "8 bytes before tensor a belong to no tensor"),
    "metadata that is a list": (file_of({"__metadata__": [], "w": GOOD}), r"__metadata__ is \[\]"),
    "metadata of numbers": (
        file_of({"__metadata__": {"format": 1}, "w": GOOD}),
        "__metadata__ has 'format': 1, expected a string",
    ),
}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def read_directory_of(path: Path) -> object:
    return SafetensorsWeights(path.parent)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", FILES)
def test_a_broken_file_is_refused(weights: Path, refusal: Callable[..., str], kind: str) -> None:
    raw, complaint = FILES[kind]
    weights.write_bytes(raw)
    message = refusal(weights, complaint, read_directory_of)
    assert "not readable as safetensors" in message


def test_a_file_cut_or_lengthened_anywhere_is_refused(
    weights: Path, refusal: Callable[..., str]
) -> None:
    whole = save({"a": torch.ones(3, 5), "b": torch.ones(7, dtype=torch.bfloat16)})
    weights.write_bytes(whole)
    assert set(SafetensorsWeights(weights.parent)) == {"a", "b"}
    for size in range(len(whole)):
        weights.write_bytes(whole[:size])
        refusal(weights, "not readable as safetensors", read_directory_of)
    weights.write_bytes(whole + b"\0")
    refusal(weights, "the last 1 bytes belong to no tensor", read_directory_of)


def test_what_a_header_may_hold_is_read(weights: Path) -> None:
    scalar = {"dtype": "F32", "shape": [], "data_offsets": [8, 12]}
    weights.write_bytes(
        file_of({"__metadata__": {"format": "pt"}, "w": GOOD, "s": scalar}, bytes(12))
    )
    read = SafetensorsWeights(weights.parent)
    assert {name: tuple(read[name].shape) for name in read} == {"w": (2,), "s": ()}


@pytest.mark.parametrize("length", [640, 896, 1152, 1408, 35615])
def test_a_header_whose_length_begins_like_another_format_is_read(
    weights: Path, length: int
) -> None:
    """640 is 0x280, the first bytes of a pickle; 35615 those of gzip."""
    raw = json.dumps({"w": GOOD}).encode().ljust(length)
    weights.write_bytes(struct.pack("<Q", length) + raw + DATA)
    assert list(SafetensorsWeights(weights.parent)) == ["w"]


def test_a_tensor_at_an_odd_byte_is_moved_to_an_even_one(weights: Path) -> None:
    raw = json.dumps({"w": GOOD}).encode()
    raw += b" " * (1 + -len(raw) % 8)
    weights.write_bytes(struct.pack("<Q", len(raw)) + raw + struct.pack("<2f", 0.5, -2.0))
    tensor = SafetensorsWeights(weights.parent)["w"]
    assert tensor.tolist() == [0.5, -2.0]
    assert tensor.data_ptr() % tensor.element_size() == 0


def pipe(path: Path) -> None:
    os.mkfifo(path)


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))


SPECIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "a directory": (Path.mkdir, "is a directory, expected a regular file"),
    "a pipe": (pipe, "is a pipe, expected a regular file"),
    "a socket": (socket_at, "is a socket, expected a regular file"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "is a device, expected"),
    "a link to a pipe": (
        lambda path: (pipe(path.parent / "p"), path.symlink_to("p")),
        "is a pipe, expected a regular file",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_is_refused_and_never_waited_for(
    weights: Path, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    make, complaint = SPECIAL[kind]
    monkeypatch.chdir(weights.parent)
    make(weights)
    refusal(weights, complaint, read_directory_of)


def test_a_sparse_file_is_not_read_into_memory(weights: Path, refusal: Callable[..., str]) -> None:
    with weights.open("wb") as file:
        file.write(struct.pack("<Q", 2**40))
        file.truncate(2**41)
    refusal(weights, "its header has 1099511627776 bytes, at most", read_directory_of)


INDEXES: dict[str, tuple[Any, str]] = {
    "no map": ({}, "weight_map is not an object of file names"),
    "a map that is a list": ({"weight_map": ["w"]}, "weight_map is not an object of file names"),
    "numbers as files": ({"weight_map": {"w": 1}}, "weight_map is not an object of file names"),
    "the directory above": (
        {"weight_map": {"w": "../x.safetensors"}},
        "'../x.safetensors' is not a",
    ),
    "dots alone": ({"weight_map": {"w": ".."}}, "'..' is not a plain file name"),
    "a dot": ({"weight_map": {"w": "."}}, "'.' is not a plain file name"),
    "no name": ({"weight_map": {"w": ""}}, "'' is not a plain file name"),
    "a place of its own": ({"weight_map": {"w": "/etc/passwd"}}, "'/etc/passwd' is not a plain"),
    "a folder below": (
        {"weight_map": {"w": "a/b.safetensors"}},
        "'a/b.safetensors' is not a plain",
    ),
    "a NUL": ({"weight_map": {"w": "a\0.safetensors"}}, r"'a\\x00.safetensors' is not a plain"),
    "two lines": ({"weight_map": {"w": "a\nb"}}, r"'a\\nb' is not a plain file name"),
    "half a surrogate pair": ({"weight_map": {"w": "\ud800"}}, r"'\\ud800' is not a plain"),
    "a long name": ({"weight_map": {"w": "x" * 9999}}, r"'x+\.\.\.x+' is not a plain file name"),
    "a name too long for a disk": ({"weight_map": {"w": "ß" * 255}}, "ß is missing from the"),
    "a missing file": ({"weight_map": {"w": "gone.safetensors"}}, "gone.safetensors is missing"),
    "a tensor of two lines": (
        {"weight_map": {"a\nb": "part.safetensors"}},
        r"weight_map names a tensor 'a\\nb'",
    ),
    "a tensor that is not there": (
        {"weight_map": {"w": "part.safetensors", "x": "part.safetensors"}},
        "tensor x is not in part.safetensors",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", INDEXES)
def test_a_broken_index_is_refused(tmp_path: Path, refusal: Callable[..., str], kind: str) -> None:
    values, complaint = INDEXES[kind]
    (tmp_path / "part.safetensors").write_bytes(file_of({"w": GOOD}))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps(values))
    refusal(index, complaint, read_directory_of)


def test_a_listed_file_that_is_a_pipe_is_refused(
    tmp_path: Path, refusal: Callable[..., str]
) -> None:
    pipe(tmp_path / "part.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "part.safetensors"}}))
    refusal(tmp_path / "part.safetensors", "is a pipe", read_directory_of)


def test_a_tensor_in_two_listed_files_is_refused(
    tmp_path: Path, refusal: Callable[..., str]
) -> None:
    for file in ("a.safetensors", "b.safetensors"):
        (tmp_path / file).write_bytes(file_of({"w": GOOD}))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}))
    refusal(tmp_path, "tensor w is in a.safetensors and in b.safetensors", SafetensorsWeights)


def test_a_link_to_a_file_elsewhere_is_followed(tmp_path: Path) -> None:
    """As in the cache of Hugging Face's hub, where every file is one."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "blobs" / "1f").write_bytes(file_of({"w": GOOD}))
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/1f")
    assert list(SafetensorsWeights(tmp_path / "snapshot")) == ["w"]
