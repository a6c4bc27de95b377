"""`foredraft certify`: its JSON form, table, plot, exit codes and refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from foredraft.bench.certificate.certify import Certificate
from foredraft.bench.certificate.check import Check
from foredraft.cli.certify import CheckTable
from foredraft.cli.main import main
from foredraft.core import rejection

SMALL = ["--draws", "1000", "--max-tokens", "6"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [
        {"id": "a", "task": "chat", "turns": ["hello there"]},
        {"id": "b", "task": "edit", "turns": ["ab ab ab"]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def draft(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A config whose drafter is the target's first layer."""
    directory = tmp_path_factory.mktemp("draft") / "model"
    assert main(["export", str(tiny), str(directory), "--layers", "1"]) == 0
    return json.dumps({"method": "draft_model", "model": str(directory)})


def test_a_pair_passes_with_json_and_a_plot(
    tiny: Path, draft: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "certificate.png"
    arguments = ["certify", str(tiny), "--speculative-config", draft, "--prompts", str(prompts)]
    code = main([*arguments, *SMALL, "--plot", str(plot), "--json"])
    written = capsys.readouterr()
    found: dict[str, Any] = json.loads(written.out)
    assert [check for check in found["checks"] if not check["passed"]] == []
    assert (code, found["passed"], written.err) == (0, True, "")
    assert list(found["checks"][0]) == ["name", "passed", "statistic", "p_value", "detail"]
    assert {"machine", "versions", "revision", "arguments", "date"} <= set(found)
    assert (found["method"], found["rule"], found["prompts"]) == ("draft_model", "standard", 2)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_an_early_exit_passes(
    tiny: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no model to remember beside the target, but layers of it."""
    config = json.dumps({"method": "early_exit", "num_speculative_tokens": 2})
    arguments = ["certify", str(tiny), "--speculative-config", config, "--prompts", str(prompts)]
    code = main([*arguments, *SMALL, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [check for check in found["checks"] if not check["passed"]] == []
    assert (code, found["method"], found["rule"]) == (0, "early_exit", "standard")
    assert any(check["name"].startswith("draft law, ") for check in found["checks"])


def test_a_wrong_rule_fails_with_a_table_and_code_1(
    tiny: Path, draft: str, prompts: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(rejection, "residual", lambda weights, *_: weights.clone())
    arguments = ["certify", str(tiny), "--speculative-config", draft, "--prompts", str(prompts)]
    assert main([*arguments, *SMALL]) == 1
    table = capsys.readouterr().out
    assert "FAILED" in table
    assert "checks FAILED" in table.splitlines()[-1]


def test_a_lossy_rule_is_refused_at_once_and_plainly(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.dumps({"method": "ngram", "rejection_sample_method": "typical"})
    plot = tmp_path / "certificate.png"
    assert main(["certify", str(tiny), "--speculative-config", config, "--plot", str(plot)]) == 1
    assert "lossy" in capsys.readouterr().out
    assert plot.exists()


def test_mistakes_are_one_line(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, words in (
        (("--no-speculation",), "plain decoding needs no certificate"),
        (("--speculative-config", "null"), "plain decoding needs no certificate"),
        (("--num-speculative-tokens", "0"), "num_speculative_tokens is 0"),
        (("--method", "absent"), "unknown speculative method 'absent'"),
        (("--prompts", str(tmp_path / "absent")), "cannot read workload"),
        (("--draws", "10"), "--draws"),
        (("--plot", "certificate.pdf"), "a name in .png"),
        (("--plot", str(tmp_path / "absent" / "c.png")), "there is no directory"),
    ):
        assert main(["certify", str(tiny), *arguments]) == 2
        written = capsys.readouterr()
        assert written.out == ""
        assert written.err.count("\n") == 1
        assert words in written.err
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(["certify", str(tiny), "--plot", str(tmp_path / "c.png")]) == 2
    assert "pip install 'foredraft[plots]'" in capsys.readouterr().err


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_no_width_cuts_a_word(width: int) -> None:
    checks = [
        Check("law, temperature 0.8, top-p 0.9, tokens 2 and 3", False, 1234.5, 1.5e-9, "why"),
        Check("counts", True, None, None, "84 outputs: tokens = accepted + steps"),
    ]
    facts = {
        "model": "m", "method": "ngram", "rule": "standard", "dtype": "d", "family_error": 1e-3
    }  # fmt: skip
    stream = io.StringIO()
    Console(file=stream, width=width).print(CheckTable(Certificate(checks, facts)))
    shown = stream.getvalue()
    assert all(len(line) <= width for line in shown.splitlines())
    for words in ("temperature", "1234", "1.5e-09", "FAILED", "why", "accepted", "1 of 2 checks"):
        assert words in shown
    assert "…" not in shown
