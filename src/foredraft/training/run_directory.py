"""What a training run keeps on disk: what was asked, a log, its last checkpoint, its best student.

Knows files; knows no student and no optimiser. A directory:

    run.json        what was asked; a run goes on only if the same is asked again
    log.jsonl       a line for each record, in the order of steps
    checkpoint/     state.json and tensors.safetensors, replaced as one
    best/           the best student so far, as an engine loads it
    lock            held by the process whose run is going on
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from foredraft.core.errors import UserError
from foredraft.models.atomic_directory import appearing
from foredraft.models.hf_writer import write_json
from foredraft.models.safetensors_writer import save_tensors

FORMAT = "foredraft-training-1"
_ASKED, _LOG, _STATE, _TENSORS = "run.json", "log.jsonl", "state.json", "tensors.safetensors"
_LOCK = "lock"
_LONGEST = 60  # characters of a value in an error


class RunDirectory:
    """One run's files."""

    def __init__(self, path: Path, asked: Mapping[str, Any]) -> None:
        """Take the directory for a run that was asked for by `asked` (JSON values).

        Raises UserError where another run, or something else, is there, where the same run is
        going on in another process, and where it can't be written.
        """
        self.path = path
        self.best = path / "best"
        self._checkpoint = path / "checkpoint"
        self._log = path / _LOG
        values = json.loads(json.dumps({"format": FORMAT, **asked}))
        try:
            if (path / _ASKED).exists():
                _check_same(path / _ASKED, values)
            elif path.exists() and any(path.iterdir()):
                raise UserError(f"{str(path)!r} is not empty and holds no training run")
            else:
                path.mkdir(parents=True, exist_ok=True)
                write_json(path / _ASKED, values)
            self._held = _alone_with(path)
        except OSError as error:
            raise UserError(f"cannot write {str(path)!r}: {error.strerror}") from None

    def records(self) -> list[dict[str, Any]]:
        """The log's lines. Raises UserError for a damaged one."""
        return read_log(self.path)

    def rewind_log(self, step: int) -> None:
        """Drop what was logged behind `step`, which will be logged again. Raises OSError, and
        UserError for lines that are none of a run's.
        """
        if self._log.exists():
            kept = [line for line in self.records() if line["step"] <= step]
            partial = self._log.with_name(f".{_LOG}")
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")
            partial.replace(self._log)

    def log(self, record: Mapping[str, Any]) -> None:
        """Add a line. Raises OSError."""
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def save(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Replace the checkpoint. Raises OSError."""
        stored = {name: each.detach().cpu().contiguous() for name, each in tensors.items()}
        with appearing(self._checkpoint, lambda: None) as made:
            write_json(made / _STATE, state)
            save_tensors(made / _TENSORS, stored)

    def load(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The checkpoint's state and tensors; None: there is none yet. Raises UserError."""
        if not self._checkpoint.exists():
            return None
        try:
            state = json.loads((self._checkpoint / _STATE).read_text("utf-8"))
            return state, load_file(self._checkpoint / _TENSORS)
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(f"cannot read {str(self._checkpoint)!r}: {error}") from None


def _alone_with(path: Path) -> IO[bytes]:
    """The lock of a directory, held until the process ends."""
    lock = (path / _LOCK).open("wb")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # which one is up to the system
        lock.close()
        raise UserError(f"a run is going on in {str(path)!r}: wait for it, or stop it") from None
    return lock


def read_log(path: Path) -> list[dict[str, Any]]:
    """What a run has logged so far, also while it goes on. Raises UserError."""
    try:
        return _lines(path / _LOG) if (path / _LOG).exists() else []
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {str(path / _LOG)!r}: {error}") from None


def _lines(log: Path) -> list[dict[str, Any]]:
    """All whole lines: the last one of a run that was killed may be half written."""
    text = log.read_text("utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _check_same(path: Path, values: Mapping[str, Any]) -> None:
    try:
        there = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"cannot read {str(path)!r}: {error}") from None
    if not isinstance(there, dict) or there.get("format") != FORMAT:
        raise UserError(f"{str(path)!r} is not of a training run")
    for name in [*values, *(name for name in there if name not in values)]:
        if name != "versions" and there.get(name) != values.get(name):
            was, now = (_shown(each.get(name)) for each in (there, values))
            raise UserError(
                f"{str(path.parent)!r} holds a run with {name} {was}, asked for is {now}: ask for "
                "the same to go on with it, or choose another directory"
            )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
