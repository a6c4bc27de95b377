"""The engine's settings and the speculative configuration, validated when they are made and never
changed after.

Knows names and ranges; knows no drafter: keys that belong to one are passed on to it and refused by
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from foredraft.core.errors import ConfigError

REJECTION_SAMPLE_METHODS = ("standard", "coupled")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How to speculate. `options` are the drafter's own keys, such as `prompt_lookup_max`."""

    method: str = "auto"
    # Most draft tokens a step; None: the drafter's default.
    num_speculative_tokens: int | None = None
    rejection_sample_method: str | None = None  # None: coupled with a seed, standard without
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or not self.method:
            raise ConfigError(f"method must be the name of a drafter, got {self.method!r}")
        tokens = self.num_speculative_tokens
        if tokens is not None and (type(tokens) is not int or not 0 <= tokens <= 64):
            raise ConfigError(f"num_speculative_tokens must be an integer in 0..64, got {tokens!r}")
        rule = self.rejection_sample_method
        if rule is not None and rule not in REJECTION_SAMPLE_METHODS:
            valid = ", ".join(REJECTION_SAMPLE_METHODS)
            raise ConfigError(f"rejection_sample_method must be one of {valid}, got {rule!r}")

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> SpeculativeConfig:
        """Common keys to fields, every other key to the drafter. Raises ConfigError."""
        if not isinstance(config, Mapping):
            raise ConfigError(f"speculative_config must be an object or null, got {config!r}")
        common = {f.name for f in fields(cls)} - {"options"}
        known = {key: value for key, value in config.items() if key in common}
        return cls(**known, options={k: v for k, v in config.items() if k not in common})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of the engine. Rows and tokens are counts a step; pages hold `page_size` positions
    each.
    """

    max_model_len: int
    page_size: int = 16
    max_num_seqs: int = 16  # requests running at once
    # Rows of one pass: prompt chunks, pending tokens and draft nodes.
    max_num_batched_tokens: int = 256
    # Most prompt rows of one request in a pass; None: the row budget.
    prefill_chunk_size: int | None = None
    num_pages: int = 1

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "page_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_pages",
        ):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")
        chunk = self.prefill_chunk_size
        if chunk is not None and (type(chunk) is not int or chunk < 1):
            raise ConfigError(
                f"prefill_chunk_size must be a positive integer or null, got {chunk!r}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running request needs a row"
            )

    def pages_for(self, num_slots: int) -> int:
        """Pages that hold `num_slots` positions."""
        return -(-num_slots // self.page_size)
