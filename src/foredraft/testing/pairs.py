"""Tiny target and draft models that agree to a known degree, so that acceptance is a known number.

Know how to build weights whose greedy next token is a function of the last token alone, and how an
engine with chain drafts walks along it; know no engine and no drafter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor

from foredraft.models.config import ModelConfig
from foredraft.models.load import LoadedModel
from foredraft.testing.models import (
    BOS_ID,
    EOS_ID,
    TinySizes,
    assemble,
    random_weights,
    tiny_config,
)

_FIRST_ORDINARY = max(BOS_ID, EOS_ID) + 1
_PAIR_VOCAB_SIZE = 42  # 40 ordinary tokens: every multiple of 0.05 but 0.975 is a whole number
_NEVER = -1000.0  # exp of it is 0 in float64 too


@dataclass(frozen=True, slots=True)
class TinyPair:
    """A target and a draft model whose greedy next token depends on the last token alone.

    The target's successors form one cycle through all ordinary tokens; those of `agreement` of them
    are the draft's too. BOS and EOS are never said, at any temperature; read, they count as the
    first ordinary token.
    """

    target: LoadedModel
    draft: LoadedModel
    agreement: float
    successors: tuple[int, ...]  # the target's greedy next token, by token
    draft_successors: tuple[int, ...]

    def continuation(self, token: int, num_tokens: int) -> list[int]:
        """What the target says greedily after `token`."""
        output: list[int] = []
        for _ in range(num_tokens):
            token = self.successors[token]
            output.append(token)
        return output

    def accepted_by_step(self, token: int, k: int, num_steps: int) -> list[int]:
        """Draft tokens accepted in each of `num_steps` greedy steps with chains of length `k`.

        `token` is the pending one of the first step: the prompt's last, where that step drafts.
        """
        accepted: list[int] = []
        for _ in range(num_steps):
            count, token = self._step(token, k)
            accepted.append(count)
        return accepted

    def expected_acceptance_by_position(self, k: int) -> tuple[float, ...]:
        """`[k]` P(the first i + 1 draft tokens are accepted), over whole turns of the cycle.

        A step never goes past a token where the two differ, so that all walks agree from the first
        such token on: the numbers hold for every prompt, less what comes before it.
        """
        accepted = self._whole_turns(k)
        return tuple(sum(count > i for count in accepted) / len(accepted) for i in range(k))

    def mean_acceptance_length(self, k: int) -> float:
        """tau: tokens a step over whole turns of the cycle, the extra one included."""
        accepted = self._whole_turns(k)
        return 1.0 + sum(accepted) / len(accepted)

    def _step(self, token: int, k: int) -> tuple[int, int]:
        """Accepted draft tokens of one step, and the next pending token."""
        accepted = 0
        while accepted < k and self.draft_successors[token] == self.successors[token]:
            token = self.successors[token]
            accepted += 1
        return accepted, self.successors[token]

    def _whole_turns(self, k: int) -> list[int]:
        differing = [t for t, s in enumerate(self.successors) if self.draft_successors[t] != s]
        start = self.successors[differing[-1] if differing else _FIRST_ORDINARY]
        count, token = self._step(start, k)
        accepted = [count]
        while token != start:
            count, token = self._step(token, k)
            accepted.append(count)
        return accepted


def tiny_pair(
    seed: int = 0,
    *,
    agreement: float = 0.8,
    draft_layers: int = 1,
    draft_max_positions: int | None = None,
    kernels: str = "reference",
    dtype: str = "float64",
    device: str = "cpu",
    num_threads: int | None = None,
    sharpness: float = 2.0,
    **sizes: Unpack[TinySizes],
) -> TinyPair:
    """A pair with a known agreement; other arguments as in `tiny_model`, by default 42 ids.

    Attention and feed-forward networks run, on random weights, but add nothing. A token is a vector
    of signs; the head's row of a token is the vector of its predecessor. All numbers up to the
    final norm are small integers, so that every dtype and kernel has the same greedy text.

    Raises ValueError for an agreement that is no whole number of ordinary tokens or leaves just one
    to differ (its successor would be a second one's too), and for too small a `hidden_size`.
    """
    sizes.setdefault("vocab_size", _PAIR_VOCAB_SIZE)
    config = tiny_config(**(sizes | {"tie_word_embeddings": False}))
    draft_config = _draft_config(config, draft_max_positions, draft_layers)
    generator = torch.Generator().manual_seed(seed)
    successors = _cycle(config.vocab_size, generator)
    draft_successors = _changed(successors, agreement, generator)
    codes = _codes(config, generator)
    target, draft = (
        assemble(
            each,
            _successor_weights(each, codes, table, seed, sharpness),
            f"tiny-pair-{seed}-{name}",
            kernels,
            dtype,
            device,
            num_threads,
        )
        for each, table, name in (
            (config, successors, "target"),
            (draft_config, draft_successors, "draft"),
        )
    )
    return TinyPair(target, draft, agreement, tuple(successors), tuple(draft_successors))


def tiny_noisy_pair(
    seed: int = 0,
    *,
    noise: float = 0.1,
    draft_max_positions: int | None = None,
    kernels: str = "reference",
    dtype: str = "float64",
    device: str = "cpu",
    num_threads: int | None = None,
    sharpness: float = 2.0,
    **sizes: Unpack[TinySizes],
) -> tuple[LoadedModel, LoadedModel]:
    """`tiny_model(seed, ...)` and a draft model of another law that often agrees with it.

    The draft's matrices are the target's plus `noise` times their own standard deviation, at
    random: at 0 the laws are equal, at 0.1 about 7 of 10 greedy tokens, at 1 hardly any.
    """
    config = tiny_config(**sizes)
    weights = random_weights(config, seed, sharpness)
    generator = torch.Generator().manual_seed(seed + 1)
    noisy = {
        name: weight if weight.dim() == 1 else _disturbed(weight, noise, generator)
        for name, weight in weights.items()
    }
    target, draft = (
        assemble(each, tensors, name, kernels, dtype, device, num_threads)
        for each, tensors, name in (
            (config, weights, f"tiny-{seed}"),
            (_draft_config(config, draft_max_positions), noisy, f"tiny-{seed}-noisy"),
        )
    )
    return target, draft


def _draft_config(
    config: ModelConfig, max_positions: int | None, num_layers: int | None = None
) -> ModelConfig:
    return replace(
        config,
        num_layers=num_layers or config.num_layers,
        max_position_embeddings=max_positions or config.max_position_embeddings,
    )


def _disturbed(weight: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    draws = torch.randn(weight.shape, dtype=weight.dtype, generator=generator)
    return weight + noise * weight.std() * draws


def _cycle(vocab_size: int, generator: torch.Generator) -> list[int]:
    """The successor of each token: one cycle through the ordinary ones, in random order."""
    order = torch.randperm(vocab_size - _FIRST_ORDINARY, generator=generator) + _FIRST_ORDINARY
    table = [0] * vocab_size
    for token, following in zip(order.tolist(), order.roll(-1).tolist(), strict=True):
        table[token] = following
    for special in range(_FIRST_ORDINARY):
        table[special] = table[_FIRST_ORDINARY]
    return table


def _changed(successors: list[int], agreement: float, generator: torch.Generator) -> list[int]:
    """The successors with those of a random `1 - agreement` of the ordinary tokens rotated."""
    count = len(successors) - _FIRST_ORDINARY
    differing = round((1.0 - agreement) * count)
    if abs((1.0 - agreement) * count - differing) > 1e-6 or not 0 <= differing <= count:
        raise ValueError(
            f"agreement is {agreement}; expected a multiple of 1/{count} (ordinary tokens), 0 to 1"
        )
    if differing == 1:
        raise ValueError(f"agreement is {agreement}; expected none or at least two of {count} off")
    chosen = torch.randperm(count, generator=generator)[:differing] + _FIRST_ORDINARY
    changed = list(successors)
    for token, other in zip(chosen.tolist(), chosen.roll(-1).tolist(), strict=True):
        changed[token] = successors[other]
    for special in range(_FIRST_ORDINARY):
        changed[special] = changed[_FIRST_ORDINARY]
    return changed


def _codes(config: ModelConfig, generator: torch.Generator) -> Tensor:
    """`[V, H]` of +1 and -1: a constant 1, the bits of the id, random signs.

    The specials have the code of the first ordinary token.
    """
    num_bits = (config.vocab_size - 1).bit_length()
    if config.hidden_size < num_bits + 1:
        raise ValueError(
            f"hidden_size is {config.hidden_size}; {config.vocab_size} ids need {num_bits + 1}"
        )
    bits = torch.randint(0, 2, (config.vocab_size, config.hidden_size), generator=generator)
    bits[:, 0] = 1
    ids = torch.arange(config.vocab_size)
    for i in range(num_bits):
        bits[:, 1 + i] = ids >> i & 1
    bits[:_FIRST_ORDINARY] = bits[_FIRST_ORDINARY].clone()
    return bits.double() * 2.0 - 1.0


def _successor_weights(
    config: ModelConfig, codes: Tensor, successors: list[int], seed: int, sharpness: float
) -> dict[str, Tensor]:
    weights = random_weights(config, seed, sharpness)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    head = torch.zeros_like(weights["lm_head.weight"])
    # <code, code> is H for a token itself, less for all others, about sqrt(H) in size.
    scale = sharpness / config.hidden_size**0.5
    for token in range(_FIRST_ORDINARY, config.vocab_size):
        head[successors[token]] = scale * codes[token]
    head[:_FIRST_ORDINARY, 0] = _NEVER
    return weights | {
        "model.embed_tokens.weight": codes,
        "model.norm.weight": torch.ones_like(weights["model.norm.weight"]),
        "lm_head.weight": head,
    }
