"""`foredraft bench`, `info` and `pull`: their JSON forms and tables."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from foredraft.cli.main import main
from foredraft.cli.tables import decode_table, identity_table
from foredraft.testing.models import write_tiny_checkpoint


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_decode_has_the_documented_form(
    tiny: Path, workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results" / "decode.json"
    result = _json(
        capsys, "bench", "decode", str(tiny), "--workload", str(workload), "--max-tokens", "24",
        "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}',
        "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}',
        "--repeats", "2", "--output", str(file),
    )  # fmt: skip
    assert json.loads(file.read_text()) == result
    assert {"machine", "versions", "revision", "arguments", "date"} <= set(result)
    limit = result["bandwidth_limit_tokens_per_second"]
    assert limit > 0 if result["kernels"] == "native" else limit is None
    plain, two, four = result["runs"]
    assert plain["label"] == "plain"
    assert plain["speculative_config"] is None
    assert four["label"] == "ngram num_speculative_tokens=4"
    for run in (plain, two, four):
        assert run["identical_to_plain"] is True
        assert run["tokens"] == plain["tokens"] > 0
        assert list(run["per_task"]) == ["chat", "edit"]
        assert run["per_task"]["edit"]["prompts"] == 2
        assert run["tokens_per_second"] > 0
        assert run["speedup"] == pytest.approx(run["mean_emitted_tokens"] / run["mean_step_cost"])
    assert plain["mean_emitted_tokens"] == 1.0
    assert len(two["acceptance_by_position"]) <= 2
    assert four["mean_acceptance_length"] > 1.0


def test_decode_prints_a_table_and_can_be_limited(
    tiny: Path, workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "decode", str(tiny), "--workload", str(workload), "--max-tokens", "8"]
    assert main([*arguments, "--tasks", "edit", "--limit-per-task", "1"]) == 0
    table = capsys.readouterr().out
    assert "plain" in table
    assert "suffix" in table
    assert "edit" in table
    assert "chat" not in table


def test_an_output_that_cannot_be_written_is_known_before_measuring(
    tiny: Path, workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("foredraft.cli.options.RuntimeOptions.load", None)  # never reached
    (tmp_path / "file").write_text("")
    for command in ("decode", "identity"):
        arguments = ["bench", command, str(tiny), "--workload", str(workload), "--output"]
        for place in (tmp_path, tmp_path / "file" / "x.json"):
            assert main([*arguments, str(place)]) == 2
            assert f"cannot write --output {str(place)!r}" in capsys.readouterr().err


def test_the_check_leaves_no_file_and_harms_none(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, absent = tmp_path / "kept.json", tmp_path / "new" / "absent.json"
    kept.write_text("{}")
    arguments = ["bench", "decode", str(tiny), "--workload", str(tmp_path / "none")]
    for place in (kept, absent):
        assert main([*arguments, "--output", str(place)]) == 2
        assert "cannot read workload" in capsys.readouterr().err
    assert kept.read_text() == "{}"
    assert not absent.exists()


def test_a_result_that_cannot_be_written_after_all_is_printed(
    tiny: Path, workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "decode", str(tiny), "--workload", str(workload), "--max-tokens", "8"]
    assert main([*arguments, "--limit-per-task", "1", "--output", "/dev/full"]) == 2
    written = capsys.readouterr()
    assert json.loads(written.out)["kind"] == "decode"
    assert "the result is on stdout" in written.err


def _shown(table: RenderableType, width: int) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(table)
    return stream.getvalue()


def _run(label: str) -> dict[str, Any]:
    tasks = ("chat", "code", "math", "edit", "extract")
    return {
        "label": label, "tokens_per_second": 1234.5, "speedup": 12.25,
        "mean_acceptance_length": 3.75, "mean_step_cost": 1.5, "identical_to_plain": True,
        "step_ms": {"drafter": 10.25, "target": 16.5, "rest": 0.125},
        "per_task": {task: {"speedup": 10.5 + number} for number, task in enumerate(tasks)},
    }  # fmt: skip


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_width_cuts_a_figure_or_a_word(width: int) -> None:
    runs = [_run("plain"), _run("ngram num_speculative_tokens=4")]
    decoding = {
        "model": "smollm2-135m", "dtype": "bfloat16", "prompts": 161, "runs": runs,
        "bandwidth_limit_tokens_per_second": 141.5,
    }  # fmt: skip
    shown = _shown(decode_table(decoding), width)
    assert all(len(line) <= width for line in shown.splitlines())
    for words in ("1234.5", "12.25x", "3.75", "14.50x", "num_speculative_tokens=4", "141.5"):
        assert words in shown
    assert "…" not in shown
    check = {"name": "greedy, n-gram speculation, prompt chunks of 64", "prompts": 161}
    check |= {"tokens": 20_000, "compared_logits": True, "passed": True, "mismatch": None}
    checks = {"model": "m", "dtype": "d", "kernels": "native", "checks": [check]}
    shown = _shown(identity_table(checks), width)
    assert all(len(line) <= width for line in shown.splitlines())
    assert all(words in shown for words in ("speculation,", "20000", "identical"))


@pytest.mark.parametrize("width", ["40", "80"])
def test_info_breaks_no_word_of_a_key(
    width: str, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert main(["info", str(tiny)]) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= int(width) for line in shown.splitlines())
    assert "longest requests at once" in shown


@pytest.mark.parametrize("command", [["generate"], ["chat"], ["bench", "decode"], ["info"]])
def test_help_cuts_no_option_at_80_columns(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command, "--help"]) == 0
    assert "…" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_peer_runs_the_same_prompts_in_its_own_process(
    tiny: Path, workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = _json(
        capsys, "bench", "decode", str(tiny), "--workload", str(workload), "--max-tokens", "8",
        "--peer", "transformers", "--dtype", "float32",
    )  # fmt: skip
    labels = [run["label"] for run in result["runs"]]
    assert labels == ["plain", "suffix", "transformers float32", "transformers bfloat16"]
    peer = result["runs"][2]
    assert peer["peer"] == "transformers"
    assert peer["tokens"] == result["runs"][0]["tokens"]
    assert peer["identical_to_plain"] is True
    assert result["peers"]["transformers"]["label"] in labels


def test_identity_passes_and_writes_its_result(
    tiny: Path, workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "identity.json"
    arguments = ["bench", "identity", str(tiny), "--workload", str(workload)]
    assert main([*arguments, "--max-tokens", "12", "--output", str(file)]) == 0
    assert "identical" in capsys.readouterr().out
    result = json.loads(file.read_text())
    assert result["kind"] == "identity"
    assert result["passed"] is True


def test_a_difference_is_exit_code_1(
    tiny: Path, workload: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from foredraft.bench import identity

    chilled = identity.Check("seeded otherwise", 0.0, None)
    monkeypatch.setattr(identity, "checks", lambda _threads: [chilled])
    recorded = identity._record

    def wrong(loaded: Any, check: Any, *rest: Any) -> Any:
        for prompt_id, rows in recorded(loaded, check, *rest):
            yield prompt_id, rows[:-1] if check is chilled else rows

    monkeypatch.setattr(identity, "_record", wrong)
    assert main(["bench", "identity", str(tiny), "--workload", str(workload)]) == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_info_states_machine_kernels_and_memory(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = _json(capsys, "info", str(tiny), "--num-speculative-tokens", "3")
    assert facts["machine"]["cores"] >= 1
    assert facts["versions"]["foredraft"]
    assert facts["kernels"]["in_use"] in ("native", "reference")
    assert facts["model"]["layers"] == 2
    memory = facts["memory"]
    assert memory["weight_bytes"] > 0
    assert memory["cached_tokens"] == memory["cache_pages"] * memory["page_size"]
    assert memory["cache_limit_bytes"] == memory["cache_pages"] * memory["page_bytes"]
    assert facts["speculation"]["draft_tokens_a_step"] == 3
    assert main(["info"]) == 0
    assert "cores" in capsys.readouterr().out


def test_info_of_plain_decoding_costs_nothing(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = _json(capsys, "info", str(tiny), "--no-speculation")["speculation"]
    assert facts == {"method": None, "off": "no speculation was asked for"}


def test_info_states_the_effective_drafter_and_its_price(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reported fault 72: what runs, when it does not, and what it takes."""
    draft = write_tiny_checkpoint(tmp_path / "draft", 3, num_layers=1, max_positions=64)
    config = json.dumps({"model": str(draft), "num_speculative_tokens": 2})
    found = _json(capsys, "info", str(tiny), "--speculative-config", config)
    facts, memory = found["speculation"], found["memory"]
    assert (facts["method"], facts["drafter"]) == ("draft_model", "DraftModelDrafter")
    assert facts["draft_weight_bytes"] > 0
    # One layer's keys and values beside two.
    assert facts["draft_cache_limit_bytes"] * 2 == memory["cache_limit_bytes"]
    assert facts["off"] == "beyond 64 tokens, the draft model's context"
    plain = _json(capsys, "info", str(tiny), "--no-speculation")["memory"]
    assert facts["cached_tokens_without"] == plain["cached_tokens"]
    off = _json(capsys, "info", str(tiny), "--num-speculative-tokens", "0")["speculation"]
    assert (off["method"], off["off"]) == ("suffix", "always: num_speculative_tokens is 0")


def test_pull_says_where_the_model_is(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = _json(capsys, "pull", "smollm2-135m")
    assert facts["path"] == str(smollm2_path)
    assert facts["bytes"] == smollm2_path.stat().st_size
    assert main(["pull", "smollm2-135m"]) == 0
    assert capsys.readouterr().out == f"{smollm2_path}\n"


def test_the_rules_are_tabulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "rules"]) == 0
    table = capsys.readouterr().out
    assert "`rejection_sample_method`" in table
    assert "**lossy**" in table
    entries = _json(capsys, "bench", "rules")
    assert {entry["method"] for entry in entries} >= {"standard", "block", "coupled"}
