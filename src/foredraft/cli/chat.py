"""`foredraft chat`: a conversation in the terminal, or one line a turn from a pipe.

Knows turns and keys; the engine does the rest.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from typer import Option

from foredraft.cli.console import (
    coloured,
    legend,
    message_console,
    one_line,
    output_console,
    separator,
    visible,
)
from foredraft.cli.option_groups import option_groups
from foredraft.cli.options import (
    ModelArgument,
    RuntimeOptions,
    SamplingOptions,
    SpeculationOptions,
)
from foredraft.cli.prompt import check_text
from foredraft.cli.stream import TokenWriter
from foredraft.cli.summary import summary_line
from foredraft.core.errors import ConfigError, InvalidRequest, UserError

if TYPE_CHECKING:
    from foredraft import LLM
    from foredraft.core.sampling import SamplingParams
    from foredraft.engine.outputs import RequestOutput

START_AFRESH = "/clear starts afresh"
HELP = """/clear  forget the conversation
/exit   leave (also Ctrl-D)
/help   this list
Ctrl-C  stop the answer"""


@option_groups
def chat(
    model: ModelArgument,
    system: Annotated[
        str | None, Option(help="A system message to start with.", metavar="TEXT")
    ] = None,
    *,
    sampling: SamplingOptions,
    speculation: SpeculationOptions,
    runtime: RuntimeOptions,
) -> None:
    """Talk to a model; each token is coloured by where it came from. /help lists the commands."""
    params, config = sampling.params(), speculation.config()
    if params.logprobs is not None:
        raise ConfigError("--logprobs: a chat shows text alone; use `foredraft generate --json`")
    if system is not None:
        check_text(system, "--system")
    if sys.stdin is None:
        raise UserError("stdin is closed: a chat reads its messages from there")
    loaded = runtime.load(model)
    if not loaded.tokenizer.has_chat_template:
        raise UserError(f"{model!r} has no chat template; use `foredraft generate --raw`")
    conversation = Conversation(runtime.llm(loaded, config), params, system)
    interactive = sys.stdin.isatty()
    if interactive:
        if importlib.util.find_spec("readline"):
            importlib.import_module("readline")  # line editing and history at the prompt
        messages = message_console()
        messages.print(f"{visible(loaded.name)}: /help lists the commands", style="dim")
        if coloured(messages) and config is not None:
            messages.print(legend())
    while _turn(conversation, interactive):
        pass


def _turn(conversation: Conversation, interactive: bool) -> bool:
    """One line and what follows from it; False at the end. On a terminal, Ctrl-C never ends it."""
    try:
        line = _read_line(interactive)
        return line is not None and _obey(conversation, line, interactive)
    except KeyboardInterrupt:
        if not interactive:
            raise
        message_console().print("\n(/exit or Ctrl-D leaves)", style="dim")
        return True


class Conversation:
    """The messages so far, and one engine to answer them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._opening)

    def clear(self) -> None:
        self.messages = list(self._opening)

    def answer(self, text: str) -> str | None:
        """Stream the answer to one user message; its last line, None if Ctrl-C stopped it.

        What was answered before Ctrl-C stays in the conversation. Raises UserError, and then the
        message is forgotten.
        """
        from foredraft.models.tokenizer import Detokenizer

        check_text(text, "the message")
        asked = [*self.messages, {"role": "user", "content": text}]
        self._check_room(asked)
        pieces = Detokenizer(self._llm.tokenizer, self._params.skip_special_tokens)
        writer = TokenWriter(output_console(), pieces)
        said: list[str] = []
        finished: RequestOutput | None = None
        with interrupt_flag() as interrupted:
            for delta in self._llm.stream_chat(asked, self._params):  # leaving it frees its pages
                writer.write(delta)
                said.append(delta.text)
                finished = delta.finished
                if interrupted.is_set():
                    break
        writer.end_line()
        if finished is not None and finished.outputs[0].error is not None:
            raise InvalidRequest(finished.outputs[0].error)
        self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]
        return None if finished is None else self._last_line(finished)

    def _check_room(self, asked: list[dict[str, str]]) -> None:
        """Raises InvalidRequest that says what helps: to start afresh, or to write less."""
        limit = self._llm.config.max_model_len
        length = len(self._llm.tokenizer.apply_chat_template(asked))
        if length < limit:
            return
        problem = f"{length} tokens with this message, and the context holds {limit}"
        if self.messages == self._opening:
            raise InvalidRequest(f"the message is too long: {problem}")
        raise InvalidRequest(f"the conversation is too long: {problem}; {START_AFRESH}")

    def _last_line(self, finished: RequestOutput) -> str:
        parts = separator(message_console())
        line = summary_line(finished, separator=parts)
        length = len(finished.prompt_token_ids) + len(finished.token_ids)
        if finished.finish_reason == "length" and length >= self._llm.config.max_model_len:
            line += f"{parts}the context is full: {START_AFRESH}"
        return line


@contextmanager
def interrupt_flag() -> Iterator[Event]:
    """A flag that the first Ctrl-C sets, so that no step is cut; the second one interrupts."""
    flag = Event()
    usual = signal.getsignal(signal.SIGINT)

    def on_interrupt(_number: int, _frame: FrameType | None) -> None:
        flag.set()
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, usual)


def _read_line(interactive: bool) -> str | None:
    """The next line, None at the end of the input."""
    try:
        line = input("> ") if interactive else sys.stdin.readline()
    except EOFError:
        sys.stdout.write("\n")
        return None
    except UnicodeDecodeError:
        raise UserError("the conversation on stdin is not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"cannot read stdin: {error.strerror}") from None
    if not interactive and not line:
        return None
    return line.removesuffix("\n")


def _obey(conversation: Conversation, line: str, interactive: bool) -> bool:
    """Do what one line asks; False to leave."""
    messages = message_console()
    command = line.strip()
    if command == "/exit":
        return False
    if command == "/clear":
        conversation.clear()
    elif command == "/help":
        messages.print(HELP)
    elif command.startswith("/"):
        problem = (
            f"{visible(command.split()[0])} is not a command; valid are /clear, /exit and /help"
        )
        if not interactive:
            raise UserError(problem)
        messages.print(problem)
    elif command:
        _answer(conversation, line, interactive)
    return True


def _answer(conversation: Conversation, line: str, interactive: bool) -> None:
    messages = message_console()
    try:
        summary = conversation.answer(line)
    except UserError as error:
        if not interactive:
            raise
        messages.print(f"foredraft: {one_line(str(error))}", soft_wrap=True)
        return
    messages.print(summary or "(stopped)", style="dim", soft_wrap=True)
