"""N-gram tables as files, mapped into memory and read where they lie: format "foredraft-ngrams-1".

Knows bytes; knows neither requests nor how tables are made. All integers are little-endian; every
array begins at a multiple of 8, with zeros before it.

    8 bytes     "FDNGRAM1"
    8 bytes     length of the header, at most 64 KiB
    header      JSON: vocab_size; target and target_sha256, whose answers were counted; own_orders
                of the request's text (`ngram_blend.Layout`); sizes, for each order [contexts, what
                follows them]; sha256 of everything behind the header; provenance, free text by key
    float32     weights of the experts, in the order of `Layout`
    and for contexts of 1, 2, ... tokens, nodes of a trie that is read backwards:
    ids         [n] the token before those of the parent, rising among siblings
    uint8       [n] how often the context was seen: `total_code`
    uint32      [n + 1] where what follows each begins in the next two
    ids         [m] what followed, the most frequent first
    uint8       [m] how often: 255ths of the total
    uint32      [n + 1] where each one's children begin among the next order's; not in the last

Ids are uint16, uint32 where the vocabulary has more than 65,536. Where an array lies follows from
the sizes, so that none can overlap or leave the file. Anyone may have made a file: everything is
checked when it is opened, and again by native/ngram_table.cpp where it is followed.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foredraft.core.errors import ModelError
from foredraft.drafters.ngram_blend import MAX_NEXT, MAX_ORDER, MAX_OWN_ORDER, Layout, Next
from foredraft.models.untrusted import open_regular, quoted, unique_keys

if TYPE_CHECKING:
    from foredraft import _native

MAGIC = b"FDNGRAM1"
MAX_HEADER = 2**16
MAX_ENTRIES = 2**31  # of an array
MAX_OWN_ORDERS = 16
_ALIGNMENT = 8
_SMALL_VOCABULARY = 2**16
_MAX_VOCABULARY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself."""

    vocab_size: int
    target: str
    target_sha256: str
    own_orders: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]  # of each order: contexts, what follows them
    sha256: str  # of all that comes behind the header
    provenance: Mapping[str, str]

    @property
    def layout(self) -> Layout:
        return Layout(len(self.sizes), self.own_orders)


@dataclass(frozen=True, slots=True)
class Level:
    """The contexts of one length; the module's docstring says what each array is."""

    tokens: NDArray[Any]
    totals: NDArray[np.uint8]
    next_starts: NDArray[np.uint32]
    next_tokens: NDArray[Any]
    next_shares: NDArray[np.uint8]
    child_starts: NDArray[np.uint32] | None

    def arrays(self) -> list[NDArray[Any]]:
        """All of them, in the file's order."""
        found = (getattr(self, each.name) for each in fields(self))
        return [array for array in found if array is not None]


