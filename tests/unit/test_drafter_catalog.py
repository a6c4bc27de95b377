"""How a speculative method is found and made, and what is said when it cannot be."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from foredraft.core.errors import ConfigError
from foredraft.drafters import catalog
from foredraft.drafters.catalog import build_drafter, method_names, option_names
from foredraft.drafters.interface import Capabilities
from foredraft.drafters.ngram import NgramDrafter
from foredraft.engine.config import SpeculativeConfig
from foredraft.testing.drafters import EmptyDrafter, RepeatDrafter, ScriptedDrafter

HERE = "foredraft.testing.drafters"


@pytest.mark.parametrize("method", ["ngram", "auto"])
def test_built_in_methods_take_their_options(method: str) -> None:
    built = build_drafter(method, {"prompt_lookup_max": 5, "prompt_lookup_match": "earliest"})
    assert isinstance(built.drafter, NgramDrafter)
    assert built.drafter.options.prompt_lookup_max == 5
    assert built.drafter.options.prompt_lookup_match == "earliest"
    assert built.num_speculative_tokens == NgramDrafter().capabilities.num_speculative_tokens


@pytest.mark.parametrize("path", [f"{HERE}:RepeatDrafter", f"{HERE}.RepeatDrafter"])
def test_a_dotted_path_is_a_method(path: str) -> None:
    built = build_drafter(path, {"token": 3})
    assert isinstance(built.drafter, RepeatDrafter)
    assert built.drafter.token == 3
    assert built.num_speculative_tokens == catalog.DEFAULT_DRAFT_LENGTH


def test_an_installed_package_adds_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("theirs", f"{HERE}:EmptyDrafter", catalog.ENTRY_POINT_GROUP),
        EntryPoint("ngram", f"{HERE}:EmptyDrafter", catalog.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(catalog, "entry_points", lambda group: points)
    assert method_names() == sorted({"auto", "theirs", *catalog.BUILT_IN})
    assert isinstance(build_drafter("theirs").drafter, EmptyDrafter)
    assert isinstance(build_drafter("ngram").drafter, NgramDrafter)


class NeedsTarget(ScriptedDrafter):
    capabilities = Capabilities(num_speculative_tokens=6)

    def __init__(self, target: object) -> None:
        self.target = target


def test_a_constructor_that_names_the_target_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_imported", lambda method, path: NeedsTarget)
    target = object()
    built = build_drafter("some.module:NeedsTarget", {}, target)
    assert isinstance(built.drafter, NeedsTarget)
    assert built.drafter.target is target
    assert built.num_speculative_tokens == 6
    assert option_names("some.module:NeedsTarget") == []


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (
            "nrgam",
            {},
            "unknown speculative method 'nrgam'; valid are auto, blended, cascade, .*ngram, .*"
            "or a path",
        ),
        ("no.such.module:Drafter", {}, "cannot import speculative method 'no.such.module:Drafter'"),
        (f"{HERE}:Nothing", {}, "cannot import speculative method"),
        (f"{HERE}:__name__", {}, "names no drafter class"),
        ("collections:OrderedDict", {}, "names no drafter class"),
        ("fractions:Fraction", {}, "gives a Fraction, which is no drafter"),
        (f"{HERE}:RepeatDrafter", {}, "needs the option 'token'"),
        (
            "ngram",
            {"prompt_lokup_max": 3},
            "unknown option 'prompt_lokup_max' for speculative method 'ngram'; valid are method, "
            "num_speculative_tokens, num_speculative_tokens_per_batch_size, policy, objective, "
            "recalibrate, draft_confidence_threshold, rejection_sample_method, "
            "synthetic_acceptance_rates, "
            "synthetic_acceptance_length, posterior_threshold, posterior_alpha, "
            "prompt_lookup_min, prompt_lookup_max, prompt_lookup_match",
        ),
        ("auto", {"target": 1}, "unknown option 'target'"),
        ("ngram", {"prompt_lookup_min": -1}, "prompt_lookup_min must be an integer of 1 or more"),
    ],
)
def test_mistakes_are_named(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_drafter(method, options)


def test_the_common_keys_are_those_of_the_engine() -> None:
    fields = set(SpeculativeConfig.__dataclass_fields__) - {"options"}
    assert fields == set(catalog.COMMON_KEYS)
