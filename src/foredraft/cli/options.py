"""Groups of command-line options that several commands share, as frozen values.

Knows option names and how to check them together; imports neither torch nor the engine until an
option is used.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from typer import Argument, Option

from foredraft.core.errors import ConfigError, InvalidRequest, UserError

if TYPE_CHECKING:
    from foredraft import LLM
    from foredraft.core.sampling import SamplingParams
    from foredraft.models.load import LoadedModel

ModelArgument = Annotated[
    str,
    Argument(
        metavar="MODEL",
        help="A built-in name (smollm2-135m), a Hugging Face directory or a GGUF file.",
        show_default=False,
    ),
]
JsonFlag = Annotated[bool, Option("--json", help="Print one JSON object to stdout instead.")]
PANEL_SAMPLING = "Sampling"
PANEL_SPECULATION = "Speculation"
PANEL_RUNTIME = "Machine and model"


class KernelChoice(StrEnum):
    AUTO = "auto"
    NATIVE = "native"
    REFERENCE = "reference"


class DtypeChoice(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"


def _sampling(*names: str, help: str) -> Any:  # noqa: A002 - the word typer uses
    return Option(*names, help=help, rich_help_panel=PANEL_SAMPLING)


@dataclass(frozen=True)
class SamplingOptions:
    """Every field of `SamplingParams`, under its own name."""

    max_tokens: Annotated[int, _sampling(help="Tokens to generate at most.")] = 256
    min_tokens: Annotated[int, _sampling(help="No end of sequence before that many.")] = 0
    temperature: Annotated[float, _sampling(help="0 is greedy.")] = 0.0
    top_k: Annotated[int, _sampling(help="Keep the k most likely ids; 0 keeps all.")] = 0
    top_p: Annotated[float, _sampling(help="Keep the smallest set of this mass.")] = 1.0
    min_p: Annotated[float, _sampling(help="Drop ids below min_p times the best.")] = 0.0
    repetition_penalty: Annotated[float, _sampling(help="1 is off.")] = 1.0
    presence_penalty: Annotated[float, _sampling(help="0 is off.")] = 0.0
    frequency_penalty: Annotated[float, _sampling(help="0 is off.")] = 0.0
    logit_bias: Annotated[
        list[str] | None, _sampling(help="ID=BIAS, added to a token's logit; may be repeated.")
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None, _sampling(help="Only these ids; may be repeated.")
    ] = None
    banned_token_ids: Annotated[
        list[int] | None, _sampling(help="Never these ids; may be repeated.")
    ] = None
    stop: Annotated[list[str] | None, _sampling(help="A stop string; may be repeated.")] = None
    stop_token_ids: Annotated[
        list[int] | None, _sampling(help="A token id that stops; may be repeated.")
    ] = None
    ignore_eos: Annotated[
        bool, _sampling("--ignore-eos", help="Go on after the end of sequence.")
    ] = False
    include_stop_str_in_output: Annotated[
        bool, _sampling("--include-stop-str", help="Keep the stop string in the text.")
    ] = False
    skip_special_tokens: Annotated[
        bool,
        _sampling("--skip-special-tokens/--keep-special-tokens", help="Special tokens in text."),
    ] = True
    logprobs: Annotated[
        int | None, _sampling(help="Log-probabilities of this many alternatives (in --json).")
    ] = None
    seed: Annotated[
        int | None, _sampling(help="The same seed gives the same text, speculation on or off.")
    ] = None

    def params(self, n: int = 1) -> SamplingParams:
        """The checked `SamplingParams`; raises InvalidRequest naming the field."""
        from foredraft.core.sampling import SamplingParams

        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values = {key: None if value == [] else value for key, value in values.items()}
        values["logit_bias"] = _biases(self.logit_bias)
        return SamplingParams(n=n, **values)


def _biases(items: list[str] | None) -> dict[int, float] | None:
    if not items:
        return None
    biases: dict[int, float] = {}
    for item in items:
        token, separator, bias = item.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            separator = ""
        if not separator:
            raise InvalidRequest(f"logit_bias {item!r} is not ID=BIAS, for example 42=-1.5")
    return biases


def _speculation(*names: str, help: str, **more: Any) -> Any:  # noqa: A002 - the word typer uses
    return Option(*names, help=help, rich_help_panel=PANEL_SPECULATION, **more)


@dataclass(frozen=True)
class SpeculationOptions:
    """Which drafter, and how far ahead."""

    speculative_config: Annotated[
        str | None, _speculation(help='JSON, for example \'{"method": "ngram"}\'; null is plain.')
    ] = None
    method: Annotated[
        str | None, _speculation(help="Shorthand for the config's method. (default: auto)")
    ] = None
    num_speculative_tokens: Annotated[
        int | None, _speculation(help="Shorthand for the config's draft length.")
    ] = None
    no_speculation: Annotated[
        bool, _speculation("--no-speculation", help="Plain decoding: one token a pass.")
    ] = False

    def config(self) -> dict[str, Any] | None:
        """The config to give to the engine, None for plain decoding; raises ConfigError."""
        shorthands = {
            key: value
            for key in ("method", "num_speculative_tokens")
            if (value := getattr(self, key)) is not None
        }
        if self.no_speculation:
            if self.speculative_config is not None or shorthands:
                raise ConfigError("--no-speculation excludes every other option of speculation")
            return None
        if self.speculative_config is None:
            return {"method": "auto", **shorthands}
        config = parse_config(self.speculative_config)
        if config is None:
            if shorthands:
                raise ConfigError("--speculative-config null (plain) excludes the shorthands")
            return None
        for key in shorthands:
            if key in config:
                option = f"--{key.replace('_', '-')}"
                raise ConfigError(f"{key} is given twice: in --speculative-config and by {option}")
        return {**config, **shorthands}


def parse_config(text: str) -> dict[str, Any] | None:
    """A `--speculative-config` argument; raises ConfigError for anything but an object or null."""
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"--speculative-config {text!r} is not JSON: {error.msg} at column {error.colno}; "
            'an example is \'{"method": "ngram"}\''
        ) from None
    if config is not None and not isinstance(config, dict):
        raise ConfigError(f"--speculative-config must be a JSON object or null, not {text}")
    return config


def _runtime(*names: str, help: str, **more: Any) -> Any:  # noqa: A002 - the word typer uses
    return Option(*names, help=help, rich_help_panel=PANEL_RUNTIME, **more)


@dataclass(frozen=True)
class RuntimeOptions:
    """Where and in which numbers the model runs."""

    dtype: Annotated[DtypeChoice, _runtime(help="Of the weights.")] = DtypeChoice.AUTO
    kv_dtype: Annotated[DtypeChoice, _runtime(help="Of the keys and values.")] = DtypeChoice.AUTO
    device: Annotated[str, _runtime(help="A torch device.")] = "cpu"
    kernels: Annotated[KernelChoice, _runtime(help="native needs a CPU.")] = KernelChoice.AUTO
    threads: Annotated[
        int | None, _runtime(help="Threads of the kernels. (default: all cores)", min=1)
    ] = None
    max_model_len: Annotated[
        int | None, _runtime(help="Longest prompt and output together.", min=1)
    ] = None

    def load(self, model: str) -> LoadedModel:
        """The model, fetched first where it is a built-in name; raises UserError."""
        from foredraft.cli.download import fetch_once
        from foredraft.models.load import load_model

        fetch_once(model)
        return load_model(
            model,
            dtype=self.dtype.value,
            device=self.device,
            kernels=self.kernels.value,
            num_threads=self.threads,
        )

    def with_threads(self, threads: int | None) -> RuntimeOptions:
        """The same with another number of threads."""
        return replace(self, threads=threads)

    def llm(self, loaded: LoadedModel, config: dict[str, Any] | None, **more: Any) -> LLM:
        """An engine over a model that may be shared with others."""
        from foredraft import LLM

        return LLM(loaded, speculative_config=config, **self.engine_settings(), **more)

    def engine_settings(self) -> dict[str, Any]:
        """What of these options an engine takes, beside the loaded model."""
        return {"kv_dtype": self.kv_dtype.value, "max_model_len": self.max_model_len}


def read_text(path: Path, what: str) -> str:
    """The text of a file that the user named; raises UserError with the path."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{what} {str(path)!r} is not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"cannot read {what} {str(path)!r}: {error.strerror}") from None


def option_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let parameters whose type is a group of options above appear as the group's single options.

    The command keeps its short signature; typer sees one flat list of options.
    """
    hints = get_type_hints(command, include_extras=True)
    hints.pop("return", None)
    defaults = inspect.signature(command).parameters
    groups: dict[str, tuple[Any, list[str]]] = {}
    flat: list[inspect.Parameter] = []
    for name, hint in hints.items():
        if is_dataclass(hint):
            members = list(_parameters_of(hint))
            groups[name] = (hint, [member.name for member in members])
            flat.extend(members)
        else:
            flat.append(
                defaults[name].replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY)
            )

    @functools.wraps(command)
    def flattened(**given: Any) -> Any:
        for name, (group, members) in groups.items():
            given[name] = group(**{member: given.pop(member) for member in members})
        return command(**given)

    shown: Any = flattened
    shown.__signature__ = inspect.Signature(flat)
    shown.__annotations__ = {each.name: each.annotation for each in flat}
    return flattened


def _parameters_of(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for each in fields(group):
        yield inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default,  # every option has one
            annotation=hints[each.name],
        )
