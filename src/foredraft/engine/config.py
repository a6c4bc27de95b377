"""The engine's settings and the speculative configuration, validated when they are made and never
changed after.

Knows names and ranges; knows no drafter: keys that belong to one are passed on to it and refused by
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import pairwise
from typing import Any

from foredraft.core.errors import ConfigError
from foredraft.core.synthetic import rates_of_length
from foredraft.core.typical import POSTERIOR_ALPHA, POSTERIOR_THRESHOLD
from foredraft.planning.allocation import Objective
from foredraft.planning.policy import WidthByBatchSize


class Rule(StrEnum):
    """What `rejection_sample_method` may be: how drafts are verified."""

    STANDARD = "standard"
    BLOCK = "block"
    COUPLED = "coupled"
    TYPICAL = "typical"
    SYNTHETIC = "synthetic"


# What a speculative config says about verification; the rest is about drafting.
RULE_KEYS = (
    "rejection_sample_method",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
    "posterior_threshold",
    "posterior_alpha",
)
# ... and about how much to draft, and when.
POLICY_KEYS = (
    "policy",
    "objective",
    "num_speculative_tokens_per_batch_size",
    "recalibrate",
    "draft_confidence_threshold",
)
ADAPTIVE, FIXED = "adaptive", "fixed"


@dataclass(frozen=True, slots=True)
class Verification:
    """How the drafts of a request are verified."""

    rule: Rule
    posterior_threshold: float = POSTERIOR_THRESHOLD  # of "typical"
    posterior_alpha: float = POSTERIOR_ALPHA
    # Of "synthetic": P(the first i draft tokens are accepted).
    synthetic_acceptance_rates: tuple[float, ...] = ()

    @property
    def reads_draft_laws(self) -> bool:
        """Whether the laws that drafts were drawn from decide anything, above temperature 0."""
        return self.rule in (Rule.STANDARD, Rule.BLOCK)

    def changes_law(self, greedy: bool) -> bool:
        """Whether the output of a request can differ from the target's in law (or in tokens, where
        it is greedy).
        """
        return self.rule is Rule.SYNTHETIC or (self.rule is Rule.TYPICAL and not greedy)


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How to speculate. `options` are the drafter's own keys, such as `prompt_lookup_max`."""

    method: str = "auto"
    # Most draft tokens a step; None: the drafter's default.
    num_speculative_tokens: int | None = None
    # "fixed": always as many; "adaptive": each step as many as pay, see docs/planning.md.
    policy: str = FIXED
    objective: str | None = None  # of "adaptive": "throughput" (the default) or "latency"
    recalibrate: bool = False  # of "adaptive": measure the costs of a step anew
    # Draft tokens that the drafter itself thinks less likely than this are left out; 0: none.
    draft_confidence_threshold: float = 0.0
    # [[start, end, K], ...]: a draft length for each number of requests, ends included.
    num_speculative_tokens_per_batch_size: Sequence[Sequence[int]] | None = None
    rejection_sample_method: str | None = None  # None: coupled with a seed, standard without
    # One of the two with "synthetic": P(the first i draft tokens are accepted) for each of the
    # num_speculative_tokens, or their sum + 1.
    synthetic_acceptance_rates: Sequence[float] | None = None
    synthetic_acceptance_length: float | None = None
    posterior_threshold: float | None = None  # of "typical", see `core.typical`; None: 0.09
    posterior_alpha: float | None = None  # None: 0.3
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or not self.method:
            raise ConfigError(f"method must be the name of a drafter, got {self.method!r}")
        tokens = self.num_speculative_tokens
        if tokens is not None and (type(tokens) is not int or not 0 <= tokens <= 64):
            raise ConfigError(f"num_speculative_tokens must be an integer in 0..64, got {tokens!r}")
        rule = self.rejection_sample_method
        if rule is not None and rule not in list(Rule):
            valid = ", ".join(Rule)
            raise ConfigError(f"rejection_sample_method must be one of {valid}, got {rule!r}")
        self._check_policy()
        self._check_posterior()
        self._check_synthetic()

    def _check_policy(self) -> None:
        if self.policy not in (FIXED, ADAPTIVE):
            raise ConfigError(f"policy must be one of {FIXED}, {ADAPTIVE}, got {self.policy!r}")
        if self.objective is not None and self.objective not in list(Objective):
            valid = ", ".join(Objective)
            raise ConfigError(f"objective must be one of {valid}, got {self.objective!r}")
        if type(self.recalibrate) is not bool:
            raise ConfigError(f"recalibrate must be true or false, got {self.recalibrate!r}")
        threshold = self.draft_confidence_threshold
        if not _is_number(threshold) or not 0.0 <= threshold <= 1.0:
            raise ConfigError(
                f"draft_confidence_threshold must be a number in 0..1, got {threshold!r}"
            )
        if self.policy == FIXED and (self.objective is not None or self.recalibrate):
            key = "recalibrate" if self.objective is None else "objective"
            raise ConfigError(f'{key} needs "policy": "{ADAPTIVE}"')
        ranges = self.num_speculative_tokens_per_batch_size
        if ranges is None:
            return
        if self.policy == ADAPTIVE:
            raise ConfigError(
                f'num_speculative_tokens_per_batch_size needs "policy": "{FIXED}": "{ADAPTIVE}" '
                "finds the draft length by itself"
            )
        by_batch_size(ranges)

    def _check_posterior(self) -> None:
        for name in ("posterior_threshold", "posterior_alpha"):
            value = getattr(self, name)
            if value is None:
                continue
            if self.rejection_sample_method != Rule.TYPICAL:
                raise ConfigError(f'{name} needs "rejection_sample_method": "typical"')
            if not _is_number(value) or not 0.0 < value <= 1.0:
                raise ConfigError(f"{name} must be a number above 0 and at most 1, got {value!r}")

    def _check_synthetic(self) -> None:
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        given = [
            key for key in RULE_KEYS if key.startswith("synth") and getattr(self, key) is not None
        ]
        if self.rejection_sample_method != Rule.SYNTHETIC:
            if given:
                raise ConfigError(f'{given[0]} needs "rejection_sample_method": "synthetic"')
            return
        if len(given) != 1:
            raise ConfigError(
                'rejection_sample_method "synthetic" needs either synthetic_acceptance_rates or '
                f"synthetic_acceptance_length, got {' and '.join(given) or 'neither'}"
            )
        if rates is not None and not _are_rates(rates):
            raise ConfigError(
                "synthetic_acceptance_rates must be a list of numbers in 0..1 that do not rise, "
                f"got {rates!r}"
            )
        if length is not None and not (_is_number(length) and length >= 1.0):
            raise ConfigError(
                f"synthetic_acceptance_length must be a number of 1 or more, got {length!r}"
            )

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> SpeculativeConfig:
        """Common keys to fields, every other key to the drafter. Raises ConfigError."""
        if not isinstance(config, Mapping):
            raise ConfigError(f"speculative_config must be an object or null, got {config!r}")
        common = {f.name for f in fields(cls)} - {"options"}
        known = {key: value for key, value in config.items() if key in common}
        return cls(**known, options={k: v for k, v in config.items() if k not in common})

    def check_drafter(self, num_speculative_tokens: int, proposes_trees: bool) -> None:
        """Raise ConfigError where a drafter, and the draft length in effect, rule this out."""
        for start, end, width in self.num_speculative_tokens_per_batch_size or ():
            if width > num_speculative_tokens:
                raise ConfigError(
                    f"num_speculative_tokens_per_batch_size: [{start}, {end}, {width}] drafts more "
                    f"than num_speculative_tokens = {num_speculative_tokens}"
                )
        if self.rejection_sample_method == Rule.BLOCK and proposes_trees:
            raise ConfigError(
                'rejection_sample_method "block" verifies chains, and this drafter proposes trees: '
                'name a "method" that drafts chains, such as "ngram", or use "standard" or '
                '"coupled", which verify both'
            )
        rates, most = self.synthetic_acceptance_rates, num_speculative_tokens
        if rates is not None and len(rates) != most:
            raise ConfigError(
                f"synthetic_acceptance_rates must hold {most} numbers, one for each of the "
                f"num_speculative_tokens, got {len(rates)}"
            )
        length = self.synthetic_acceptance_length
        if length is not None and length > most + 1:
            raise ConfigError(
                f"synthetic_acceptance_length must be in 1..{most + 1} with {most} "
                f"num_speculative_tokens, got {length!r}"
            )

    def verification(self, seeded: bool, num_speculative_tokens: int) -> Verification:
        """What verifies a request with a seed of its own, or without one."""
        rule = default_rule(seeded)
        if self.rejection_sample_method is not None:
            rule = Rule(self.rejection_sample_method)
        rates = tuple(self.synthetic_acceptance_rates or ())
        if self.synthetic_acceptance_length is not None:
            rates = rates_of_length(self.synthetic_acceptance_length, num_speculative_tokens)
        threshold, alpha = self.posterior_threshold, self.posterior_alpha
        return Verification(
            rule,
            posterior_threshold=POSTERIOR_THRESHOLD if threshold is None else threshold,
            posterior_alpha=POSTERIOR_ALPHA if alpha is None else alpha,
            synthetic_acceptance_rates=rates,
        )


