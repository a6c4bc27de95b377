"""Reading GGUF: what a good file holds, and one clear line for each kind of bad one."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foredraft.core.errors import ModelError
from foredraft.models.gguf import GGUFFile
from foredraft.models.gguf_quants import BLOCKS, TYPE_NAMES

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
STRING, ARRAY = 8, 9


def text(value: str) -> bytes:
    raw = value.encode()
    return U64.pack(len(raw)) + raw


def header(tensors: int = 0, entries: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + U32.pack(version) + U64.pack(tensors) + U64.pack(entries)


def tensor_entry(
    name: str, sizes: tuple[int, ...], kind: int = 0, offset: int = 0, dimensions: int | None = None
) -> bytes:
    count = len(sizes) if dimensions is None else dimensions
    return (
        text(name) + U32.pack(count) + b"".join(map(U64.pack, sizes))
        + U32.pack(kind) + U64.pack(offset)
    )  # fmt: skip


def padded(raw: bytes, data: bytes = b"") -> bytes:
    return raw + bytes(-len(raw) % 32) + data


@pytest.fixture
def written(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(raw: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(raw)
        return path

    return write


def good_file(path: Path) -> dict[str, np.ndarray]:
    """A file by ggml's own library: every scalar type, arrays, and each storage type we read."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("t.u8", 7)
    writer.add_int16("t.i16", -3)
    writer.add_uint64("t.u64", 2**40)
    writer.add_float32("t.f32", 0.5)
    writer.add_float64("t.f64", 0.1)
    writer.add_bool("t.bool", True)
    writer.add_string("t.text", "grüße")
    writer.add_array("t.words", ["a", "", "ü"])
    writer.add_array("t.numbers", [1, -2, 3])
    values = np.random.default_rng(5).standard_normal((6, 64)).astype(np.float32)
    expected = {}
    for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"):
        quantised = gguf.quantize(values, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(kind, quantised, raw_dtype=gguf.GGMLQuantizationType[kind])
        expected[kind] = gguf.dequantize(quantised, gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def test_metadata_and_exactly_widened_tensors(tmp_path: Path) -> None:
    expected = good_file(tmp_path / "good.gguf")
    file = GGUFFile(tmp_path / "good.gguf")
    assert file.metadata["general.architecture"] == "llama"
    read = {key: value for key, value in file.metadata.items() if key.startswith("t.")}
    assert read == {
        "t.u8": 7, "t.i16": -3, "t.u64": 2**40, "t.f32": 0.5, "t.f64": 0.1, "t.bool": True,
        "t.text": "grüße", "t.words": ["a", "", "ü"], "t.numbers": [1, -2, 3],
    }  # fmt: skip
    assert set(file.tensors) == set(expected)
    for name, values in expected.items():
        assert torch.equal(file.tensor(name).float(), torch.from_numpy(values)), name


def test_type_names_are_ggmls() -> None:
    known = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    assert {kind: known.get(kind) for kind in TYPE_NAMES} == TYPE_NAMES
    sizes = {kind: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)] for kind in BLOCKS}
    assert {kind: (block.values, block.bytes) for kind, block in BLOCKS.items()} == sizes


