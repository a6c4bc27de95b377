"""A configuration as a TOML file: what `foredraft plan` writes and `--speculative-config` reads.

Knows the file's form; knows no drafter's keys. The writer knows the values that JSON has, which are
all that a configuration can hold; the reader is Python's own.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foredraft.cli.console import one_line
from foredraft.core.errors import ConfigError, UserError

SUFFIX = ".toml"
TABLE = "speculative_config"
PLAIN = "no_speculation"  # TOML has no null
LONGEST_FILE = 1 << 20  # bytes


def toml(model: str, config: Mapping[str, Any] | None, comments: Sequence[str] = ()) -> str:
    """The file's text: the model, and how to speculate (None: plain decoding)."""
    lines = [f"# {one_line(each)}" for each in comments]
    lines.append(f"model = {_value(model)}")
    if config is None:
        lines.append(f"{PLAIN} = true")
    else:
        lines += ["", f"[{TABLE}]"]
        # What is null is as if left out.
        lines += [
            f"{_key(key)} = {_value(each)}" for key, each in config.items() if each is not None
        ]
    return "\n".join(lines) + "\n"


def read_speculative_config(path: str) -> dict[str, Any] | None:
    """What the file says of speculation: the configuration, or None for plain decoding.

    Raises ConfigError for a file that can't be read, is no TOML, or says nothing of it.
    """
    found = read_toml(path, "--speculative-config")
    config = found.get(TABLE)
    if found.get(PLAIN) is True and config is None:
        return None
    if not isinstance(config, dict):
        raise ConfigError(
            f"--speculative-config {path!r} needs a table [{TABLE}], or {PLAIN} = true"
        )
    return config


def read_toml(path: str, option: str) -> dict[str, Any]:
    """The file's values. Raises ConfigError, naming the option that gave its name."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(LONGEST_FILE + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot read {option} {path!r}: {reason}") from None
    if len(data) > LONGEST_FILE:
        raise ConfigError(f"{option} {path!r} is longer than {LONGEST_FILE} bytes")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, no TOML, thousands of brackets
        raise ConfigError(f"{option} {path!r} is not TOML: {error}") from None


def write_config_file(
    path: Path, model: str, config: Mapping[str, Any] | None, comments: Sequence[str] = ()
) -> None:
    """Raises UserError where the file cannot be written."""
    try:
        path.write_text(toml(model, config, comments), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write --output-config {str(path)!r}: {error.strerror}") from None


def check_config_file(path: Path | None) -> None:
    """Raise UserError, before minutes are spent, for a name that is not to be read back."""
    if path is None:
        return
    if path.suffix != SUFFIX:
        raise UserError(f"--output-config {str(path)!r}: give a name that ends in {SUFFIX}")
    if not path.parent.is_dir():
        raise UserError(
            f"--output-config {str(path)!r}: there is no directory {str(path.parent)!r}"
        )


def _value(value: Any) -> str:
    """A value in TOML. Raises ConfigError for one that it has no form for."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(each) for each in value)}]"
    if isinstance(value, Mapping):
        pairs = (f"{_key(key)} = {_value(each)}" for key, each in value.items() if each is not None)
        return f"{{ {', '.join(pairs)} }}" if value else "{}"
    raise ConfigError(f"a configuration file cannot hold {value!r}")


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _text(key)


def _text(text: str) -> str:
    """A basic string; TOML's escapes are JSON's, but for pairs of surrogates and DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
