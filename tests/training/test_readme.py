"""The README's example of training runs as it is written, with fewer answers and steps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from foredraft.cli.main import main

README = Path(__file__).resolve().parents[2] / "README.md"
SMALLER = {"--own-prompts 400": "--own-prompts 60", "--epochs 12": "--steps 4 --held-out 0.15"}


def _commands() -> list[str]:
    section = README.read_text().split("## Train a drafter\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```sh\n(.*?)```", section, flags=re.DOTALL)
    for whole, smaller in SMALLER.items():
        assert whole in block
        block = block.replace(whole, smaller)
    return str(block).splitlines()


def test_the_example_trains_a_head_that_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in _commands():
        program, *arguments = shlex.split(line)
        if program == "python":
            assert arguments[0] == "-c"
            exec(arguments[1], {})
        else:
            assert program == "foredraft"
            assert main(arguments) == 0, line
    written = capsys.readouterr().out
    assert "best at step" in written
    assert "eagle3, " in written
    assert (tmp_path / "build" / "head" / "best" / "config.json").exists()
