"""What a user's mistake looks like: one line on stderr, exit code 2, nothing on stdout."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from foredraft.cli import main as cli
from foredraft.cli.main import main
from foredraft.core.errors import ModelError, UserError


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
        (["--speculative-config", '{"method": "ngram", "method": "x"}'], "'method' 2 times"),
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
        (["--speculative-config", "[" * 50_000], "nested too deep"),
        (["--speculative-config", "9" * 5_000], "too long a number"),
        (["--speculative-config", "\udcff"], "--speculative-config is not UTF-8 text"),
        (["--stop", "\udcff"], "--stop is not UTF-8 text"),
        (["--threads", "99999999999"], "less than or equal to 1024"),
        (["--device", "meta"], "valid are cpu, cuda and cuda:N"),
        (["--device", "cuda:x"], "valid are cpu, cuda and cuda:N"),
        (["--logprobs", "3"], "--logprobs 3 needs --json"),
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
    assert "not UTF-8" in _fails(capsys, "generate", str(tiny), "\udcff\udcfeabc")
    monkeypatch.setattr(sys, "stdin", None)
    assert "no prompt" in _fails(capsys, "generate", str(tiny))


def test_chat_takes_text_from_an_open_stdin(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_given = io.TextIOWrapper(io.BytesIO(b"\xff\n"), errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", bytes_given)
    assert "the message is not UTF-8 text" in _fails(capsys, "chat", str(tiny))
    assert "--system is not" in _fails(capsys, "chat", str(tiny), "--system", "\udcff")
    assert "--logprobs" in _fails(capsys, "chat", str(tiny), "--logprobs", "3")
    monkeypatch.setattr(sys, "stdin", None)
    assert "stdin is closed" in _fails(capsys, "chat", str(tiny))


def test_info_without_a_model_refuses_what_it_would_ignore(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for option in ("--method=foo", "--device=foo", "--threads=1", "--no-speculation"):
        message = _fails(capsys, "info", option)
        assert option.partition("=")[0] in message
        assert "MODEL" in message


def test_an_error_that_quotes_a_file_stays_on_its_line_and_steers_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def quoting(*_: object) -> None:
        raise UserError("config.json: \x1b[2J\nfield \u202e\x9bevil")

    assert "\x1b" not in _fails(capsys, "info", f"{tmp_path}/\x1b[31m\nabsent")
    monkeypatch.setattr("foredraft.cli.generate.read_prompt", quoting)
    message = _fails(capsys, "generate", str(tmp_path), "hello")
    assert message == "foredraft: config.json: \\x1b[2J field \\u202e\\x9bevil\n"


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
    file.write_text("[" * 50_000)
    assert "line 1: nested too deep" in _fails(capsys, *decode, str(file))
    long = {"id": "long", "task": "chat", "turns": ["a" * 300]}
    file.write_text('{"id": "a", "task": "chat", "turns": ["hello"]}\n' + json.dumps(long))
    for command in ("decode", "identity"):
        message = _fails(capsys, "bench", command, str(tiny), "--workload", str(file))
        assert "line 2, prompt 'long'" in message
    assert "--workload" in _fails(capsys, "bench", "decode", str(tiny))


@pytest.mark.parametrize("command", ["info", "decode"])
def test_a_draft_model_is_fetched_as_the_target_is(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    """With a bar and its licence's notice, before anything of it is read."""

    def told(model: str) -> Path:
        raise ModelError(f"fetching {model} with a bar")

    monkeypatch.setattr("foredraft.cli.download.cached_path", lambda _name: None)
    monkeypatch.setattr("foredraft.cli.download.fetch", told)
    workload = tmp_path / "workload"
    workload.write_text('{"id": "a", "task": "chat", "turns": ["hello"]}\n')
    start = {"info": ["info", str(tiny)], "decode": ["bench", "decode", str(tiny)]}[command]
    more = ["--workload", str(workload)] if command == "decode" else []
    config = '{"method": "draft_model", "model": "smollm2-135m"}'
    message = _fails(capsys, *start, *more, "--speculative-config", config)
    assert "fetching smollm2-135m with a bar" in message


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


@pytest.mark.parametrize("command", [["info"], ["bench", "identity", "x", "--workload", "y"]])
def test_ctrl_c_while_libraries_are_imported_is_exit_code_130(command: list[str]) -> None:
    """torch drops whatever numpy's import raises; a second import of numpy is an ImportError."""
    code = (
        "import contextlib, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Dropping:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'numpy':\n"
        "            sys.meta_path.remove(self)\n"
        "            with contextlib.suppress(KeyboardInterrupt):\n"
        "                signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Dropping())\n"
        "from foredraft.cli.main import main\n"
        "sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (cli.INTERRUPTED, "", "")


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
