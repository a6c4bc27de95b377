"""What a target held in mind at every token of its answers: hidden states, kept beside the ids.

Knows the files; knows neither model nor student. A directory "features" beside the shards of
`answers`, format "foredraft-features-1":

    features.json        whose they are, of which depths (`Kept`)
    NNNNN.hidden         bfloat16 [tokens, (depths + 1) H], little-endian: what enters each layer
                         that was asked for, then what the final norm reads; a row for each token
    NNNNN.normaliser     float32 [tokens]: log of the sum of the exponentials of all its logits

Both are mapped into memory. A shard's normaliser is written last, so that a run which was stopped
goes on behind the last one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.core.errors import UserError
from foredraft.models.hf_writer import write_json
from foredraft.training.answers import Place

FORMAT = "foredraft-features-1"
_STATED = "features.json"


@dataclass(frozen=True, slots=True)
class Kept:
    """What was kept of which target."""

    target_sha256: str
    depths: tuple[int, ...]  # rising
    hidden_size: int

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return (len(self.depths) + 1) * self.hidden_size


class Features:
    """The features of a directory of answers, as far as they are there."""

    def __init__(self, directory: Path, kept: Kept) -> None:
        self.kept = kept
        self._directory = directory
        self._shards: dict[int, tuple[NDArray[Any], NDArray[Any]]] = {}

    @classmethod
    def open(cls, answers: Path, target_sha256: str) -> Features | None:
        """Those beside a directory of answers; None: there are none.

        Raises UserError for another target's and for a statement that can't be read.
        """
        directory = _directory(answers)
        path = directory / _STATED
        if not path.exists():
            return None
        kept = _read(path)
        if kept.target_sha256 != target_sha256:
            raise UserError(
                f"{str(directory)!r} holds features of another model, checksum "
                f"{kept.target_sha256[:12]}; that of the target is {target_sha256[:12]}"
            )
        return cls(directory, kept)

    @classmethod
    def begin(cls, answers: Path, kept: Kept) -> Features:
        """Take the directory for `kept`. Raises UserError where something else is kept there."""
        directory = _directory(answers)
        found = cls.open(answers, kept.target_sha256)
        if found is None:
            directory.mkdir(exist_ok=True)
            write_json(directory / _STATED, {"format": FORMAT, **asdict(kept)})
        elif found.kept != kept:
            raise UserError(
                f"{str(directory)!r} holds features of depths {list(found.kept.depths)}, asked "
                f"for are {list(kept.depths)}: remove it, or ask for the same"
            )
        return cls(directory, kept)

    def covers(self, shards: Sequence[int]) -> bool:
        """Whether these shards are whole."""
        return all(self._paths(shard)[1].exists() for shard in shards)

    def read(self, place: Place, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` rows of a sequence: hidden states `[length, width]` in bfloat16, and
        normalisers `[length]`. Raises UserError for files shorter than the tokens.
        """
        hidden, normalisers = self._shard(place.shard)
        rows = slice(place.start, place.start + length)
        found = torch.from_numpy(hidden[rows].copy()).view(torch.bfloat16)
        if len(found) != length:
            raise UserError(f"{str(self._paths(place.shard)[0])!r} is shorter than its answers")
        return found, torch.from_numpy(normalisers[rows].copy())

    def write(self, shard: int, hidden: Tensor, normalisers: Tensor) -> None:
        """Keep the rows of all tokens of a shard. Raises OSError."""
        paths = self._paths(shard)
        contents = (hidden.to(torch.bfloat16).view(torch.int16), normalisers.to(torch.float32))
        for path, content in zip(paths, contents, strict=True):
            partial = path.with_name(f".{path.name}.partial")
            content.numpy().tofile(partial)
            partial.replace(path)

    def _shard(self, number: int) -> tuple[NDArray[Any], NDArray[Any]]:
        if number not in self._shards:
            hidden, normaliser = self._paths(number)
            try:
                self._shards[number] = (
                    np.memmap(hidden, "<i2", mode="r").reshape(-1, self.kept.width),
                    np.memmap(normaliser, "<f4", mode="r"),
                )
            except (OSError, ValueError) as error:
                raise UserError(f"cannot read {str(hidden)!r}: {error}") from None
        return self._shards[number]

    def _paths(self, shard: int) -> tuple[Path, Path]:
        first = self._directory / f"{shard:05d}.hidden"
        return first, first.with_suffix(".normaliser")


def _directory(answers: Path) -> Path:
    return answers / "features"


def _read(path: Path) -> Kept:
    try:
        values = json.loads(path.read_text("utf-8"))
        if values.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        depths = tuple(int(depth) for depth in values.pop("depths"))
        return Kept(depths=depths, **values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"cannot read {str(path)!r}: {error}") from None
