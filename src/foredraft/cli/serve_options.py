"""The options of `foredraft serve`, and the file where each of them can stand.

Knows option names and the server's settings; imports neither torch nor the server until an option
is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

from typer import Context, Option

from foredraft.cli.plan_config_file import TABLE, read_toml
from foredraft.cli.prompt import check_text, read_text
from foredraft.core.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.server.settings import ServerSettings

PANEL_LISTEN, PANEL_LIMITS, PANEL_ANSWERS = "Where and for whom", "Limits", "Answers"
MEBIBYTE = 1 << 20
# What a file may have for an option of a type; any other is text.
_TYPES: Mapping[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
}


def _listen(*names: str, words: str, value: str | None) -> Any:
    return Option(*names, help=words, metavar=value, rich_help_panel=PANEL_LISTEN)


def _limit(words: str, value: str, **more: Any) -> Any:
    return Option(help=words, metavar=value, rich_help_panel=PANEL_LIMITS, **more)


def _answers(*names: str, words: str, value: str | None = None, **more: Any) -> Any:
    return Option(*names, help=words, metavar=value, rich_help_panel=PANEL_ANSWERS, **more)


@dataclass(frozen=True)
class ListenOptions:
    """The address, its certificate, and who may ask."""

    host: Annotated[
        str, _listen(words="Address to listen on; 0.0.0.0 is all of IPv4.", value="HOST")
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Option(
            help="0 is any free one.", metavar="PORT", min=0, max=65535,
            rich_help_panel=PANEL_LISTEN,
        ),
    ] = 8000  # fmt: skip
    served_model_name: Annotated[
        list[str] | None,
        _listen(words="What requests call the model; may be repeated.", value="NAME"),
    ] = None
    api_key: Annotated[
        list[str] | None, _listen(words="Who asks must know it; may be repeated.", value="KEY")
    ] = None
    api_key_file: Annotated[
        Path | None, _listen(words="Keys, one a line; unlike --api-key unseen.", value="FILE")
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        _listen(words="A web page that may ask; may be repeated. (default: none)", value="ORIGIN"),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        _listen(words="A proxy's name for this server; may be repeated.", value="NAME"),
    ] = None
    ssl_certfile: Annotated[
        Path | None, _listen(words="Serve HTTPS with this certificate.", value="FILE")
    ] = None
    ssl_keyfile: Annotated[
        Path | None, _listen(words="Its key, where it is not in the same file.", value="FILE")
    ] = None

    def keys(self) -> list[str]:
        """All API keys. Raises UserError."""
        keys = list(self.api_key or ())
        if self.api_key_file is not None:
            keys += read_keys(self.api_key_file)
        return keys

    def check(self) -> None:
        """Raise ConfigError for options that need each other."""
        check_text(self.host, "--host")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        for option, path in (
            ("--ssl-certfile", self.ssl_certfile),
            ("--ssl-keyfile", self.ssl_keyfile),
        ):
            if path is not None and not path.is_file():
                raise ConfigError(f"{option} {str(path)!r}: there is no such file")

    @property
    def scheme(self) -> str:
        """Of the URL."""
        return "http" if self.ssl_certfile is None else "https"

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        from foredraft.server.hosts import is_loopback

        return is_loopback(self.host)

    def hosts(self, keys: Sequence[str]) -> tuple[str, ...]:
        """What requests may call this server; none: anything. Without keys a server of this machine
        alone answers to this machine's names.
        """
        from foredraft.server.hosts import LOOPBACK

        if self.allowed_host is None and (keys or not self.is_local):
            return ()
        return (*LOOPBACK, self.host, *(self.allowed_host or ()))


def read_keys(path: Path) -> list[str]:
    """The API keys of a file, one a line. Raises UserError where there is none."""
    lines = read_text(path, "API key file").splitlines()
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise ConfigError(f"--api-key-file {str(path)!r} holds no key")
    return found


@dataclass(frozen=True)
class LimitOptions:
    """How much at once, and how long."""

    max_num_seqs: Annotated[int, _limit("Requests running at once.", "N", min=1)] = 16
    max_queued: Annotated[int, _limit("That may wait beside; more get 429.", "N", min=0)] = 256
    max_num_batched_tokens: Annotated[int, _limit("Rows of a pass.", "N", min=1)] = 256
    max_prompt_tokens: Annotated[
        int | None, _limit("Longest prompt. (default: the context)", "N", min=1)
    ] = None
    max_body_size: Annotated[float, _limit("Of a request, in MiB.", "MIB")] = 4.0
    request_timeout: Annotated[float, _limit("Seconds for an answer.", "S")] = 600.0
    drain_timeout: Annotated[
        float, _limit("Seconds that answers may go on after SIGTERM.", "S")
    ] = 300.0

    def engine_settings(self) -> dict[str, Any]:
        """What of these an engine takes."""
        return {
            "max_num_seqs": self.max_num_seqs,
            "max_queued": self.max_queued,
            "max_num_batched_tokens": self.max_num_batched_tokens,
        }


@dataclass(frozen=True)
class AnswerOptions:
    """How answers leave, and what is told of them."""

    pace: Annotated[bool, _answers("--pace", words="Stream token by token at a steady rate.")] = (
        False
    )
    price_per_hour: Annotated[
        float | None,
        _answers(words="Of the machine, in any currency: metrics tell a token's.", value="X"),
    ] = None
    log_prompts: Annotated[bool, _answers("--log-prompts", words="Log what is asked, too.")] = False
    no_prefix_caching: Annotated[
        bool, _answers("--no-prefix-caching", words="Share no pages between requests.")
    ] = False
    no_page: Annotated[bool, _answers("--no-page", words="Serve no page at /, and no /live.")] = (
        False
    )


def server_settings(
    name: str, listen: ListenOptions, limits: LimitOptions, answers: AnswerOptions
) -> ServerSettings:
    """The server's settings; `name` is the model's where it is served under no other."""
    from foredraft.server.settings import ServerSettings

    size = limits.max_body_size
    if not 0 < size < 2**20:
        raise ConfigError(f"--max-body-size must be a number of MiB above 0, got {size:g}")
    keys = tuple(listen.keys())
    return ServerSettings(
        model_names=tuple(listen.served_model_name or (name,)),
        api_keys=keys,
        allowed_hosts=listen.hosts(keys),
        cors_origins=tuple(listen.cors_origin or ()),
        max_body_bytes=max(1, int(size * MEBIBYTE)),
        max_prompt_tokens=limits.max_prompt_tokens,
        request_seconds=limits.request_timeout,
        drain_seconds=limits.drain_timeout,
        pace=answers.pace,
        log_prompts=answers.log_prompts,
        page=not answers.no_page,
    )


def from_file(context: Context, path: Path | None) -> Path | None:
    """Take the command's defaults from a TOML file: what is given on the command line goes first.

    Raises ConfigError for a key that is no option, and for a value of another type.
    """
    if path is None:
        return None
    values = read_toml(str(path), "--config")
    options = get_type_hints(context.command.callback)
    names = sorted(options.keys() - {"config", "return"})
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise ConfigError(
            f"--config {str(path)!r} has {unknown[0]!r}; valid keys are {', '.join(names)}"
        )
    table = values.get(TABLE)
    if isinstance(table, dict):
        values[TABLE] = json.dumps(table)
    for name, value in values.items():
        expected = _unlike(options[name], value)
        if expected is not None:
            raise ConfigError(
                f"--config {str(path)!r} has {name} = {ascii(value)[:60]}; expected {expected}"
            )
    context.default_map = {**(context.default_map or {}), **values}
    return path


def _unlike(hint: Any, value: Any) -> str | None:
    """What an option of that type expects, where `value` isn't it: a command line has text alone,
    and would take "7" for a number. A number may stand for its text.
    """
    lists = [each for each in get_args(hint) if get_origin(each) is list]
    if lists:
        (element,) = get_args(lists[0])
        if isinstance(value, list) and not any(_unlike(element, each) for each in value):
            return None
        return f"a list of values, each {_expected(element)[1]}"
    types, words = _expected(hint)
    return None if type(value) in types else words


def _expected(hint: Any) -> tuple[tuple[type, ...], str]:
    kinds = [each for each in get_args(hint) or (hint,) if each in _TYPES]
    return _TYPES[kinds[0]] if kinds else ((str, int, float), "text")


ConfigOption = Annotated[
    Path | None,
    Option(
        "--config",
        help="A TOML file with any of these options, '-' written '_'; the command line goes first.",
        metavar="FILE",
        is_eager=True,
        callback=from_file,
    ),
]
