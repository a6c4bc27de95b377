"""Counter-based random numbers: what a coin shows is a function of (seed, position, stream, index).

Knows numbers only; keeps no state, so that nothing has to be rolled back after a rejection, and a
coin is the same in any batch, chunk or order. The generator is Philox4x32-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011): key = the two halves of the 64-bit seed,
counter = (block, position low, stream, position high).

- In the coupled rule, position is the token's absolute position: the same noise for target and
  drafters, always.
- In rejection rules, position is the absolute position of the step's first token, and the offset
  within the draft is the index: whether a coin is used depends on the others, so it must not return
  at the same place in a later step.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

NOISE: Final = 0  # the target's Gumbel noise, shared by coupled drafters
ACCEPT: Final = 1
RESIDUAL: Final = 2
DRAFT: Final = 3
# A draft that is itself drafted for: the drafter's verification of what it was given.
STAGE_ACCEPT: Final = 4
STAGE_RESIDUAL: Final = 5

_MASK32: Final = 0xFFFFFFFF
_MASK64: Final = 0xFFFFFFFFFFFFFFFF
_ROUNDS: Final = 10
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)


def bits(
    seed: int, position: int, stream: int, n: int, device: torch.device | str = "cpu"
) -> Tensor:
    """`[n]` int64, each a 32-bit word; block b gives the words 4b .. 4b + 3.

    The first words do not depend on `n`. Seeds are taken modulo 2^64, so negative ones are valid.

    Raises:
        ValueError: position outside 0 .. 2^64 - 1, stream outside 0 .. 2^32 - 1, or negative n.
    """
    _check(position, stream, n)
    blocks = torch.arange((n + 3) // 4, dtype=torch.int64, device=device)  # [B]
    # Words 0 and 2 go through the multipliers; 1 and 3 are mixed in. Both halves are [2, B].
    even = torch.stack([blocks, torch.full_like(blocks, stream)])
    odd = torch.stack(
        [torch.full_like(blocks, position & _MASK32), torch.full_like(blocks, position >> 32)]
    )
    crossed = torch.tensor(_MULTIPLIERS[::-1], device=device)[:, None]
    for keys in torch.tensor(_round_keys(seed), device=device)[:, :, None]:
        # int64 products wrap, which keeps their low 64 bits; the mask undoes the signed shift.
        product = even.flip(0) * crossed
        even = ((product >> 32) & _MASK32) ^ odd ^ keys
        odd = product & _MASK32
    return torch.stack([even[0], odd[0], even[1], odd[1]], dim=1).reshape(-1)[:n]


def coins(
    seed: int, position: int, stream: int, n: int = 1, device: torch.device | str = "cpu"
) -> Tensor:
    """`[n]` float64, uniform and strictly inside (0, 1): (word + 1/2) / 2^32."""
    return (bits(seed, position, stream, n, device).to(torch.float64) + 0.5) * 2.0**-32


def coin(seed: int, position: int, stream: int, index: int = 0) -> float:
    """`coins(seed, position, stream, index + 1)[index]` without tensors."""
    _check(position, stream, index)
    words = philox((index // 4, position & _MASK32, stream, position >> 32), seed & _MASK64)
    return (words[index % 4] + 0.5) * 2.0**-32


def gumbel_noise(seed: int, position: int, n: int, device: torch.device | str = "cpu") -> Tensor:
    """`[n]` float64 Gumbel noise -log(-log(u)) of the stream NOISE: argmax(log p + noise) ~ p."""
    return -torch.log(-torch.log(coins(seed, position, NOISE, n, device)))


def mix(seed: int, child: int) -> int:
    """The seed of sample number `child` of one request; `mix(seed, 0)` is `seed` modulo 2^64.

    The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) over seed + child times the golden
    gamma: a bijection of the seed for each child.

    Raises:
        ValueError: child is negative.
    """
    if child < 0:
        raise ValueError(f"child must be 0 or more, got {child}")
    seed &= _MASK64
    if child == 0:
        return seed
    mixed = (seed + child * 0x9E3779B97F4A7C15) & _MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
    return mixed ^ (mixed >> 31)


def philox(counter: tuple[int, int, int, int], key: int) -> tuple[int, int, int, int]:
    """One block of Philox4x32-10: four 32-bit words of counter, a 64-bit key, four words out."""
    w0, w1, w2, w3 = counter
    for key0, key1 in _round_keys(key):
        product0 = w0 * _MULTIPLIERS[0]
        product1 = w2 * _MULTIPLIERS[1]
        w0, w1, w2, w3 = (
            (product1 >> 32) ^ w1 ^ key0,
            product1 & _MASK32,
            (product0 >> 32) ^ w3 ^ key1,
            product0 & _MASK32,
        )
    return w0, w1, w2, w3


def _round_keys(seed: int) -> list[tuple[int, int]]:
    low, high = seed & _MASK32, (seed >> 32) & _MASK32
    return [
        ((low + i * _WEYL[0]) & _MASK32, (high + i * _WEYL[1]) & _MASK32) for i in range(_ROUNDS)
    ]


def _check(position: int, stream: int, n: int) -> None:
    if not 0 <= position <= _MASK64:
        raise ValueError(f"position must be in 0 .. 2^64 - 1, got {position}")
    if not 0 <= stream <= _MASK32:
        raise ValueError(f"stream must be in 0 .. 2^32 - 1, got {stream}")
    if n < 0:
        raise ValueError(f"the number of coins must be 0 or more, got {n}")
