"""`foredraft chat`, from a pipe and on a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from foredraft.cli.chat import Conversation, interrupt_flag
from foredraft.cli.main import main
from foredraft.core.errors import UserError

CODE = "import sys; from foredraft.cli.main import main; sys.exit(main())"
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Chat = Callable[..., Done]


@pytest.fixture
def chat(tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Chat:
    """A conversation that comes from a pipe."""

    def run(text: str, *options: str) -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code = main(["chat", str(tiny), "--max-tokens", "6", *options])
        written = capsys.readouterr()
        return Done(code, written.out, written.err)

    return run


def test_a_piped_conversation_is_one_answer_a_line(chat: Chat) -> None:
    done = chat("hello\n\nhow are you\n", "--ignore-eos")
    assert done.code == 0, done.err
    assert len(done.out.splitlines()) == 2
    assert done.err.count("6 tokens · ") == 2
    assert "\x1b" not in done.out


def test_turns_build_on_each_other_until_cleared(chat: Chat) -> None:
    answers = chat("hello\nhello\n/clear\nhello\n", "--ignore-eos").out.splitlines()
    assert answers[0] == answers[2]
    assert answers[1] != answers[0]


def test_exit_leaves_and_help_lists_the_commands(chat: Chat) -> None:
    done = chat("/help\n/exit\nhello\n")
    assert done.code == 0
    assert done.out == ""
    assert "/clear" in done.err


def test_a_mistake_in_a_pipe_is_one_line_and_exit_code_2(chat: Chat) -> None:
    for text, words in (("/dance\n", "/dance is not a command"), ("a" * 300, "tokens")):
        done = chat(text)
        assert done.code == 2
        assert words in done.err
        assert done.err.count("\n") == 1


@pytest.fixture
def python_handles_ctrl_c() -> Iterator[None]:
    """As at a terminal; a shell starts its background jobs with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_the_first_ctrl_c_sets_the_flag_and_the_second_one_interrupts() -> None:
    with interrupt_flag() as interrupted:
        assert not interrupted.is_set()
        signal.raise_signal(signal.SIGINT)
        assert interrupted.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_refused_message_is_forgotten(tiny: Path) -> None:
    from foredraft import LLM, SamplingParams

    conversation = Conversation(LLM(tiny), SamplingParams(temperature=0, max_tokens=4), "be brief")
    conversation.answer("hello")
    before = list(conversation.messages)
    with pytest.raises(UserError, match="/clear starts afresh"):
        conversation.answer("a" * 300)
    with pytest.raises(UserError, match="not UTF-8"):
        conversation.answer("\udcff")
    assert conversation.messages == before
    assert [each["role"] for each in before] == ["system", "user", "assistant"]
    conversation.clear()
    assert [each["role"] for each in conversation.messages] == ["system"]


def test_only_a_conversation_is_told_to_start_afresh(tiny: Path) -> None:
    from foredraft import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    conversation = Conversation(LLM(tiny), params, None)
    with pytest.raises(UserError, match="the message is too long") as caught:
        conversation.answer("a" * 300)
    assert "/clear" not in str(caught.value)
    last_line = conversation.answer("hello")  # goes on until the context is full
    assert last_line is not None
    assert last_line.endswith("the context is full: /clear starts afresh")


class Terminal:
    """A chat in a pseudo-terminal."""

    def __init__(self, tiny: Path, *options: str) -> None:
        self._leader, follower = pty.openpty()
        self.run = subprocess.Popen(
            [sys.executable, "-c", CODE, "chat", str(tiny), *options],
            stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
        )  # fmt: skip
        os.close(follower)
        self.seen = ""

    def wait_for(self, words: str) -> None:
        """Read until `words` were shown; what was read before is dropped."""
        deadline = time.monotonic() + 60
        while words not in self.seen:
            assert time.monotonic() < deadline, f"{words!r} never came: {self.seen!r}"
            self.seen += CONTROLS.sub("", os.read(self._leader, 65536).decode(errors="replace"))
        self.seen = self.seen.partition(words)[2]

    def type(self, text: str) -> None:
        os.write(self._leader, text.encode())

    def close(self) -> int:
        code = self.run.wait(timeout=60)
        os.close(self._leader)
        return code


def test_ctrl_c_stops_the_answer_and_not_the_program(tiny: Path) -> None:
    terminal = Terminal(tiny, "--max-tokens", "200", "--ignore-eos", "--no-speculation")
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("hello\r\n")
    terminal.run.send_signal(signal.SIGINT)
    terminal.wait_for("> ")
    terminal.type("/dance\n")
    terminal.wait_for("/dance is not a command")
    terminal.wait_for("> ")
    terminal.type("/exit\n")
    assert terminal.close() == 0


def test_a_full_context_does_not_end_the_program(tiny: Path) -> None:
    terminal = Terminal(tiny, "--max-tokens", "500", "--ignore-eos")
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("the context is full: /clear starts afresh")
    terminal.type("more\n")
    terminal.wait_for("the conversation is too long")
    terminal.type("/clear\n")
    terminal.type("hello\n")
    terminal.wait_for("the context is full")
    terminal.wait_for("> ")
    terminal.type("/exit\n")
    assert terminal.close() == 0


def test_ctrl_d_leaves(tiny: Path) -> None:
    terminal = Terminal(tiny)
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.close() == 0