BAD_FILES = {
    "empty": (b"", "cannot be read"),
    "another format": (header(magic=b"PK\x03\x04"), "does not begin with GGUF"),
    "version 1": (header(version=1), "version 1; supported are 2 and 3"),
    "big-endian": (header(version=3 << 24), "big-endian"),
    "tensor count": (header(tensors=2**62), "table of 4611686018427387904 tensors"),
    "entry count": (header(entries=2**62), "metadata entries needs"),
    "key length": (header(entries=1) + U64.pack(2**63) + bytes(13), "the key of metadata entry 0"),
    "key not UTF-8": (header(entries=1) + U64.pack(2) + b"\xff\xfe" + bytes(13), "valid UTF-8"),
    "unknown type": (header(entries=1) + text("k") + U32.pack(99) + bytes(8), "unknown type 99"),
    "array length": (
        header(entries=1) + text("k") + U32.pack(ARRAY) + U32.pack(4) + U64.pack(2**61),
        "'k' of 2305843009213693952 elements needs",
    ),
    "array of strings": (
        header(entries=1) + text("k") + U32.pack(ARRAY) + U32.pack(STRING) + U64.pack(2**40),
        "elements needs",
    ),
    "array of arrays": (
        header(entries=1) + text("k") + U32.pack(ARRAY) + U32.pack(ARRAY) + U64.pack(1),
        "array of type 9",
    ),
    "key twice": (
        header(entries=2) + (text("k") + U32.pack(0) + b"\x01") * 2 + bytes(26),
        "'k' appears twice",
    ),
    "dimensions": (
        header(tensors=1) + tensor_entry("w", (), dimensions=2**31) + bytes(64),
        "2147483648 dimensions",
    ),
    "empty dimension": (header(tensors=1) + tensor_entry("w", (4, 0)), "dimension of size 0"),
    "data beyond the end": (
        padded(header(tensors=1) + tensor_entry("w", (2**40, 2**20)), bytes(64)),
        "'w' needs 4611686018427387904 bytes",
    ),
    "offset beyond the end": (
        padded(header(tensors=1) + tensor_entry("w", (4,), offset=2**50), bytes(64)),
        "but the file ends",
    ),
    "misaligned": (
        padded(header(tensors=1) + tensor_entry("w", (4,), offset=4), bytes(64)),
        "not a multiple of 32",
    ),
    "overlap": (
        padded(header(tensors=2) + tensor_entry("a", (16,)) + tensor_entry("b", (8,), offset=32),
               bytes(96)),
        "'b' overlaps 'a'",
    ),
    "name twice": (
        padded(header(tensors=2) + tensor_entry("a", (8,)) + tensor_entry("a", (8,), offset=32),
               bytes(96)),
        "'a' appears twice",
    ),
    "broken block": (
        padded(header(tensors=1) + tensor_entry("w", (33,), kind=8), bytes(64)),
        "rows of 33 are no blocks of 32",
    ),
    "unsupported quantisation": (
        padded(header(tensors=1) + tensor_entry("w", (256,), kind=16), bytes(256)),
        "quantised as IQ2_XXS, which is not supported; supported are F32",
    ),
    "unknown quantisation": (
        padded(header(tensors=1) + tensor_entry("w", (256,), kind=777), bytes(256)),
        "type 777",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_one_clear_line(written: Callable[[bytes], Path], kind: str) -> None:
    raw, complaint = BAD_FILES[kind]
    path = written(raw)
    with pytest.raises(ModelError) as caught:
        GGUFFile(path)
    message = str(caught.value)
    assert complaint in message
    assert str(path) in message
    assert "\n" not in message


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "good.gguf"
    good_file(whole)
    raw = whole.read_bytes()
    # The last tensor may be followed by padding that nobody needs.
    last = max(place.start + place.num_bytes for place in GGUFFile(whole).tensors.values())
    cut = tmp_path / "cut.gguf"
    for size in [*range(1, 900, 13), *range(900, last, 211), last - 1]:
        cut.write_bytes(raw[:size])
        with pytest.raises(ModelError):
            GGUFFile(cut)


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.integers(0, 900), value=st.integers(0, 255))
def test_a_changed_byte_never_escapes_as_another_error(
    tmp_path: Path, place: int, value: int
) -> None:
    whole = tmp_path / "good.gguf"
    if not whole.exists():
        good_file(whole)
    raw = bytearray(whole.read_bytes())
    raw[place] = value
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(raw)
    complaint = ""
    try:
        file = GGUFFile(changed)
        for name in file.tensors:
            file.tensor(name)
    except ModelError as error:
        complaint = str(error)
    assert "\n" not in complaint
