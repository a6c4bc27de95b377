"""`foredraft serve` as a process: its options, its start, and its end by signals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import APIConnectionError, APIStatusError, OpenAI

from foredraft import LLM, SamplingParams
from foredraft.cli.main import main
from foredraft.cli.plan_config_file import write_config_file

PATIENCE = 60.0
COMMAND = [
    sys.executable,
    "-c",
    "import sys; from foredraft.cli.main import main; sys.exit(main())",
]


@contextmanager
def served(
    *arguments: str | Path, port: int = 0, threads: int = 1
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The process, and what it says when it starts."""
    more = ["--port", str(port), "--json", "--threads", str(threads)]
    process = subprocess.Popen(
        [*COMMAND, "serve", *map(str, arguments), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            assert process.stderr is not None
            pytest.fail(process.stderr.read())
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE)


def client_of(said: dict[str, Any], **more: Any) -> OpenAI:
    options = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE, **more}
    return OpenAI(base_url=f"{said['url']}/v1", **options)


def test_a_file_of_options_and_a_drain_by_sigterm(tiny: Path, tmp_path: Path) -> None:
    """The file is what `foredraft plan` writes, with the server's own options beside."""
    path = tmp_path / "serve.toml"
    write_config_file(path, str(tiny), {"method": "ngram", "num_speculative_tokens": 3})
    keys = tmp_path / "keys"
    keys.write_text("one\n\ntwo\n")
    options = 'served_model_name = ["little"]\nmax_num_seqs = 2\n'
    path.write_text(f"{options}api_key_file = {json.dumps(str(keys))}\n{path.read_text()}")
    fields: dict[str, Any] = {"prompt": "ab ab ab", "temperature": 0, "max_tokens": 200}
    more: dict[str, Any] = {"extra_body": {"ignore_eos": True}}
    with served("--config", path) as (process, said):
        assert said["models"] == ["little"]
        assert (said["speculative_method"], said["num_speculative_tokens"]) == ("ngram", 3)
        client = client_of(said, api_key="two")
        streams = [
            client.completions.create(model="little", stream=True, **fields, **more)
            for _ in range(3)
        ]
        texts = [next(iter(stream)).choices[0].text for stream in streams]
        process.send_signal(signal.SIGTERM)
        refused = threading.Event()

        def ask() -> None:
            while not refused.is_set():
                try:
                    client.completions.create(model="little", prompt="a", max_tokens=1)
                except (APIStatusError, APIConnectionError):
                    refused.set()

        asking = threading.Thread(target=ask)
        asking.start()
        for at, stream in enumerate(streams):
            texts[at] += "".join(chunk.choices[0].text for chunk in stream)
        asking.join(PATIENCE)
        assert process.wait(PATIENCE) == 0
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    assert set(texts) == {LLM(tiny).generate("ab ab ab", params)[0].text}


def test_a_second_signal_ends_at_once(tiny: Path) -> None:
    with served(tiny, "--no-speculation") as (process, said):
        stream = client_of(said).completions.create(
            model=str(tiny), prompt="a", max_tokens=240, stream=True, n=8,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) is not None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", "'prot'; valid keys are"),
        ("model = 'a'\nport = 'x'", "has port = 'x'; expected an integer"),
        ("model = 'a'\nmax_queued = '7'", "has max_queued = '7'; expected an integer"),
        ("model = 'a'\nmax_num_seqs = true", "has max_num_seqs = True; expected an integer"),
        ("model = 'a'\nmax_num_seqs = 2.0", "has max_num_seqs = 2.0; expected an integer"),
        ("model = 'a'\nrequest_timeout = '9'", "expected a number"),
        ("model = 'a'\npace = 'yes'", "has pace = 'yes'; expected true or false"),
        ("model = 'a'\nserved_model_name = 'b'", "a list of values, each text"),
        ("model = ['a']", "has model = ['a']; expected text"),
        ("port = [", "is not TOML"),
        ("", "Missing argument 'MODEL'"),
    ],
)
def test_a_file_with_a_mistake_is_told_by_one_line(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    assert main(["serve", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ssl-keyfile", "key.pem"], "--ssl-certfile"),
        (["--ssl-certfile", "nowhere.pem"], "nowhere.pem"),
        (["--max-body-size", "0"], "--max-body-size"),
        (["--request-timeout", "-1"], "request_seconds"),
        (["--api-key", "a b"], "API key"),
        (["--cors-origin", "example.org"], "CORS"),
        (["--allowed-host", "example.org:80"], "allowed host"),
        (["--host", "256.256.256.256"], "cannot listen"),
    ],
)
def test_options_with_a_mistake_are_told_by_one_line(
    options: list[str], words: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tiny), *options]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
