"""The GGUF container: metadata, the table of tensors and their bytes, out of a file nobody trusts.

Knows the layout of versions 2 and 3 (ggml-org/ggml, docs/gguf.md); knows no model and no tokenizer.
Every length is checked against the bytes that are left before anything is read or allocated, and
what is read at once is bounded, since a file can be far longer than what it stores.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from foredraft.core.errors import ModelError
from foredraft.models.gguf_quants import BLOCKS, TYPE_NAMES, dequantise
from foredraft.models.untrusted import MAX_NAME, is_name, open_regular, quoted, taken_for_weights

MAGIC = b"GGUF"
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**20
# Of all before the tensors' bytes. The largest vocabularies need a fifth of it.
MAX_HEADER_BYTES = 64 * 2**20
MAX_TENSORS = 2**16
MAX_ENTRIES = 2**16
MAX_ELEMENTS = 2**22  # of one array
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
# The least bytes one element of a type takes: what bounds a claimed count by the file's size.
_MIN_BYTES = {kind: scalar.size for kind, scalar in _SCALARS.items()} | {_STRING: 8}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor's place in the file."""

    name: str
    shape: tuple[int, ...]  # torch's order: rows first
    kind: int  # ggml's type number
    start: int  # byte in the file
    num_bytes: int


class GGUFFile:
    """`metadata` and `tensors` of the file at `path`, which stays memory-mapped.

    Raises ModelError, naming the file and what is wrong, for anything that does not fit.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path) as file:
            try:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise ModelError(f"{path}: cannot be read ({error})") from error
        cursor = _Cursor(self._bytes, str(path))
        num_tensors, num_entries = _header(cursor)
        self.metadata: Mapping[str, Any] = dict(_entries(cursor, num_entries))
        self.tensors: Mapping[str, GGUFTensor] = _tensor_table(
            cursor, num_tensors, self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        )

    def tensor(self, name: str) -> Tensor:
        """The tensor widened: float32, or float16/bfloat16 as stored."""
        place = self.tensors[name]
        raw = np.frombuffer(self._bytes, np.uint8, place.num_bytes, place.start)
        return dequantise(place.kind, raw).reshape(place.shape)


class WidenedTensors(Mapping[str, Tensor]):
    """`names` maps a model's tensor names to `(name in the file, change of its rows or None)`."""

    def __init__(
        self, file: GGUFFile, names: Mapping[str, tuple[str, Callable[[Tensor], Tensor] | None]]
    ) -> None:
        self._file = file
        self._names = names

    def __getitem__(self, name: str) -> Tensor:
        stored, change = self._names[name]
        tensor = self._file.tensor(stored)
        return tensor if change is None else change(tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Cursor:
    """Reads forward through `data`, never past its end."""

    def __init__(self, data: mmap.mmap, source: str) -> None:
        self.data = data
        self.source = source
        self.at = 0
        self.size = len(data)

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self.source}: not a valid GGUF file: {what}")

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            raise self.fail(
                f"{what} needs {count} bytes at byte {self.at}, "
                f"but the file ends at byte {self.size}"
            )
        if count > MAX_HEADER_BYTES - self.at:
            raise self.fail(
                f"{what} needs {count} bytes at byte {self.at}, "
                f"but at most {MAX_HEADER_BYTES} may come before the tensors' own"
            )

    def take(self, count: int, what: str) -> bytes:
        self.need(count, what)
        start, self.at = self.at, self.at + count
        return self.data[start : self.at]

    def scalar(self, kind: int, what: str) -> Any:
        layout = _SCALARS[kind]
        (value,) = layout.unpack(self.take(layout.size, what))
        return self.flag(value, what) if kind == _BOOL else value

    def flag(self, byte: int, what: str) -> bool:
        if byte > 1:
            raise self.fail(f"{what} is true or false, but its byte is {byte}")
        return byte == 1

    def string(self, what: str) -> str:
        raw = self.take(self.scalar(10, what), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not valid UTF-8 ({raw[:40]!r})") from error

    def name(self, what: str) -> str:
        text = self.string(what)
        if not is_name(text):
            raise self.fail(
                f"{what} is {quoted(text)}, expected 1 to {MAX_NAME} printable characters"
            )
        return text

    def array(self, what: str) -> list[Any]:
        kind, count = self.scalar(4, what), self.scalar(10, what)
        if kind not in _MIN_BYTES:
            raise self.fail(f"{what} is an array of type {kind}, which cannot be in an array here")
        self.need(count * _MIN_BYTES[kind], f"{what} of {count} elements")
        if count > MAX_ELEMENTS:
            raise self.fail(f"{what} has {count} elements, at most {MAX_ELEMENTS} fit")
        if kind == _STRING:
            return [self.string(what) for _ in range(count)]
        layout = struct.Struct(f"<{count}{_SCALARS[kind].format[1:]}")
        values = layout.unpack(self.take(layout.size, what))
        return [self.flag(v, what) for v in values] if kind == _BOOL else list(values)


def _header(cursor: _Cursor) -> tuple[int, int]:
    """The numbers of tensors and of metadata entries."""
    if cursor.take(4, "the magic number") != MAGIC:
        known = taken_for_weights(cursor.data[:32])
        raise cursor.fail(
            f"it does not begin with {MAGIC.decode()}" + (f"; it is {known}" if known else "")
        )
    version = cursor.scalar(4, "the version")
    if version not in (2, 3):
        swapped = " (big-endian files are not supported)" if version >= 2**24 else ""
        raise cursor.fail(f"version {version}{swapped}; supported are 2 and 3")
    num_tensors = cursor.scalar(10, "the number of tensors")
    num_entries = cursor.scalar(10, "the number of metadata entries")
    # The least a tensor's entry takes (name length, dimensions, type, offset), and an entry's.
    cursor.need(24 * num_tensors, f"a table of {num_tensors} tensors")
    cursor.need(13 * num_entries, f"a list of {num_entries} metadata entries")
    for count, limit, what in (
        (num_tensors, MAX_TENSORS, "tensors"),
        (num_entries, MAX_ENTRIES, "metadata entries"),
    ):
        if count > limit:
            raise cursor.fail(f"it has {count} {what}, at most {limit} fit")
    return num_tensors, num_entries


def _entries(cursor: _Cursor, count: int) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for index in range(count):
        key = cursor.name(f"the key of metadata entry {index}")
        if key in seen:
            raise cursor.fail(f"metadata key {key!r} appears twice")
        seen.add(key)
        what = f"metadata {key!r}"
        kind = cursor.scalar(4, what)
        if kind == _STRING:
            yield key, cursor.string(what)
        elif kind == _ARRAY:
            yield key, cursor.array(what)
        elif kind in _SCALARS:
            yield key, cursor.scalar(kind, what)
        else:
            raise cursor.fail(f"{what} has unknown type {kind}")


def _tensor_table(cursor: _Cursor, count: int, alignment: Any) -> dict[str, GGUFTensor]:
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment % 8:
        raise cursor.fail(
            f"general.alignment is {quoted(alignment)}, "
            f"expected a multiple of 8 from 8 to {MAX_ALIGNMENT}"
        )
    places = [_tensor_entry(cursor, index) for index in range(count)]
    base = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    end, previous = base, ""
    for name, shape, kind, offset in sorted(places, key=lambda place: place[3]):
        if offset % alignment:
            raise cursor.fail(f"tensor {name!r} at offset {offset}, not a multiple of {alignment}")
        start, num_bytes = base + offset, _num_bytes(cursor, name, shape, kind)
        if start < end:
            raise cursor.fail(f"tensor {name!r} overlaps {previous!r}")
        if num_bytes > cursor.size - start:
            raise cursor.fail(
                f"tensor {name!r} needs {num_bytes} bytes at byte {start}, "
                f"but the file ends at byte {cursor.size}"
            )
        if name in tensors:
            raise cursor.fail(f"tensor {name!r} appears twice")
        tensors[name] = GGUFTensor(name, shape, kind, start, num_bytes)
        end, previous = start + num_bytes, name
    return tensors


def _tensor_entry(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape (rows first), type and offset."""
    name = cursor.name(f"the name of tensor {index}")
    what = f"the entry of tensor {name!r}"
    dimensions = cursor.scalar(4, what)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.fail(f"tensor {name!r} has {dimensions} dimensions, at most {MAX_DIMENSIONS}")
    sizes = [cursor.scalar(10, what) for _ in range(dimensions)]
    if 0 in sizes:
        raise cursor.fail(f"tensor {name!r} has a dimension of size 0")
    return name, tuple(reversed(sizes)), cursor.scalar(4, what), cursor.scalar(10, what)


def _num_bytes(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int) -> int:
    if kind not in BLOCKS:
        supported = ", ".join(TYPE_NAMES[known] for known in BLOCKS)
        raise ModelError(
            f"{cursor.source}: tensor {name!r} is quantised as "
            f"{TYPE_NAMES.get(kind, f'type {kind}')}, which is not supported; "
            f"supported are {supported}"
        )
    block = BLOCKS[kind]
    if shape[-1] % block.values:
        raise cursor.fail(f"tensor {name!r}: rows of {shape[-1]} are no blocks of {block.values}")
    return math.prod(shape) // block.values * block.bytes