def by_batch_size(ranges: Any) -> WidthByBatchSize:
    """The static policy of `num_speculative_tokens_per_batch_size`. Raises ConfigError."""
    valid = isinstance(ranges, Sequence) and all(
        isinstance(each, Sequence) and len(each) == 3 and all(type(n) is int for n in each)
        for each in ranges
    )
    if not valid:
        raise ConfigError(
            "num_speculative_tokens_per_batch_size must be a list of [start, end, K] in integers, "
            f"got {ranges!r}"
        )
    try:
        return WidthByBatchSize(tuple((start, end, width) for start, end, width in ranges))
    except ValueError as error:
        raise ConfigError(f"num_speculative_tokens_per_batch_size: {error}") from None


def default_rule(seeded: bool) -> Rule:
    """A seed asks for text that it alone decides."""
    return Rule.COUPLED if seeded else Rule.STANDARD


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_rates(rates: Any) -> bool:
    """Numbers in 0..1 that do not rise."""
    if not isinstance(rates, Sequence) or not all(_is_number(rate) for rate in rates):
        return False
    bounds = [1.0, *rates, 0.0]
    return all(above >= below for above, below in pairwise(bounds))


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
    enable_prefix_caching: bool = True  # requests share pages of equal beginnings

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
        if type(self.enable_prefix_caching) is not bool:
            given = self.enable_prefix_caching
            raise ConfigError(f"enable_prefix_caching must be true or false, got {given!r}")
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
