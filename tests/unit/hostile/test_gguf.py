"""GGUF containers made to harm: one clear line for each, no crash, no hang, no memory filled."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from foredraft.core.errors import ModelError
from foredraft.models.gguf import GGUFFile
from foredraft.models.load import load_model
from foredraft.testing.gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I32,
    STRING,
    U8,
    U32,
    U64,
    array,
    gguf,
    pack,
    place,
    scalar,
    text,
    tiny_llama,
)

ALL_ONES = 2**64 - 1
Q4_0, Q4_K, I32_TENSOR = 2, 12, 26


def of_metadata(key: str | bytes, value: bytes) -> bytes:
    return gguf([text(key) + value], [])


def of_tensors(*places: bytes) -> bytes:
    return gguf([], places, bytes(256))


# Refused by the reader, whatever a model needs.
CONTAINERS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read"),
    "one byte": (b"G", "the magic number needs 4 bytes at byte 0"),
    "only the magic": (b"GGUF", "the version needs 4 bytes at byte 4"),
    "only zeros": (bytes(4096), "does not begin with GGUF"),
    "lower case": (gguf([], [], magic=b"gguf"), "does not begin with GGUF"),
    "a zip archive": (b"PK\x03\x04" + bytes(60), "it is a zip archive, as torch.save"),
    "a pickle": (b"\x80\x04\x95" + bytes(60), "it is a pickle; pickled weights"),
    "a Git LFS pointer": (
        b"version https://git-lfs.example/spec/v1\noid sha256:0\n",
        "it is a Git LFS pointer; fetch the file itself",
    ),
    "an HTML page": (b"<!DOCTYPE html><p>Sign in", "it is an HTML page"),
    "version 0": (gguf([], [], version=0), "version 0; supported are 2 and 3"),
    "a version from the future": (gguf([], [], version=2**24 - 1), "version 16777215"),
    "byte-swapped": (gguf([], [], version=3 << 24), "big-endian"),
    "all ones": (b"GGUF" + pack(U32, 3) + b"\xff" * 64, "a table of 18446744073709551615"),
    "more tensors than bytes": (gguf([], [], num_tensors=9), "a table of 9 tensors needs"),
    "more entries than bytes": (
        gguf([], [], num_entries=9),
        "a list of 9 metadata entries needs",
    ),
    "negative counts": (gguf([], [], num_tensors=2**63), "a table of 9223372036854775808"),
    "too many tensors": (
        gguf([], [], bytes(24 * 65537), num_tensors=65537),
        "it has 65537 tensors",
    ),
    "too many entries": (
        gguf([], [], bytes(13 * 65537), num_entries=65537),
        "it has 65537 metadata entries",
    ),
    "a key beyond the end": (
        gguf([pack(U64, 2**40) + bytes(16)], []),
        "the key of metadata entry 0 needs 1099511",
    ),
    "a key of all ones": (gguf([pack(U64, ALL_ONES) + bytes(16)], []), "18446744073709551615"),
    "an empty key": (of_metadata("", scalar(U8, 1)), "metadata entry 0 is '', expected 1 to"),
    "a long key": (
        of_metadata("k" * 256, scalar(U8, 1)),
        r"entry 0 is 'k+\.\.\.k+', expected 1 to 255",
    ),
    "a key of two lines": (of_metadata("a\nb", scalar(U8, 1)), r"entry 0 is 'a\\nb'"),
    "a key that turns text around": (
        of_metadata("a\u202egpj.exe", scalar(U8, 1)),
        r"'a\\u202egpj\.exe'",
    ),
    "a key with a NUL": (of_metadata("a\0", scalar(U8, 1)), r"'a\\x00'"),
    "a key that is not UTF-8": (of_metadata(b"\xc3\x28", scalar(U8, 1)), "not valid UTF-8"),
    "a key of half a surrogate pair": (
        of_metadata(b"\xed\xa0\x80", scalar(U8, 1)),
        "not valid UTF-8",
    ),
    "a key in too many bytes": (of_metadata(b"\xc0\xaf", scalar(U8, 1)), "not valid UTF-8"),
    "a key twice": (
        gguf([text("k") + scalar(U8, 1)] * 2, []),
        "metadata key 'k' appears twice",
    ),
    "a value of no type": (of_metadata("k", pack(U32, 13)), "'k' has unknown type 13"),
    "a value of type all ones": (of_metadata("k", pack(U32, 2**32 - 1)), "unknown type 42949"),
    "a value cut short": (
        gguf([text("k") + pack(U32, F64)], [], alignment=1, data=bytes(4)),
        "'k' needs 8 bytes at byte",
    ),
    "neither true nor false": (of_metadata("k", scalar(BOOL, 2)), "its byte is 2"),
    "neither true nor false in a list": (
        of_metadata("k", array(BOOL, [0, 1, 255])),
        "its byte is 255",
    ),
    "a text beyond the end": (
        of_metadata("k", pack(U32, STRING) + pack(U64, 2**62)),
        "'k' needs 46116860184273879",
    ),
    "a text that is not UTF-8": (of_metadata("k", scalar(STRING, b"\xff")), "not valid UTF-8"),
    "a list beyond the end": (
        of_metadata("k", array(U8, [], 2**62)),
        "of 4611686018427387904 elements needs",
    ),
    "a list whose bytes overflow": (
        of_metadata("k", array(F64, [], 2**61)),
        "of 2305843009213693952 elements needs 184467",
    ),
    "a list of texts beyond the end": (
        of_metadata("k", array(STRING, ["a"], 2**32)),
        "of 4294967296 elements needs",
    ),
    "a list of texts, the second too long": (
        of_metadata("k", array(STRING, ["a"], 2) + pack(U64, 2**50)),
        "'k' needs 1125899906",
    ),
    "a list of lists": (
        of_metadata("k", array(ARRAY, [], 1) + array(U8, [1])[4:]),
        "an array of type 9",
    ),
    "lists a thousand deep": (
        of_metadata("k", (pack(U32, ARRAY, ARRAY) + pack(U64, 1)) + pack(U32, ARRAY) * 9999),
        "an array of type 9",
    ),
    "a list of no type": (of_metadata("k", array(99, [], 1)), "an array of type 99"),
    "an alignment of 0": (of_metadata("general.alignment", scalar(U32, 0)), "alignment is 0,"),
    "a negative alignment": (
        of_metadata("general.alignment", scalar(I32, -32)),
        "general.alignment is -32, expected",
    ),
    "an odd alignment": (of_metadata("general.alignment", scalar(U32, 33)), "is 33, expected"),
    "an alignment of all ones": (
        of_metadata("general.alignment", scalar(U64, ALL_ONES)),
        "is 18446744073709551615,",
    ),
    "an alignment that is no number": (
        of_metadata("general.alignment", scalar(F32, float("nan"))),
        "is nan, expected a multiple of 8",
    ),
    "an alignment of text": (
        of_metadata("general.alignment", scalar(STRING, "32")),
        "is '32', expected",
    ),
    "an alignment that is true": (
        of_metadata("general.alignment", scalar(BOOL, 1)),
        "is True, expected a multiple",
    ),
    "an alignment that is a list": (
        of_metadata("general.alignment", array(U32, [32])),
        r"is \[32\], expected a multiple",
    ),
    "a tensor without a name": (of_tensors(place("", [8])), "name of tensor 0 is '', expected"),
    "a tensor's name of two lines": (of_tensors(place("a\r\nb", [8])), r"'a\\r\\nb'"),
    "a tensor's name beyond the end": (
        gguf([], [pack(U64, 2**48) + bytes(32)]),
        "the name of tensor 0 needs 281474976710656",
    ),
    "a tensor's name that is not UTF-8": (of_tensors(place(b"\xfe", [8])), "not valid UTF-8"),
    "a tensor without dimensions": (of_tensors(place("w", [])), "'w' has 0 dimensions"),
    "a tensor of five dimensions": (of_tensors(place("w", [1] * 5)), "'w' has 5 dimensions"),
    "a dimension of 0": (of_tensors(place("w", [8, 0, 8])), "'w' has a dimension of size 0"),
    "sizes whose product is 0 in 64 bits": (
        of_tensors(place("w", [2**32, 2**32])),
        "'w' needs 73786976294838206464 bytes",
    ),
    "sizes whose product is small in 64 bits": (
        of_tensors(place("w", [2**63 + 1, 2])),
        "'w' needs 73786976294838206472 bytes",
    ),
    "sizes of all ones": (of_tensors(place("w", [ALL_ONES] * 4)), r"'w' needs \d{60,} bytes"),
    "a tensor beyond the end": (of_tensors(place("w", [65])), "'w' needs 260 bytes at byte 64"),
    "an offset beyond the end": (
        of_tensors(place("w", [8], offset=2**60)),
        "'w' needs 32 bytes at byte 11529215046068470",
    ),
    "an offset of all ones": (
        of_tensors(place("w", [8], offset=ALL_ONES - 31)),
        "the file ends at byte",
    ),
    "a misaligned tensor": (of_tensors(place("w", [8], offset=8)), "not a multiple of 32"),
    "tensors in one place": (
        of_tensors(place("a", [8]), place("b", [8])),
        "tensor '[ab]' overlaps '[ab]'",
    ),
    "a tensor inside another": (
        of_tensors(place("a", [64]), place("b", [8], offset=64)),
        "'b' overlaps 'a'",
    ),
    "a tensor twice": (
        of_tensors(place("a", [8]), place("a", [8], offset=32)),
        "'a' appears twice",
    ),
    "a row that is no whole block": (
        of_tensors(place("w", [255, 2], Q4_K)),
        "'w': rows of 255 are no blocks of 256",
    ),
    "blocks across rows": (
        of_tensors(place("w", [16, 2], Q4_0)),
        "'w': rows of 16 are no blocks of 32",
    ),
    "a storage type that was taken back": (
        of_tensors(place("w", [32], 4)),
        "'w' is quantised as type 4, which is not supported",
    ),
    "a storage type of all ones": (
        of_tensors(place("w", [32], 2**32 - 1)),
        "'w' is quantised as type 4294967295",
    ),
    "whole numbers as weights": (
        of_tensors(place("w", [8], I32_TENSOR)),
        "'w' is quantised as I32",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_broken_container_is_refused(
    tmp_path: Path, refusal: Callable[..., str], kind: str
) -> None:
    raw, complaint = CONTAINERS[kind]
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    refusal(path, complaint, GGUFFile)
    refusal(path, complaint)


def test_a_model_cut_anywhere_is_refused(tmp_path: Path, refusal: Callable[..., str]) -> None:
    whole = tiny_llama()
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    header = min(place.start for place in GGUFFile(path).tensors.values())
    for size in [*range(0, header, 37), *range(header, len(whole), 9973), len(whole) - 1]:
        path.write_bytes(whole[:size])
        refusal(path, "not a valid GGUF file|cannot be read", GGUFFile)


def behind_a_key(value: bytes) -> bytes:
    """The start of a file whose first value is `value`."""
    return of_metadata("k", value)[: 24 + 9 + len(value)]


# A sparse file has all the bytes its header claims, and none of them takes room on the disk.
SPARSE: dict[str, tuple[bytes, str]] = {
    "a key": (gguf([pack(U64, 2**40)], [], b"")[:32], "of metadata entry 0 needs 1099511627776"),
    "a text": (behind_a_key(pack(U32, STRING) + pack(U64, 2**40)), "'k' needs 1099511627776 bytes"),
    "a list of bytes": (behind_a_key(array(U8, [], 2**40)), "elements needs 1099511627776 bytes"),
    "a list of texts": (behind_a_key(array(STRING, [], 2**37)), "elements needs 1099511627776"),
    "a long list": (
        behind_a_key(array(U8, [], 2**25)),
        "'k' has 33554432 elements, at most 4194304",
    ),
    "tensors": (gguf([], [], b"", num_tensors=2**35), "a table of 34359738368 tensors needs"),
    "entries": (gguf([], [], b"", num_entries=2**36), "a list of 68719476736 metadata entries"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", SPARSE)
def test_a_sparse_file_is_not_read_into_memory(
    tmp_path: Path, refusal: Callable[..., str], kind: str
) -> None:
    start, complaint = SPARSE[kind]
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(start)
        file.truncate(2**41)
    refusal(path, complaint, GGUFFile)


SPECIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "a directory": (Path.mkdir, "is a directory, expected a regular file"),
    "a pipe": (os.mkfifo, "is a pipe, expected a regular file"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "is a device, expected"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "cannot be read"),
    "nothing": (lambda path: None, "cannot be read \\(No such file or directory\\)"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_is_refused_and_never_waited_for(
    tmp_path: Path, refusal: Callable[..., str], kind: str
) -> None:
    make, complaint = SPECIAL[kind]
    path = tmp_path / "model.gguf"
    make(path)
    refusal(path, complaint, GGUFFile)
    if not path.is_dir():
        with pytest.raises(ModelError, match="does not exist"):
            load_model(path)
