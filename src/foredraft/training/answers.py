"""What a target answered, kept as token ids: the data that drafters are made of.

Knows the files; knows neither model nor training. The format is "foredraft-answers-1", a directory:

    manifest.json         whose answers these are and how they were drawn (`Manifest`)
    shards/NNNNN.tokens   little-endian uint16, uint32 where the vocabulary has more than 65,536
                          ids: of each sequence the prompt's ids, then the answer's
    shards/NNNNN.index    little-endian int64 [n, 5]: where it starts in the tokens, prompt tokens,
                          answer tokens, the prompt's number, temperature in thousandths

Both files of a shard are mapped into memory, not read. A shard appears whole or not at all, the
index last, so that a run which was stopped goes on behind the last index.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.core.errors import UserError

FORMAT = "foredraft-answers-1"
_COLUMNS = 5
_SMALL_VOCABULARY = 2**16  # ids that two bytes hold
_THOUSANDTHS = 1000


@dataclass(frozen=True, slots=True)
class Manifest:
    """Whose answers, to which prompts, drawn how."""

    target: str  # as the user called it
    target_sha256: str  # `models.fingerprint`
    dtype: str  # of the weights that answered
    vocab_size: int
    template_sha256: str
    prompts_sha256: str
    num_prompts: int  # of the file; prompts that the target wrote itself are numbered behind them
    own_prompts: int
    temperatures: tuple[float, ...]
    max_tokens: int
    seed: int
    shard_size: int  # sequences
    versions: Mapping[str, str]

    @property
    def token_type(self) -> np.dtype[Any]:
        """Of the ids as stored."""
        return np.dtype("<u2" if self.vocab_size <= _SMALL_VOCABULARY else "<u4")

    def difference(self, other: Manifest) -> str | None:
        """The first field, versions apart, that makes the data of two manifests unlike."""
        names = (each.name for each in fields(self) if each.name not in ("versions", "target"))
        return next((name for name in names if getattr(self, name) != getattr(other, name)), None)


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt and what the target said to it; the end token included where it came."""

    prompt: NDArray[Any]  # [P] ids
    answer: NDArray[Any]  # [A] ids
    prompt_number: int
    temperature: float

    @property
    def tokens(self) -> NDArray[Any]:
        """[P + A]."""
        return np.concatenate([self.prompt, self.answer])


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sequence is kept."""

    shard: int
    start: int  # in the shard's tokens


class Answers(Sequence[Answer]):
    """The answers of a directory, or a part of them."""

    def __init__(self, manifest: Manifest, shards: Sequence[_Shard], rows: NDArray[Any]) -> None:
        self.manifest = manifest
        self._shards = shards
        self._rows = rows  # [n, 2]: shard, sequence in it

    @classmethod
    def open(cls, directory: Path) -> Answers:
        """Map all shards that are complete.

        Raises UserError for a directory that holds none, and for files that contradict each other
        or the manifest.
        """
        manifest = read_manifest(directory)
        shards = [_Shard(path, manifest) for path in sorted((directory / "shards").glob("*.index"))]
        if not shards:
            raise UserError(f"{str(directory)!r} holds no answers yet")
        rows = [
            np.column_stack([np.full(len(shard.index), i), np.arange(len(shard.index))])
            for i, shard in enumerate(shards)
        ]
        return cls(manifest, shards, np.concatenate(rows))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: Any) -> Any:
        """One `Answer`, or for a slice the `Answers` of it."""
        if isinstance(i, slice):
            return Answers(self.manifest, self._shards, self._rows[i])
        shard, row = self._rows[i]
        return self._shards[shard][row]

    def place(self, i: int) -> Place:
        """Where answer `i` is kept."""
        shard, row = (int(each) for each in self._rows[i])
        return Place(self._shards[shard].number, int(self._shards[shard].index[row, 0]))

    @property
    def shards(self) -> tuple[int, ...]:
        """Numbers of the shards that hold any of these answers, rising."""
        return tuple(sorted({self._shards[shard].number for shard in set(self._rows[:, 0])}))

    def __iter__(self) -> Iterator[Answer]:
        return (self._shards[shard][row] for shard, row in self._rows)

    def of_shard(self, number: int) -> Answers:
        """Those of one shard."""
        rows = [self._shards[shard].number == number for shard in self._rows[:, 0]]
        return Answers(self.manifest, self._shards, self._rows[np.array(rows, dtype=bool)])

    @property
    def num_tokens(self) -> int:
        """Of prompts and answers."""
        return int(sum(self._shards[shard].index[row, 1:3].sum() for shard, row in self._rows))

    @property
    def num_answer_tokens(self) -> int:
        return int(sum(self._shards[shard].index[row, 2] for shard, row in self._rows))

    def split(self, held_out: float = 0.05) -> tuple[Answers, Answers]:
        """(to train on, held out), by a hash of the prompt's number: all answers to a prompt are
        on one side, and stay there as answers are added.
        """
        numbers = [self._shards[shard].index[row, 3] for shard, row in self._rows]
        away = np.array([_share(int(number)) < held_out for number in numbers], dtype=bool)
        return (
            Answers(self.manifest, self._shards, self._rows[~away]),
            Answers(self.manifest, self._shards, self._rows[away]),
        )


class _Shard:
    """One shard, mapped."""

    def __init__(self, index: Path, manifest: Manifest) -> None:
        tokens = index.with_suffix(".tokens")
        self.number = int(index.stem)
        try:
            self.index = _mapped(index, np.dtype("<i8")).reshape(-1, _COLUMNS)
            self.tokens = _mapped(tokens, manifest.token_type)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read shard {str(index)!r}: {error}") from None
        self._check(index, manifest.vocab_size)

    def _check(self, path: Path, vocab_size: int) -> None:
        starts, prompts, answers = self.index[:, 0], self.index[:, 1], self.index[:, 2]
        size = len(self.tokens)
        inside = (self.index >= 0).all() and (self.index[:, :3] <= size).all()
        if not inside or (starts + prompts + answers > size).any():
            raise UserError(f"shard {str(path)!r} names tokens that its .tokens file doesn't hold")
        if size and int(self.tokens.max()) >= vocab_size:
            raise UserError(
                f"shard {str(path)!r} holds token {int(self.tokens.max())}; the manifest's "
                f"vocabulary has {vocab_size}"
            )

    def __getitem__(self, row: int) -> Answer:
        start, prompt, answer, number, thousandths = (int(value) for value in self.index[row])
        middle = start + prompt
        return Answer(
            self.tokens[start:middle],
            self.tokens[middle : middle + answer],
            number,
            thousandths / _THOUSANDTHS,
        )


def _mapped(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    if path.stat().st_size == 0:  # which can't be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r")


def _share(number: int) -> float:
    digest = hashlib.sha256(str(number).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a directory of answers. Raises UserError that says what is wrong with it."""
    path = directory / "manifest.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{str(directory)!r} holds no answers: `foredraft train data` makes them"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {str(path)!r}: {error}") from None
    found = values.pop("format", None) if isinstance(values, dict) else None
    if found != FORMAT:
        raise UserError(f"{str(path)!r} has format {found!r}; valid is {FORMAT!r}")
    names = {each.name for each in fields(Manifest)}
    if values.keys() != names:
        unlike = sorted(values.keys() ^ names)
        raise UserError(f"{str(path)!r} lacks fields or has unknown ones: {', '.join(unlike)}")
    if type(values["vocab_size"]) is not int or values["vocab_size"] < 1:
        raise UserError(f"{str(path)!r}: vocab_size must be a positive integer")
    return Manifest(**{**values, "temperatures": tuple(values["temperatures"])})


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest, all of it or nothing. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1)
    _write(directory / "manifest.json", f"{text}\n".encode())


def has_shard(directory: Path, number: int) -> bool:
    """Whether this shard is complete."""
    return _shard_path(directory, number).exists()


def write_shard(
    directory: Path, number: int, manifest: Manifest, answers: Sequence[Answer]
) -> None:
    """Write shard `number`; it is there when its index is. Raises OSError."""
    index, start = [], 0
    for each in answers:
        thousandths = round(each.temperature * _THOUSANDTHS)
        index.append((start, len(each.prompt), len(each.answer), each.prompt_number, thousandths))
        start += len(each.prompt) + len(each.answer)
    path = _shard_path(directory, number)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = [each.tokens.astype(manifest.token_type) for each in answers]
    _write(path.with_suffix(".tokens"), b"".join(each.tobytes() for each in tokens))
    _write(path, np.array(index, "<i8").reshape(-1, _COLUMNS).tobytes())


def _shard_path(directory: Path, number: int) -> Path:
    return directory / "shards" / f"{number:05d}.index"


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)
