"""From the `method` and the options of a `speculative_config` to a drafter.

Knows where drafters are found: built in, announced by installed packages (entry points of the group
`foredraft.drafters`), or named by a dotted path. Knows no drafter's options: the parameters of its
constructor are the valid keys. A new built-in drafter is one line in `BUILT_IN`.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from foredraft.core.errors import ConfigError
from foredraft.drafters.interface import Drafter

BUILT_IN: Mapping[str, str] = {
    "blended": "foredraft.drafters.blended:BlendedDrafter",
    "cascade": "foredraft.drafters.cascade:CascadeDrafter",
    "combined": "foredraft.drafters.combined:CombinedDrafter",
    "draft_model": "foredraft.drafters.draft_model:DraftModelDrafter",
    "eagle": "foredraft.drafters.earlier_eagle:EarlierEagleDrafter",
    "eagle3": "foredraft.drafters.eagle:EagleDrafter",
    "early_exit": "foredraft.drafters.early_exit:EarlyExitDrafter",
    "grammar": "foredraft.drafters.grammar:GrammarDrafter",
    "lookahead": "foredraft.drafters.lookahead:LookaheadDrafter",
    "medusa": "foredraft.drafters.medusa:MedusaDrafter",
    "ngram": "foredraft.drafters.ngram:NgramDrafter",
    "ngram_table": "foredraft.drafters.ngram_table:NgramTableDrafter",
    "suffix": "foredraft.drafters.suffix:SuffixDrafter",
    "prediction": "foredraft.drafters.prediction:PredictionDrafter",
    "recycling": "foredraft.drafters.recycling:RecyclingDrafter",
}
AUTO = "auto"  # the best at hand for the model: the first of these that takes the options given
AUTO_METHODS = ("ngram_table", "suffix", "ngram", "draft_model")
ENTRY_POINT_GROUP = "foredraft.drafters"
DEFAULT_DRAFT_LENGTH = 4  # where neither the config nor the drafter says
TARGET_PARAMETER = "target"  # a constructor that names it gets the target model
# Keys of a speculative config that are nobody's option; named in errors, so that typos are seen.
COMMON_KEYS = (
    "method",
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "policy",
    "objective",
    "recalibrate",
    "draft_confidence_threshold",
    "rejection_sample_method",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
    "posterior_threshold",
    "posterior_alpha",
)


@dataclass(frozen=True, slots=True)
class BuiltDrafter:
    """A drafter and how much it drafts where the config says nothing."""

    drafter: Drafter
    num_speculative_tokens: int


def method_names() -> list[str]:
    """What `method` may be by name: built-in drafters, installed ones, and "auto"."""
    return sorted({AUTO, *BUILT_IN, *_installed()})


def option_names(method: str) -> list[str]:
    """The option keys that `method` takes. Raises ConfigError for an unknown method."""
    return [p.name for p in _options(_factory(method))]


def resolve_method(method: str, options: Mapping[str, Any], target: Any | None = None) -> str:
    """`method`, or what "auto" stands for beside `options`: with a `model`, a draft model.

    A factory with a `suits` is passed over where that says no to `target`, the loaded model.
    """
    if method != AUTO:
        return method
    fitting = (
        name
        for name in AUTO_METHODS
        if options.keys() <= set(option_names(name)) and _suits(name, target)
    )
    return next(fitting, AUTO_METHODS[-1])


def build_drafter(
    method: str,
    options: Mapping[str, Any] | None = None,
    target: Any | None = None,
    common_keys: Sequence[str] = COMMON_KEYS,
) -> BuiltDrafter:
    """The drafter that `method` names, made with `options` (a config without its common keys).

    `method` is a name of `method_names`, "package.module:Class" or "package.module.Class". A
    built-in drafter goes before an installed one of the same name. `target`, the loaded model, is
    given to constructors that have a parameter of that name. `common_keys` are named as valid
    beside the options.

    Raises ConfigError for an unknown method or option, a missing option, a path that cannot be
    imported, and an object that is no drafter.
    """
    arguments = dict(options or {})
    method = resolve_method(method, arguments, target)
    factory = _factory(method)
    _check_options(method, _options(factory), arguments, common_keys)
    if TARGET_PARAMETER in inspect.signature(factory).parameters:
        arguments[TARGET_PARAMETER] = target
    drafter = factory(**arguments)
    if not isinstance(drafter, Drafter):
        raise ConfigError(
            f"speculative method {method!r} gives a {type(drafter).__name__}, which is no drafter: "
            "it needs capabilities, propose, observe and release"
        )
    length = drafter.capabilities.num_speculative_tokens
    return BuiltDrafter(drafter, DEFAULT_DRAFT_LENGTH if length is None else length)


def build_member(key: str, config: Any, target: Any | None) -> Drafter:
    """The drafter that another one is made of: `config` is an object with a `method` and its
    options, found at `key` of the other's config; or a drafter.

    Raises ConfigError, with the key.
    """
    if isinstance(config, Drafter):
        return config
    if not isinstance(config, Mapping) or not isinstance(config.get("method"), str):
        raise ConfigError(f'{key} must be an object with a "method", got {config!r}')
    options = {name: value for name, value in config.items() if name != "method"}
    try:
        return build_drafter(config["method"], options, target, ("method",)).drafter
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def _suits(method: str, target: Any | None) -> bool:
    suits = getattr(_factory(method), "suits", None)
    return suits is None or bool(suits(target))


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _factory(method: str) -> Callable[..., Any]:
    if method in BUILT_IN:
        return _imported(method, BUILT_IN[method])
    installed = _installed()
    if method in installed:
        return _imported(method, installed[method].value)
    if "." in method or ":" in method:
        return _imported(method, method)
    raise ConfigError(
        f"unknown speculative method {method!r}; valid are {', '.join(method_names())}, "
        'or a path "package.module:Class"'
    )


def _imported(method: str, path: str) -> Callable[..., Any]:
    try:
        found: Any = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"cannot import speculative method {method!r}: {error}") from error
    try:
        inspect.signature(found)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"speculative method {method!r} names no drafter class") from error
    factory: Callable[..., Any] = found
    return factory


def _options(factory: Callable[..., Any]) -> list[inspect.Parameter]:
    """The constructor's named parameters that a config may set."""
    unnamed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(factory).parameters.values()
    return [p for p in parameters if p.kind not in unnamed and p.name != TARGET_PARAMETER]


def _check_options(
    method: str,
    options: list[inspect.Parameter],
    given: Mapping[str, Any],
    common_keys: Sequence[str],
) -> None:
    names = [p.name for p in options]
    for key in given:
        if key not in names:
            raise ConfigError(
                f"unknown option {key!r} for speculative method {method!r}; "
                f"valid are {', '.join(dict.fromkeys([*common_keys, *names]))}"
            )
    for option in options:
        if option.default is inspect.Parameter.empty and option.name not in given:
            raise ConfigError(f"speculative method {method!r} needs the option {option.name!r}")
