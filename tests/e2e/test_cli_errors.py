"""What a user's mistake looks like: one line on stderr, exit code 2, nothing on stdout."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from foredraft.cli import main as cli
from foredraft.cli.main import main


def _fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.count("\n") == 1
    assert "Traceback" not in written.err
    return written.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--speculative-config", "{method"], "is not JSON"),
        (["--speculative-config", "[1]"], "must be a JSON object or null"),
        (["--speculative-config", '{"metod": "ngram"}'], "'metod'"),
        (["--speculative-config", '{"method": "oracle"}'], "'oracle'"),
        (["--speculative-config", '{"method": "ngram"}', "--method", "ngram"], "given twice"),
        (["--no-speculation", "--method", "ngram"], "--no-speculation excludes"),
        (["--no-speculation", "--compare"], "--compare needs speculation"),
        (["--num-speculative-tokens", "-1"], "num_speculative_tokens"),
        (["--max-tokens", "-5"], "max_tokens"),
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "2"], "top_p"),
        (["--logit-bias", "7"], "ID=BIAS"),
        (["--logit-bias", "99999=1"], "99999"),
        (["--temperature", "hot"], "'--temperature'"),
        (["--prompt-file", "x.txt"], "given twice"),
        (["--threads", "0"], "--threads"),
        (["--dtype", "int3"], "int3"),
        (["--kernels", "magic"], "magic"),
        (["--device", "abacus"], "abacus"),
        (["--max-model-len", "999999"], "999999"),
        (["--unknown-option"], "--unknown-option"),
        (["--compare", "--n", "2"], "--n 2"),
    ],
)
def test_a_mistake_in_an_option(
    tiny: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert words in _fails(capsys, "generate", str(tiny), "hello", *arguments)


def test_models_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "smollm2-135m" in _fails(capsys, "generate", "no-such-model", "hello")
    assert "smollm2-135m" in _fails(capsys, "pull", "no-such-model")
    _fails(capsys, "generate", str(tmp_path), "hello")
    assert "no-such-model" in _fails(capsys, "info", "no-such-model")


def test_prompts_that_cannot_be(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "the prompt is empty" in _fails(capsys, "generate", str(tiny), "")
    assert "300 tokens" in _fails(capsys, "generate", str(tiny), "--raw", "a" * 300)
    missing = str(tmp_path / "absent.txt")
    assert missing in _fails(capsys, "generate", str(tiny), "--prompt-file", missing)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    assert "not UTF-8" in _fails(capsys, "generate", str(tiny), "--prompt-file", str(binary))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert "not UTF-8" in _fails(capsys, "generate", str(tiny))


def test_a_request_without_an_allowed_token(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    banned = ["--allowed-token-ids", "5", "--banned-token-ids", "5"]
    assert main(["generate", str(tiny), "hello", *banned]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_workloads_and_benchmarks(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a", "task": "chat", "turns": ["hello"]}\n{"id": "b", "task": 3}\n')
    decode = ["bench", "decode", str(tiny), "--workload"]
    assert "line 2: field 'task'" in _fails(capsys, *decode, str(file))
    assert "cannot read" in _fails(capsys, *decode, str(tmp_path / "absent"))
    assert "'abacus'" in _fails(capsys, *decode, str(file), "--peer", "abacus")
    assert "--workload" in _fails(capsys, "bench", "decode", str(tiny))


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'dance'" in _fails(capsys, "dance")


def test_a_fault_of_ours_shows_itself(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise LookupError("ours")

    monkeypatch.setattr("foredraft.cli.generate.read_prompt", broken)
    with pytest.raises(LookupError, match="ours"):
        main(["generate", str(tiny), "hello"])


def test_ctrl_c_is_exit_code_130(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("foredraft.cli.generate.read_prompt", interrupted)
    assert main(["generate", str(tiny), "hello"]) == cli.INTERRUPTED


def test_help_and_version_load_nothing_heavy() -> None:
    code = (
        "import sys\nfrom foredraft.cli.main import main\n"
        "assert main(['--version']) == 0\nassert main(['--help']) == 0\n"
        "assert main(['generate', '--help']) == 0\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("foredraft 0.")


def test_a_closed_pipe_is_no_traceback(tiny: Path) -> None:
    code = "import sys; from foredraft.cli.main import main; sys.exit(main())"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", code, "generate", str(tiny), "hello", "--max-tokens", "8"],
        stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(writer)
    assert "Traceback" not in done.stderr
    assert done.returncode != 0
