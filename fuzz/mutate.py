"""Mutations that know where the numbers of a GGUF or safetensors file are.

Flipping bytes alone rarely gets past a length that no longer fits; here lengths, counts, types and
places are changed one at a time, and a header's length is kept true.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

Mutator = Callable[[bytes, random.Random], bytes]

_NUMBERS = (0, 1, 2, 7, 8, 9, 12, 13, 14, 31, 32, 33, 255, 256, 2**16, 2**31 - 1, 2**31,
            2**32 - 1, 2**32, 2**48, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 3, 8, 9, 2**31, 2**48, 2**63, 2**64, 1.5, float("nan"), 1e400, "",
    "w", "F32", "BF16", "F4", "I8", "__metadata__", "a\nb", "\ud800", "\u202e", [], [0], [0, 8],
    [8, 0], [1, 2, 3, 4, 5, 6, 7, 8, 9], {}, {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
)  # fmt: skip
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, cut out, doubled or put in."""
    raw = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(raw))
        length = rng.choice((1, 1, 2, 4, 8, rng.randint(0, 64)))
        kind = rng.randrange(4)
        if kind == 0:
            raw[at : at + length] = rng.randbytes(length)
        elif kind == 1:
            del raw[at : at + length]
        elif kind == 2:
            raw[at:at] = raw[at : at + length]
        else:
            raw[at : at + 8] = struct.pack("<Q", rng.choice(_NUMBERS))
    return bytes(raw)


def mutate_gguf(data: bytes, rng: random.Random) -> bytes:
    """One or two numbers of the header changed; now and then only bytes."""
    places = list(gguf_numbers(data))
    if not places or rng.random() < 0.2:
        return mutate_bytes(data, rng)
    raw = bytearray(data)
    for _ in range(rng.randint(1, 2)):
        # Seldom the version and the counts, the first three: they end the reading at once.
        at, size = rng.choice(places[3:] if rng.random() < 0.9 and places[3:] else places)
        old = int.from_bytes(raw[at : at + size], "little")
        near = (old - 1, old + 1, old ^ 1 << rng.randrange(8 * size), len(data) - at, old * 2)
        new = rng.choice((*_NUMBERS, *near)) % 2 ** (8 * size)
        raw[at : at + size] = new.to_bytes(size, "little")
    return bytes(raw)


def gguf_numbers(data: bytes) -> Iterator[tuple[int, int]]:
    """Place and size of the header's numbers, as far as the file makes sense."""
    if len(data) < 24:
        return
    yield from ((4, 4), (8, 8), (16, 8))
    num_tensors, num_entries = struct.unpack_from("<QQ", data, 8)
    at = 24
    try:
        for _ in range(min(num_entries, 64)):
            yield at, 8
            at += 8 + _number(data, at, 8)
            yield at, 4
            kind, at = _number(data, at, 4), at + 4
            for place, size in _value_numbers(data, at, kind):
                yield place, size
            at = _after_value(data, at, kind)
        for _ in range(min(num_tensors, 64)):
            yield at, 8
            at += 8 + _number(data, at, 8)
            yield at, 4
            dimensions, at = min(_number(data, at, 4), 8), at + 4
            for size in (*[8] * dimensions, 4, 8):
                yield at, size
                at += size
    except (KeyError, ValueError):  # the file ends, or names a type that is none
        return


def _number(data: bytes, at: int, size: int) -> int:
    if at + size > len(data):
        raise ValueError("the file ends")
    return int.from_bytes(data[at : at + size], "little")


def _value_numbers(data: bytes, at: int, kind: int) -> Iterator[tuple[int, int]]:
    if kind == _STRING:
        yield at, 8
    elif kind == _ARRAY:
        yield from ((at, 4), (at + 4, 8))
        if _number(data, at, 4) == _STRING:
            yield at + 12, 8
    else:
        yield at, _SCALAR_BYTES[kind]


def _after_value(data: bytes, at: int, kind: int) -> int:
    if kind == _STRING:
        return at + 8 + _number(data, at, 8)
    if kind != _ARRAY:
        return at + _SCALAR_BYTES[kind]
    kind, count, at = _number(data, at, 4), _number(data, at + 4, 8), at + 12
    if kind != _STRING:
        return at + count * _SCALAR_BYTES[kind]
    for _ in range(count):
        at += 8 + _number(data, at, 8)
    return at


def mutate_safetensors(data: bytes, rng: random.Random) -> bytes:
    """A value, key or entry of the header changed, its length true; now and then only bytes."""
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + min(length, 2**16)])
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or not header or rng.random() < 0.25:
        return mutate_bytes(data, rng)
    _change(header, rng)
    raw = json.dumps(header).encode("utf-8", "surrogatepass")
    raw += b" " * (-len(raw) % 8)
    body = data[8 + length :]
    if rng.random() < 0.2:
        body = body[: rng.randint(0, len(body))] + bytes(rng.choice((0, 4, 8, 64)))
    return struct.pack("<Q", len(raw)) + raw + body


def _change(header: dict[str, Any], rng: random.Random) -> None:
    name = rng.choice(list(header))
    entry = header[name]
    kind = rng.randrange(5)
    if kind == 0:
        header[rng.choice((name, "a", "b", "", "a\nb", "w" * 300))] = header.pop(name)
    elif kind == 1:
        header[f"{name}{rng.randrange(3)}"] = json.loads(json.dumps(entry))
    elif kind == 2 or not isinstance(entry, dict) or not entry:
        header[name] = rng.choice(_VALUES)
    else:
        key = rng.choice(list(entry))
        values = entry[key]
        if isinstance(values, list) and values and kind == 3:
            index = rng.randrange(len(values))
            old = values[index] if isinstance(values[index], int) else 0
            values[index] = rng.choice((*_VALUES, old + 1, old - 1, old * 2, old + 8))
        else:
            entry[key] = rng.choice(_VALUES)
