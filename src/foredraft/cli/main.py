"""The `foredraft` command: its list of commands, and what a user sees when something goes wrong.

Knows commands and exit codes; each command lives in its own file and imports the heavy parts only
when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Annotated

import typer

from foredraft.cli import (
    bench,
    certify,
    chat,
    describe,
    export,
    generate,
    plan,
    pull,
    serve,
    train,
)
from foredraft.cli.console import one_line
from foredraft.cli.interrupts import ModelCommand
from foredraft.cli.streams import CLOSED_PIPE, OutputError, guarded_streams
from foredraft.core.errors import UserError

USER_ERROR = 2
INTERRUPTED = 130

# Some releases of typer carry their own click: the base class is found through a public one.
_ClickException = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)

app = typer.Typer(
    name="foredraft",
    help="Exact speculative decoding: several tokens a pass, the same text as plain decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate", cls=ModelCommand)(generate.generate)
app.command("chat", cls=ModelCommand)(chat.chat)
app.command("serve", cls=ModelCommand)(serve.serve)
app.command("info", cls=ModelCommand)(describe.describe)
app.command("certify", cls=ModelCommand)(certify.certify)
app.command("export", cls=ModelCommand)(export.export)
app.command("plan")(plan.plan)
app.command("pull")(pull.pull)
app.add_typer(train.app, name="train")
app.add_typer(bench.app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"foredraft {version('foredraft')}\n")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Options before the command's name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 2 and one line on stderr for a mistake of the user.

    A reader of stdout that left early is 141, without a word. Any other exception is a fault of
    foredraft and is left to show itself.
    """
    try:
        with guarded_streams():
            return _run(arguments)
    except OutputError as error:
        return CLOSED_PIPE if error.closed_pipe else _fail(str(error))


def _run(arguments: Sequence[str] | None) -> int:
    command = typer.main.get_command(app)
    try:
        code = command.main(arguments, prog_name="foredraft", standalone_mode=False)
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return INTERRUPTED
    except typer.Abort:
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, _ClickException):
            return _usage(error)
        raise
    return code if isinstance(code, int) else 0


def _usage(error: Exception) -> int:
    """A mistake in the arguments; asking for a command group without a command shows its help."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if type(error).__name__ == "NoArgsIsHelpError":
        if message.strip():  # some releases of typer have printed the help themselves
            sys.stdout.write(f"{message}\n")
        return 0
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    return _fail(f"{message.rstrip('.')}{hint}")


def _fail(message: str) -> int:
    """One line on stderr whatever the message holds: model files have a say in it."""
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(f"foredraft: {one_line(message)}\n")
    return USER_ERROR
