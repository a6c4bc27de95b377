"""Where an export may go: what is not one of ours is kept, and nothing is left half made."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from foredraft.core.errors import ModelError
from foredraft.models.export import export_layers
from foredraft.models.load import load_model
from foredraft.testing.models import write_tiny_checkpoint


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "source", num_layers=4)


def files_below(directory: Path) -> dict[str, bytes]:
    found = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def test_an_empty_directory_is_filled(source: Path, tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "link").symlink_to("draft")
    export_layers(source, tmp_path / "link", 1)
    assert (tmp_path / "link").is_symlink()
    assert load_model(tmp_path / "draft").config.num_layers == 1


def test_an_earlier_export_is_replaced_by_force_alone(source: Path, tmp_path: Path) -> None:
    draft = export_layers(source, tmp_path / "draft", 1).directory
    before = files_below(draft)
    with pytest.raises(ModelError, match="draft is not empty; --force replaces an earlier export"):
        export_layers(source, draft, 2)
    assert files_below(draft) == before
    export_layers(source, draft, 2, force=True)
    assert load_model(draft).config.num_layers == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "source"]


def test_what_is_no_export_is_never_touched(source: Path, tmp_path: Path) -> None:
    draft = export_layers(source, tmp_path / "draft", 1).directory
    (draft / "notes.txt").write_text("mine")
    model = write_tiny_checkpoint(tmp_path / "model")
    folder = tmp_path / "folder"
    (folder / "config.json").mkdir(parents=True)
    file = tmp_path / "file"
    file.write_text("mine")
    before = files_below(tmp_path)
    for directory, words in (
        (draft, "no earlier export and stays as it is: it holds notes.txt"),
        (model, "no earlier export and stays as it is: its model.safetensors"),
        (folder, "no earlier export and stays as it is: its model.safetensors"),
        (file, "Not a directory"),
        (file / "below", "Not a directory"),
        (source, "the model itself"),
    ):
        with pytest.raises(ModelError) as caught:
            export_layers(source, directory, 1, force=True)
        assert words in str(caught.value) or directory == source
        assert str(directory) in str(caught.value)
    assert files_below(tmp_path) == before


def test_a_path_that_leads_nowhere_is_one_line(source: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for directory in (tmp_path / "loop", tmp_path / "loop" / "x", "~no-such-user/x"):
        with pytest.raises(ModelError) as caught:
            export_layers(source, directory, 1)
        assert str(directory) in str(caught.value)


def test_an_export_is_not_made_from_itself(source: Path, tmp_path: Path) -> None:
    draft = export_layers(source, tmp_path / "draft", 2).directory
    before = files_below(draft)
    with pytest.raises(ModelError, match="is the model itself"):
        export_layers(draft, draft, 1, force=True)
    assert files_below(draft) == before
    again = export_layers(draft, tmp_path / "again", 1).directory
    once = export_layers(source, tmp_path / "once", 1).directory
    ours, expected = (load_file(path / "model.safetensors") for path in (again, once))
    assert ours.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.items())


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()]
)
def test_a_failure_half_way_leaves_everything_as_it_was(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    draft = export_layers(source, tmp_path / "draft", 1).directory
    before = files_below(tmp_path)

    def failing(done: int, total: int) -> None:
        assert 0 < done <= total
        raise error

    for directory in (draft, tmp_path / "new", tmp_path / "deep" / "er" / "new"):
        with pytest.raises((ModelError, KeyboardInterrupt)) as caught:
            export_layers(source, directory, 2, force=True, progress=failing)
        if isinstance(error, OSError):
            assert str(caught.value) == f"cannot write {directory}: No space left on device"
    assert files_below(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "source"]


@pytest.mark.parametrize("error", [OSError(errno.EBUSY, "busy"), KeyboardInterrupt()])
def test_an_earlier_export_outlives_a_failure_to_replace_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    draft = export_layers(source, tmp_path / "draft", 1).directory
    before, rename = files_below(tmp_path), Path.rename

    def failing(path: Path, target: Path) -> Path:
        if path.name == "made":
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises((ModelError, KeyboardInterrupt)):
        export_layers(source, draft, 2, force=True)
    assert files_below(tmp_path) == before


def test_a_directory_that_was_filled_meanwhile_is_kept(source: Path, tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()

    def interfering(done: int, total: int) -> None:
        (tmp_path / "draft" / "mine").write_text("mine")

    with pytest.raises(ModelError, match="is not empty"):
        export_layers(source, tmp_path / "draft", 1, progress=interfering)
    assert files_below(tmp_path / "draft") == {"mine": b"mine"}


def test_progress_is_in_bytes_of_tensors(source: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    written = export_layers(source, tmp_path / "d", 2, progress=lambda *each: told.append(each))
    assert told[-1] == (4 * written.num_parameters, 4 * written.num_parameters)
    assert told == sorted(told)