class NgramTableFile:
    """A table, mapped; it is good as long as this object is there."""

    def __init__(self, header: Header, weights: NDArray[np.float32], levels: list[Level]) -> None:
        self.header = header
        self.layout = header.layout
        self.weights = weights
        self.levels = levels

    @classmethod
    def open(cls, path: Path) -> NgramTableFile:
        """Map a file. Raises ModelError, one line, for one that is no table or a broken one."""
        with open_regular(path) as file:
            try:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise ModelError(f"{path}: cannot be mapped ({error})") from error
        try:
            return cls._read(data)
        except _BrokenError as error:
            raise ModelError(f"{path}: no n-gram table that can be read: {error}") from None

    @classmethod
    def _read(cls, data: mmap.mmap) -> NgramTableFile:
        header, start = _header(data)
        places, end = _places(header, start)
        _check(len(data) == end, f"it has {len(data)} bytes, its header asks for {end}")
        digest = hashlib.sha256(memoryview(data)[start:]).hexdigest()
        _check(digest == header.sha256, "its content doesn't have the checksum in its header")
        weights, *rest = [
            np.frombuffer(data, dtype, count, offset) for dtype, count, offset in places
        ]
        _check(bool(np.isfinite(weights).all()), "a weight is no number")
        levels = []
        for order in range(len(header.sizes)):
            tokens, totals, starts, following, shares, *rest = rest
            children = rest.pop(0) if order + 1 < len(header.sizes) else None
            levels.append(Level(tokens, totals, starts, following, shares, children))
        _check_levels(levels, header.vocab_size)
        return cls(header, weights, levels)

    @property
    def num_bytes(self) -> int:
        """Of all arrays."""
        arrays = [array for level in self.levels for array in level.arrays()]
        return self.weights.nbytes + sum(array.nbytes for array in arrays)

    def find(self, context: Sequence[int]) -> list[Next]:
        """For the endings of a context, from one token up to as many as the table knows."""
        found: list[Next] = []
        low, high = 0, len(self.levels[0].tokens)
        for level, token in zip(self.levels, reversed(context), strict=False):
            node = low + int(np.searchsorted(level.tokens[low:high], token))
            if node == high or level.tokens[node] != token:
                break
            first, last = (int(at) for at in level.next_starts[node : node + 2])
            found.append(
                Next(
                    total_of(int(level.totals[node])),
                    level.next_tokens[first:last].tolist(),
                    level.next_shares[first:last].tolist(),
                )
            )
            if level.child_starts is not None:
                low, high = (int(at) for at in level.child_starts[node : node + 2])
        return found

    def native(self) -> _native.NgramTable:
        """The compiled reader of the same memory. ImportError where there is none."""
        from foredraft._native import NgramTable

        levels = []
        for level in self.levels:
            children = level.child_starts
            levels.append(
                (
                    level.tokens.ctypes.data,
                    level.totals.ctypes.data,
                    level.next_starts.ctypes.data,
                    level.next_tokens.ctypes.data,
                    level.next_shares.ctypes.data,
                    0 if children is None else children.ctypes.data,
                    len(level.tokens),
                    len(level.next_tokens),
                )
            )
        wide = self.header.vocab_size > _SMALL_VOCABULARY
        return NgramTable(wide, levels, list(self.layout.own_orders), self.weights.tolist())


def total_of(code: int) -> int:
    """What a code stands for: itself up to 15, then eight steps to a doubling."""
    return code if code < 16 else (8 + (code & 7)) << ((code >> 3) - 1)


def total_code(total: int) -> int:
    """The code of the largest total that is not above this one."""
    if total < 16:
        return total
    doublings = total.bit_length() - 4
    return min(255, 8 * (doublings + 1) + (total >> doublings) - 8)


def token_type(vocab_size: int) -> np.dtype[Any]:
    """Of the ids as stored."""
    return np.dtype("<u2" if vocab_size <= _SMALL_VOCABULARY else "<u4")


def write_table(
    path: Path, header: Header, weights: NDArray[np.float32], levels: Sequence[Level]
) -> None:
    """Write a table, all of it or nothing; sizes and checksum of `header` are those of the arrays.

    Raises OSError, and ModelError for arrays that a reader would refuse.
    """
    arrays = [weights.astype("<f4"), *(array for level in levels for array in level.arrays())]
    content = b"".join(_padded(array.tobytes()) for array in arrays)
    values = asdict(header)
    values["sizes"] = [(len(level.tokens), len(level.next_tokens)) for level in levels]
    values["sha256"] = hashlib.sha256(content).hexdigest()
    text = json.dumps(values).encode()
    start = len(MAGIC) + 8
    text += b" " * (-(start + len(text)) % _ALIGNMENT)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(MAGIC + len(text).to_bytes(8, "little") + text + content)
    NgramTableFile.open(partial)
    partial.replace(path)


class _BrokenError(Exception):
    """What is wrong with a file."""


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _BrokenError(otherwise)


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % _ALIGNMENT)


