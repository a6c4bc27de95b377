"""What every reader of a model's files needs, because anyone may have made them.

Knows how to open a file that might be no file, which names fit into an error's one line, and what
is often taken for a model's weights; knows no format.
"""

from __future__ import annotations

import os
import reprlib
import stat
from pathlib import Path
from typing import Any, BinaryIO

from foredraft.core.errors import ModelError

MAX_NAME = 255  # characters of a key or of a tensor's name; the longest in use have half of that
_SHOWN = 80
_REPR = reprlib.Repr()  # unlike repr, it does not fail on what is nested deeply
_REPR.maxstring = _REPR.maxother = _SHOWN

# How files begin that are given as weights by mistake (or on purpose), and what to do about it.
_PICKLE = "a pickle; pickled weights are not read: convert them to safetensors"
_BEGINNINGS = {
    b"PK\x03\x04": "a zip archive, as torch.save writes; pickled weights are not read: "
    "convert them to safetensors",
    **{bytes([0x80, protocol]): _PICKLE for protocol in range(2, 6)},
    b"GGUF": "a GGUF file; name it .gguf and give the file itself as the model",
    b"version https://git-lfs": "a Git LFS pointer; fetch the file itself with git lfs pull",
    b"\x1f\x8b": "a gzip archive; unpack it",
    b"\x89HDF": "an HDF5 file; convert it to safetensors",
    b"<!DOCTYPE": "an HTML page; fetch the file itself",
    b"<html": "an HTML page; fetch the file itself",
}


def open_regular(path: Path) -> BinaryIO:
    """`path` open for reading.

    Raises ModelError where it cannot be read, and for what is no regular file (or a link to one):
    reading a pipe or a terminal would wait for ever.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            return path.open("rb")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{path}: cannot be read ({reason})") from error
    raise ModelError(f"{path}: is a {_kind(mode)}, expected a regular file")


def read_text(path: Path, limit: int) -> str:
    """The text of a regular file of at most `limit` bytes. ModelError for any other."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ModelError(f"{path}: larger than {limit} bytes")
        raw = file.read(size)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not UTF-8 text (byte {error.start})") from error


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, for `object_pairs_hook`. ValueError for a key twice: one of them would win."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"{quoted(key)} appears twice")
            seen.add(key)
    return found


def is_name(text: str) -> bool:
    """Whether `text` can name a thing in an error: not empty, short, printable on one line."""
    return 0 < len(text) <= MAX_NAME and text.isprintable()


def quoted(value: object) -> str:
    """Any value for an error: escaped, on one line, cut where it is long."""
    text = _REPR.repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def taken_for_weights(start: bytes) -> str | None:
    """What a file is that begins with `start`, where that is known and no weights."""
    return next((what for begin, what in _BEGINNINGS.items() if start.startswith(begin)), None)


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "directory",
        stat.S_IFIFO: "pipe",
        stat.S_IFSOCK: "socket",
        stat.S_IFCHR: "device",
        stat.S_IFBLK: "device",
    }
    return kinds.get(stat.S_IFMT(mode), "special file")
