"""`foredraft generate`, as a user runs it."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli.main import main

CODE = "import sys; from foredraft.cli.main import main; sys.exit(main())"
FOREDRAFT = [sys.executable, "-c", CODE]
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Repeats itself soon, so that the n-gram drafter has something to find.
PROMPT = ["hello there hello there", "--max-tokens", "40", "--raw", "--ignore-eos"]


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["generate", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def _ids(result: dict[str, Any]) -> list[int]:
    ids: list[int] = result["outputs"][0]["token_ids"]
    return ids


def test_a_pipe_gets_the_text_alone(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = _json(capsys, str(tiny), *PROMPT)
    assert main(["generate", str(tiny), *PROMPT]) == 0
    written = capsys.readouterr()
    outputs = expected["outputs"]
    assert written.out == outputs[0]["text"] + "\n"
    assert "\x1b" not in written.out
    assert written.err.startswith("40 tokens · ")
    assert written.err.count("\n") == 1


def test_compare_states_speed_and_identity(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = [*PROMPT, "--max-tokens", "64"]
    assert main(["generate", str(tiny), *long, "--compare"]) == 0
    summary = capsys.readouterr().err
    assert re.search(r"\d+\.\d\dx plain decoding \(\d+\.\d tokens/s\), identical tokens", summary)
    result = _json(capsys, str(tiny), *long, "--compare")
    comparison = result["comparison"]
    assert comparison["identical"] is True
    assert comparison["speedup"] == pytest.approx(
        comparison["tokens_per_second"] / comparison["plain_tokens_per_second"]
    )


def test_a_short_answer_is_not_compared_in_speed(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(tiny), *PROMPT, "--compare"]) == 0
    summary = capsys.readouterr().err
    assert re.search(
        r"too short to compare the speed \(\d+ decoded, below 48\), identical", summary
    )
    assert _json(capsys, str(tiny), *PROMPT, "--compare")["comparison"]["speedup"] is None


def test_sampling_without_a_seed_is_not_called_different(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(tiny), *PROMPT, "--compare", "--temperature", "1"]) == 0
    assert "tokens not compared (no seed)" in capsys.readouterr().err


def test_speculation_on_or_off_the_text_is_the_same(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for sampling in ([], ["--temperature", "1.3", "--seed", "7"]):
        plain = _json(capsys, str(tiny), *PROMPT, *sampling, "--no-speculation")
        for speculation in (
            ["--method", "ngram", "--num-speculative-tokens", "5"],
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'],
            ["--speculative-config", "null"],
        ):
            speculative = _json(capsys, str(tiny), *PROMPT, *sampling, *speculation)
            assert _ids(speculative) == _ids(plain)


def test_origins_and_metrics_agree(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = _json(capsys, str(tiny), *PROMPT, "--num-speculative-tokens", "4")
    outputs = result["outputs"]
    origins = outputs[0]["origins"]
    speculation = outputs[0]["metrics"]["speculative_decoding"]
    assert origins.count("accepted") == speculation["num_accepted_draft_tokens"] > 0
    assert speculation["num_spec_tokens"] == 4
    assert outputs[0]["finish_reason"] == "length"


def test_several_completions_have_headings(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sampling = ["--n", "2", "--temperature", "1", "--seed", "3"]
    assert main(["generate", str(tiny), *PROMPT, *sampling]) == 0
    shown = capsys.readouterr()
    written = shown.out
    assert "[1/2]\n" in written
    assert "[2/2]\n" in written
    assert shown.err.startswith("2 completions · 80 tokens · ")
    assert "tokens/s each" in shown.err
    result = _json(capsys, str(tiny), *PROMPT, *sampling)
    outputs = result["outputs"]
    assert outputs[0]["token_ids"] != outputs[1]["token_ids"]
    assert all(each["text"] in written for each in outputs)
    speculation = [each["metrics"]["speculative_decoding"] for each in outputs]
    drafted = sum(each["num_draft_tokens"] for each in speculation)
    accepted = sum(each["num_accepted_draft_tokens"] for each in speculation)
    rate = f"acceptance rate {accepted / drafted:.0%}" if drafted else "nothing drafted"
    assert rate in shown.err


def test_the_prompt_comes_from_argument_file_or_pipe(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, options = PROMPT[0], PROMPT[1:]
    expected = _json(capsys, str(tiny), text, *options)
    file = tmp_path / "prompt.txt"
    file.write_text(text + "\n")
    from_file = _json(capsys, str(tiny), "--prompt-file", str(file), *options)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{text}\n".encode())))
    from_pipe = _json(capsys, str(tiny), *options)
    assert from_file["prompt_token_ids"] == from_pipe["prompt_token_ids"]
    assert from_file["prompt_token_ids"] == expected["prompt_token_ids"]


def test_chat_is_the_default_where_there_is_a_template(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["hello", "--max-tokens", "4"]
    default, chat, raw = (
        _json(capsys, str(tiny), *options, *choice)["prompt_token_ids"]
        for choice in ([], ["--chat"], ["--raw"])
    )
    assert default == chat
    assert default != raw


def test_sampling_options_reach_the_engine(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = _json(capsys, str(tiny), *PROMPT, "--allowed-token-ids", "5")
    assert set(_ids(only)) == {5}
    biased = _json(capsys, str(tiny), *PROMPT, "--logit-bias", "9=100")
    assert set(_ids(biased)) == {9}
    outputs = _json(capsys, str(tiny), *PROMPT, "--logprobs", "2")["outputs"]
    assert len(outputs[0]["logprobs"]) == 40


def _on_terminal(command: list[str], **environment: str) -> str:
    leader, follower = pty.openpty()
    given = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200", **environment}
    for name in ("FORCE_COLOR", "NO_COLOR"):
        if name not in environment:
            given.pop(name, None)
    with subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, env=given
    ) as run:
        os.close(follower)
        output = b""
        while True:
            try:
                chunk = os.read(leader, 65536)
            except OSError:
                break
            if not chunk:
                break
            output += chunk
    os.close(leader)
    assert run.returncode == 0, output
    return output.decode()


def test_a_terminal_gets_colours_a_legend_and_one_summary_line(tiny: Path) -> None:
    shown = _on_terminal([*FOREDRAFT, "generate", str(tiny), *PROMPT])
    lines = COLOURS.sub("", shown).splitlines()
    assert lines[0] == "tokens:  accepted draft  recovered  bonus  plain"
    assert lines[-1].startswith("40 tokens · ")
    assert "\x1b[32m" in shown  # accepted tokens are green
    assert "\x1b[36m" in shown  # and the one after each full draft cyan


def test_the_legend_explains_colours_that_are_there(tiny: Path) -> None:
    """All commands in one process: starting one takes longer than all of them."""
    without = ["--no-speculation"]
    colourless = "import os; os.environ['NO_COLOR'] = '1'"
    ways = [without, [*without, "--n", "2", "--temperature", "1"], ["--n", "2", "--seed", "1"], []]
    calls = [f"assert main({['generate', str(tiny), *PROMPT, *way]}) == 0" for way in ways]
    calls.insert(-1, colourless)
    code = "; print('=' * 9); ".join(["from foredraft.cli.main import main", *calls])
    plain, two, drafted, _, no_colour = _on_terminal([sys.executable, "-c", code]).split(9 * "=")[
        1:
    ]
    assert "accepted draft" not in plain
    assert "accepted draft" not in two
    assert "accepted draft" in drafted
    assert not re.search(r"\x1b\[3\d", no_colour)
    assert "accepted draft" not in no_colour
