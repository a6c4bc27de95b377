"""Groups of command-line options that several commands share, as frozen values.

Knows option names and how to check them together; imports neither torch nor the engine until an
option is used.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from foredraft.cli.plan_config_file import SUFFIX, read_speculative_config
from foredraft.cli.prompt import check_text
from foredraft.core.errors import ConfigError, InvalidRequest

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
DEVICES = re.compile(r"cpu|cuda(:\d{1,3})?")
MAX_THREADS = 1024  # far beyond any machine's cores; more would be a slip of the keyboard
LONGEST_QUOTE = 60  # characters of an argument that an error repeats
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


def _sampling(words: str, *names: str, value: str | None = "N") -> Any:
    """`value` stands for what is to be given; None for a flag."""
    return Option(*names, help=words, metavar=value, rich_help_panel=PANEL_SAMPLING)


@dataclass(frozen=True)
class SamplingOptions:
    """The fields of `SamplingParams`, under their own names where a flag reads well."""

    max_tokens: Annotated[int, _sampling("Tokens to generate at most.")] = 256
    min_tokens: Annotated[int, _sampling("No end of sequence before that many.")] = 0
    temperature: Annotated[float, _sampling("0 is greedy.", value="X")] = 0.0
    top_k: Annotated[int, _sampling("Keep the k most likely ids; 0 keeps all.")] = 0
    top_p: Annotated[float, _sampling("Keep the smallest set of this mass.", value="X")] = 1.0
    min_p: Annotated[float, _sampling("Drop ids below min_p times the best.", value="X")] = 0.0
    repetition_penalty: Annotated[float, _sampling("1 is off.", value="X")] = 1.0
    presence_penalty: Annotated[float, _sampling("0 is off.", value="X")] = 0.0
    frequency_penalty: Annotated[float, _sampling("0 is off.", value="X")] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        _sampling("Added to a token's logit; may be repeated.", value="ID=BIAS"),
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None, _sampling("Only these ids; may be repeated.", value="ID")
    ] = None
    banned_token_ids: Annotated[
        list[int] | None, _sampling("Never these ids; may be repeated.", value="ID")
    ] = None
    stop: Annotated[
        list[str] | None, _sampling("A stop string; may be repeated.", value="TEXT")
    ] = None
    stop_token_ids: Annotated[
        list[int] | None, _sampling("A token id that stops; may be repeated.", value="ID")
    ] = None
    ignore_eos: Annotated[
        bool, _sampling("Go on after the end of sequence.", "--ignore-eos", value=None)
    ] = False
    include_stop_str_in_output: Annotated[
        bool,
        _sampling("Keep the stop string in the text.", "--include-stop-str", value=None),
    ] = False
    keep_special_tokens: Annotated[
        bool, _sampling("Show special tokens too.", "--keep-special-tokens", value=None)
    ] = False
    logprobs: Annotated[
        int | None, _sampling("Log-probabilities of this many alternatives (in --json).")
    ] = None
    seed: Annotated[
        int | None, _sampling("The same seed gives the same text, speculation on or off.")
    ] = None

    def params(self, n: int = 1) -> SamplingParams:
        """The checked `SamplingParams`; raises InvalidRequest naming the field."""
        from foredraft.core.sampling import SamplingParams

        for stop in self.stop or ():
            check_text(stop, "--stop")
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values = {key: None if value == [] else value for key, value in values.items()}
        values["skip_special_tokens"] = not values.pop("keep_special_tokens")
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


def _speculation(*names: str, help: str, metavar: str | None = None) -> Any:  # noqa: A002 - typer's
    return Option(*names, help=help, metavar=metavar, rich_help_panel=PANEL_SPECULATION)


@dataclass(frozen=True)
class SpeculationOptions:
    """Which drafter, and how far ahead."""

    speculative_config: Annotated[
        str | None,
        _speculation(
            help='Such as \'{"method": "ngram"}\'; null is plain. Or the .toml of `plan`.',
            metavar="JSON",
        ),
    ] = None
    method: Annotated[
        str | None, _speculation(help="The config's method. (default: auto)", metavar="NAME")
    ] = None
    num_speculative_tokens: Annotated[
        int | None, _speculation(help="The config's draft length.", metavar="N")
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
    """A `--speculative-config` argument: JSON, or a file that `foredraft plan` wrote. Raises
    ConfigError for anything but an object or null.
    """
    check_text(text, "--speculative-config")
    if text.endswith(SUFFIX):
        return read_speculative_config(text)
    try:
        config = json.loads(text, object_pairs_hook=_once_each)
    except ConfigError:
        raise
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"--speculative-config {_quoted(text)} is not JSON: {error.msg} at column "
            f'{error.colno}; an example is \'{{"method": "ngram"}}\''
        ) from None
    except (ValueError, RecursionError):  # a number of thousands of digits, thousands of brackets
        raise ConfigError(
            f"--speculative-config {_quoted(text)} is nested too deep or holds too long a number"
        ) from None
    if config is not None and not isinstance(config, dict):
        raise ConfigError(
            f"--speculative-config must be a JSON object or null, not {_quoted(text)}"
        )
    return config


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; its parser would drop all but the last of equal keys."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ConfigError(f"--speculative-config gives {twice!r} {keys.count(twice)} times")
    return found


def _quoted(text: str) -> str:
    return repr(text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}...")


def _runtime(*names: str, help: str, metavar: str, **more: Any) -> Any:  # noqa: A002 - typer's
    return Option(*names, help=help, metavar=metavar, rich_help_panel=PANEL_RUNTIME, **more)


@dataclass(frozen=True)
class PlaceOptions:
    """Where and in which numbers a model runs."""

    dtype: Annotated[
        DtypeChoice,
        _runtime(help="Of the weights: auto, float32, bfloat16 or float64.", metavar="DTYPE"),
    ] = DtypeChoice.AUTO
    device: Annotated[str, _runtime(help="cpu, cuda or cuda:N.", metavar="DEVICE")] = "cpu"
    kernels: Annotated[
        KernelChoice,
        _runtime(help="auto, reference, or native (needs a CPU).", metavar="NAME"),
    ] = KernelChoice.AUTO
    threads: Annotated[
        int | None,
        _runtime(
            help="Threads of the kernels. (default: all cores)",
            metavar="N", min=1, max=MAX_THREADS,
        ),
    ] = None  # fmt: skip

    def load(self, model: str) -> LoadedModel:
        """The model, fetched first where it is a built-in name; raises UserError."""
        if not DEVICES.fullmatch(self.device):
            raise ConfigError(f"--device {self.device!r}: valid are cpu, cuda and cuda:N")
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


@dataclass(frozen=True)
class RuntimeOptions(PlaceOptions):
    """The same for a model in an engine, and what the engine keeps of requests."""

    kv_dtype: Annotated[
        DtypeChoice,
        _runtime(help="Of the keys and values: the same choices.", metavar="DTYPE"),
    ] = DtypeChoice.AUTO
    max_model_len: Annotated[
        int | None, _runtime(help="Longest prompt and output together.", metavar="N", min=1)
    ] = None
    memory: Annotated[
        str | None,
        _runtime(
            help="GiB, or a share (50%), of weights, keys and values of the target and a draft "
            "model. (default: 2 GiB of keys and values)",
            metavar="SIZE",
        ),
    ] = None

    def load(self, model: str) -> LoadedModel:
        """As `PlaceOptions.load`; what is said of memory is checked before anything is fetched."""
        if self.memory is not None:
            from foredraft.engine.memory import memory_amount

            memory_amount(self.memory)
        return super().load(model)

    def with_threads(self, threads: int | None) -> RuntimeOptions:
        """The same with another number of threads."""
        return replace(self, threads=threads)

    def llm(self, loaded: LoadedModel, config: dict[str, Any] | None, **more: Any) -> LLM:
        """An engine over a model that may be shared with others."""
        from foredraft import LLM
        from foredraft.cli.download import fetch_draft

        fetch_draft(config)
        return LLM(loaded, speculative_config=config, **self.engine_settings(), **more)

    def engine_settings(self) -> dict[str, Any]:
        """What of these options an engine takes, beside the loaded model."""
        return {
            "kv_dtype": self.kv_dtype.value,
            "max_model_len": self.max_model_len,
            "memory": self.memory,
        }
