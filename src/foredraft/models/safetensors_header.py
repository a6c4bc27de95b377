"""The header of a safetensors file, checked before anything believes it.

Knows the layout (huggingface/safetensors, README, "Format"): the header's length in 8 bytes, the
header as JSON, the tensors' bytes one after the other. Knows no model; the safetensors library
reads the tensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from foredraft.core.errors import ModelError
from foredraft.models.untrusted import (
    MAX_NAME,
    is_name,
    open_regular,
    quoted,
    taken_for_weights,
    unique_keys,
)

MAX_HEADER_BYTES = 16 * 2**20
MAX_DIMENSIONS = 8
MAX_INTEGER = 2**48  # far above every size and file there is
_PREFIX_BYTES = 8
_METADATA = "__metadata__"
_KEYS = ("dtype", "shape", "data_offsets")
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


def check_header(path: Path) -> None:
    """Raises ModelError, naming the file and what is wrong, unless the header describes it all.

    That is: known types, sizes and places of the tensors that fit each other, and every byte behind
    the header in exactly one tensor.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            table = _table(file, size)
            data_bytes = size - file.tell()
            _check_metadata(table.pop(_METADATA, None))
            _check_places([_place(name, value) for name, value in table.items()], data_bytes)
        except _HeaderError as fault:
            raise ModelError(f"{path}: not readable as safetensors: {fault}") from fault


class _HeaderError(Exception):
    """What is wrong with the header, without the file's name."""


def _table(file: BinaryIO, size: int) -> dict[str, Any]:
    """The header's JSON object."""
    prefix = file.read(_PREFIX_BYTES)
    if len(prefix) < _PREFIX_BYTES:
        raise _HeaderError(f"its {size} bytes are too few for a header")
    # Asked only when something is wrong: a header's length may begin like anything.
    known = taken_for_weights(prefix + file.read(32))
    length = int.from_bytes(prefix, "little")
    try:
        if length > size - _PREFIX_BYTES:
            raise ValueError(f"a header of {length} bytes does not fit into the file's {size}")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"its header has {length} bytes, at most {MAX_HEADER_BYTES} fit")
        file.seek(_PREFIX_BYTES)
        table = _parsed(file.read(length))
    except ValueError as error:
        raise _HeaderError(f"it is {known}" if known else str(error)) from error
    if not isinstance(table, dict):
        raise _HeaderError(f"its header is {quoted(table)}, expected a JSON object")
    return table


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is not valid JSON ({error})") from error


def _check_metadata(metadata: Any) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict):
        raise _HeaderError(f"{_METADATA} is {quoted(metadata)}, expected an object of strings")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise _HeaderError(f"{_METADATA} has {quoted(key)}: {quoted(value)}, expected a string")


def _place(name: str, value: Any) -> tuple[int, int, str]:
    """First byte, end and name of the tensor whose entry is `value`."""
    if not is_name(name):
        raise _HeaderError(
            f"a tensor is called {quoted(name)}; expected 1 to {MAX_NAME} printable characters"
        )
    if not isinstance(value, dict) or sorted(value) != sorted(_KEYS):
        what = list(value) if isinstance(value, dict) else value
        raise _HeaderError(f"tensor {name} has {quoted(what)}, expected {', '.join(_KEYS)}")
    shape, offsets = _integers(name, value, "shape"), _integers(name, value, "data_offsets")
    if len(shape) > MAX_DIMENSIONS:
        raise _HeaderError(
            f"tensor {name} has {len(shape)} dimensions, at most {MAX_DIMENSIONS} fit"
        )
    if 0 in shape:
        raise _HeaderError(f"tensor {name} has a dimension of size 0")
    if not isinstance(value["dtype"], str) or value["dtype"] not in _BITS:
        raise _HeaderError(f"tensor {name} has dtype {quoted(value['dtype'])}, which is unknown")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _HeaderError(
            f"tensor {name} has data_offsets {quoted(offsets)}, expected its first byte and its end"
        )
    start, end = offsets
    num_bits = math.prod(shape) * _BITS[value["dtype"]]
    if num_bits != 8 * (end - start):
        raise _HeaderError(
            f"tensor {name} of shape {quoted(shape)} and dtype {value['dtype']} needs "
            f"{num_bits / 8:.15g} bytes, its data_offsets give {end - start}"
        )
    return start, end, name


def _integers(name: str, entry: Mapping[str, Any], key: str) -> list[int]:
    values = entry[key]
    if not isinstance(values, list) or not all(
        type(value) is int and 0 <= value <= MAX_INTEGER for value in values
    ):
        raise _HeaderError(
            f"tensor {name} has {key} {quoted(values)}, expected integers from 0 to {MAX_INTEGER}"
        )
    return values


def _check_places(places: list[tuple[int, int, str]], data_bytes: int) -> None:
    """Every byte belongs to one tensor."""
    reached, before = 0, ""
    for start, end, name in sorted(places):
        if start < reached:
            raise _HeaderError(f"tensor {name} overlaps {before}")
        if start > reached:
            raise _HeaderError(f"{start - reached} bytes before tensor {name} belong to no tensor")
        if end > data_bytes:
            raise _HeaderError(
                f"tensor {name} ends at byte {end} of the data, but the file holds {data_bytes}"
            )
        reached, before = end, name
    if reached < data_bytes:
        raise _HeaderError(f"the last {data_bytes - reached} bytes belong to no tensor")
