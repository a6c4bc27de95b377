"""`foredraft export`: what it prints, what it refuses, and a draft that the command then uses."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli import main as cli
from foredraft.cli.main import main
from foredraft.models import export
from foredraft.models.load import load_model

CODE = "import sys; from foredraft.cli.main import main; sys.exit(main())"


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    written = capsys.readouterr()
    assert written.err == ""
    found: dict[str, Any] = json.loads(written.out)
    return found


def _fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["export", *arguments]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.count("\n") == 1
    return written.err


def test_json_says_what_was_written(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = tmp_path / "draft"
    facts = _json(capsys, "export", str(tiny), str(draft), "--layers", "1")
    loaded = load_model(draft, dtype="float32", kernels="reference")
    assert facts == {
        "model": str(tiny),
        "directory": str(draft),
        "layers": 1,
        "source_layers": 2,
        "parameters": loaded.weight_bytes // 4,
        "bytes": sum(file.stat().st_size for file in draft.iterdir()),
    }
    assert loaded.config.num_layers == 1


def test_the_printed_hint_drafts(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = tmp_path / "it's a draft"
    arguments = ["export", str(tiny), str(draft), "--layers", "2", "--dtype", "bfloat16"]
    assert main(arguments) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{draft}: 2 of 2 layers, [\d,]+ parameters, [\d.]+ MiB", first)
    hint = second.removeprefix("draft with it: ")
    unquoted = subprocess.run(
        ["sh", "-c", f'for word in {hint}; do echo "$word"; done'],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    options = ["--max-tokens", "8", "--ignore-eos", "--dtype", "bfloat16"]
    generated = _json(capsys, "generate", str(tiny), "hello there", *options, *unquoted)
    counts = generated["outputs"][0]["metrics"]["speculative_decoding"]
    assert counts["num_accepted_draft_tokens"] == counts["num_draft_tokens"] > 0


def test_a_mistake_is_one_line(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, draft = str(tiny), str(tmp_path / "draft")
    (tmp_path / "mine").write_text("mine")
    for arguments, words in (
        ((model, draft, "--layers", "3"), "has 2 layers; expected 1 to 2, got 3"),
        ((model, draft, "--layers", "0"), "has 2 layers; expected 1 to 2, got 0"),
        ((model, draft, "--layers", "x"), "'--layers'"),
        ((model, draft), "--layers"),
        ((model, "--layers", "1"), "DIRECTORY"),
        ((model, draft, "--layers", "1", "--dtype", "float64"), "'float64'"),
        ((model, str(tmp_path), "--layers", "1"), "is not empty; --force replaces an earlier"),
        ((model, str(tmp_path), "--layers", "1", "--force"), "it holds mine"),
        ((model, str(tmp_path / "mine"), "--layers", "1"), "Not a directory"),
        ((model, model, "--layers", "1", "--force"), "no earlier export"),
        (("absent", draft, "--layers", "1"), "'absent' does not exist"),
        ((str(tmp_path), draft, "--layers", "1"), "config.json"),
    ):
        assert words in _fails(capsys, *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_directory_that_is_taken_is_known_before_a_model_is_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.cli.download.fetch_once", None)  # never reached
    (tmp_path / "mine").write_text("mine")
    assert "is not empty" in _fails(capsys, "smollm2-135m", str(tmp_path), "--layers", "1")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            cli.USER_ERROR,
            "foredraft: cannot write {}: No space left on device",
        ),
        (KeyboardInterrupt(), cli.INTERRUPTED, ""),
    ],
)
def test_a_full_disk_and_ctrl_c_leave_nothing(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str,
) -> None:  # fmt: skip
    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(export, "write_safetensors", failing)
    draft = tmp_path / "draft"
    assert main(["export", str(tiny), str(draft), "--layers", "1"]) == code
    written = capsys.readouterr()
    assert (written.out, written.err.strip()) == ("", words.format(draft))
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_sees_progress(tiny: Path, tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-c", CODE, "export", str(tiny), str(tmp_path / "draft")]
    with subprocess.Popen(
        [*command, "--layers", "2"], stdout=subprocess.PIPE, stderr=follower, text=True,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"},
    ) as run:  # fmt: skip
        output, _ = run.communicate()
    os.close(follower)
    shown = os.read(leader, 65536).decode()
    os.close(leader)
    assert run.returncode == 0
    assert "writing" in shown
    assert "kB" in shown
    assert output.startswith(f"{tmp_path / 'draft'}: 2 of 2 layers")