def _header(data: mmap.mmap) -> tuple[Header, int]:
    """The header and where the arrays begin."""
    _check(data[:8] == MAGIC, f"it begins with {data[:8]!r}, a table with {MAGIC!r}")
    length = int.from_bytes(data[8:16], "little")
    start = 16 + length
    _check(16 < start <= min(len(data), 16 + MAX_HEADER), f"its header has {length} bytes")
    _check(start % _ALIGNMENT == 0, f"its header has {length} bytes, no multiple of {_ALIGNMENT}")
    try:
        values = json.loads(data[16:start], object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise _BrokenError(f"its header is no JSON ({error})") from None
    names = {each.name for each in fields(Header)}
    _check(isinstance(values, dict), "its header is no JSON object")
    unlike = sorted(values.keys() ^ names)
    _check(not unlike, f"its header lacks fields or has unknown ones: {quoted(unlike)}")
    _check_header(values)
    sizes = tuple((size[0], size[1]) for size in values["sizes"])
    return Header(**values | {"sizes": sizes, "own_orders": tuple(values["own_orders"])}), start


def _check_header(values: Mapping[str, Any]) -> None:
    vocab_size, sizes, orders = values["vocab_size"], values["sizes"], values["own_orders"]
    _check(_is_count(vocab_size, 1, _MAX_VOCABULARY), f"vocab_size {quoted(vocab_size)}")
    for name in ("target", "target_sha256", "sha256"):
        _check(isinstance(values[name], str), f"{name} {quoted(values[name])}")
    rising = isinstance(orders, list) and len(orders) <= MAX_OWN_ORDERS
    rising = rising and all(_is_count(order, 1, MAX_OWN_ORDER) for order in orders)
    _check(rising and sorted(set(orders)) == orders, f"own_orders {quoted(orders)}")
    pairs = isinstance(sizes, list) and 1 <= len(sizes) <= MAX_ORDER
    pairs = pairs and all(
        isinstance(size, list)
        and len(size) == 2
        and all(_is_count(each, 0, MAX_ENTRIES) for each in size)
        for size in sizes
    )
    _check(pairs, f"sizes {quoted(sizes)}")
    provenance = values["provenance"]
    texts = isinstance(provenance, dict) and all(
        isinstance(value, str) for value in provenance.values()
    )
    _check(texts, "provenance is no object of texts")


def _is_count(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _places(header: Header, start: int) -> tuple[list[tuple[np.dtype[Any], int, int]], int]:
    """Type, entries and offset of every array, and where the last one ends."""
    ids, byte, index = token_type(header.vocab_size), np.dtype("u1"), np.dtype("<u4")
    wanted: list[tuple[np.dtype[Any], int]] = [(np.dtype("<f4"), header.layout.num_cells)]
    for order, (nodes, following) in enumerate(header.sizes):
        wanted += [(ids, nodes), (byte, nodes), (index, nodes + 1)]
        wanted += [(ids, following), (byte, following)]
        if order + 1 < len(header.sizes):
            wanted.append((index, nodes + 1))
    places = []
    for dtype, count in wanted:
        places.append((dtype, count, start))
        start += count * dtype.itemsize
        start += -start % _ALIGNMENT
    return places, start


def _check_levels(levels: Sequence[Level], vocab_size: int) -> None:
    parents = np.array([0, len(levels[0].tokens)], np.int64)  # where each one's children begin
    for order, level in enumerate(levels, start=1):
        what = f"contexts of {order}"
        for ids in (level.tokens, level.next_tokens):
            _check(not len(ids) or int(ids.max()) < vocab_size, f"{what}: an id is too large")
        rising = np.diff(level.tokens.astype(np.int64)) > 0
        rising[parents[1:-1][(parents[1:-1] > 0) & (parents[1:-1] < len(level.tokens))] - 1] = True
        _check(bool(rising.all()), f"{what}: siblings don't rise")
        _check_starts(level.next_starts, len(level.next_tokens), what)
        counts = np.diff(level.next_starts.astype(np.int64))
        _check(not len(counts) or int(counts.max()) <= MAX_NEXT, f"{what}: too much follows one")
        if level.child_starts is not None:
            _check_starts(level.child_starts, len(levels[order].tokens), what)
            parents = level.child_starts.astype(np.int64)


def _check_starts(starts: NDArray[np.uint32], size: int, what: str) -> None:
    values = starts.astype(np.int64)
    inside = int(values[0]) == 0 and int(values[-1]) == size and bool((np.diff(values) >= 0).all())
    _check(inside, f"{what}: it points outside")
