"""Coins: known answers, no state, uniform, streams apart."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from foredraft.core import coins
from foredraft.core.row_math import TorchRowMath, coupled_argmax

seeds = st.integers(-(2**63), 2**64 - 1)
positions = st.integers(0, 2**64 - 1)

# Known answers of Random123 1.14 (kat_vectors, philox4x32-10): counter, key words, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], output: tuple[int, ...]
) -> None:
    assert coins.philox(counter, key[0] | key[1] << 32) == output


@given(seeds, positions, st.integers(0, 2**32 - 1), st.integers(0, 13))
def test_tensors_and_scalars_are_the_same_words(
    seed: int, position: int, stream: int, n: int
) -> None:
    words = coins.bits(seed, position, stream, n)
    counters = [(b, position % 2**32, stream, position >> 32) for b in range(4)]
    expected = [word for counter in counters for word in coins.philox(counter, seed % 2**64)]
    assert words.tolist() == expected[:n]
    for i, value in enumerate(coins.coins(seed, position, stream, n).tolist()):
        assert value == coins.coin(seed, position, stream, i)
        assert 0.0 < value < 1.0


def test_first_coins_do_not_depend_on_how_many_are_asked() -> None:
    most = coins.coins(7, 3, coins.NOISE, 1000)
    for n in (1, 2, 3, 4, 5, 999):
        assert torch.equal(coins.coins(7, 3, coins.NOISE, n), most[:n])


def test_the_whole_position_counts() -> None:
    drawn = {coins.coin(1, position, 0) for position in (5, 2**32 + 5, 2**33 + 5, 2**63 + 5)}
    assert len(drawn) == 4


def test_streams_seeds_positions_and_indices_are_apart() -> None:
    streams = (coins.NOISE, coins.ACCEPT, coins.RESIDUAL, coins.DRAFT)
    assert len(set(streams)) == 4
    drawn = [
        coins.coin(seed, position, stream, index)
        for seed in (0, 1, 2**32, 2**63)
        for position in (0, 1, 2)
        for stream in streams
        for index in range(5)
    ]
    assert len(set(drawn)) == len(drawn)


def test_seeds_are_taken_modulo_two_to_the_64() -> None:
    assert coins.coin(-1, 0, 0) == coins.coin(2**64 - 1, 0, 0)
    assert torch.equal(coins.bits(-5, 2, 1, 9), coins.bits(2**64 - 5, 2, 1, 9))


@pytest.mark.parametrize(
    "drawn",
    [
        coins.coins(11, 0, coins.NOISE, 200_000),
        torch.tensor([coins.coin(12, position, coins.ACCEPT) for position in range(50_000)]),
        torch.tensor([coins.coin(seed, 9, coins.RESIDUAL) for seed in range(50_000)]),
    ],
    ids=["indices", "positions", "seeds"],
)
def test_coins_are_uniform(drawn: torch.Tensor) -> None:
    counts = torch.histc(drawn.to(torch.float64), bins=64, min=0.0, max=1.0)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_neighbouring_coins_are_independent() -> None:
    words = coins.coins(3, 0, coins.NOISE, 100_000)
    pairs = (words[:-1] * 8).long() * 8 + (words[1:] * 8).long()
    assert stats.chisquare(torch.bincount(pairs, minlength=64).numpy()).pvalue > 1e-3


def test_gumbel_noise_is_made_of_the_noise_stream_and_finite() -> None:
    noise = coins.gumbel_noise(4, 8, 50_000)
    uniform = coins.coins(4, 8, coins.NOISE, 50_000)
    assert torch.isfinite(noise).all()
    assert float(noise[17]) == pytest.approx(-math.log(-math.log(float(uniform[17]))), rel=1e-14)
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > 1e-3


def test_the_extreme_words_give_finite_noise() -> None:
    for word in (0, 2**32 - 1):
        uniform = (word + 0.5) * 2.0**-32
        assert 0.0 < uniform < 1.0
        assert math.isfinite(-math.log(-math.log(uniform)))


def test_coupled_argmax_has_the_law_of_the_softmax() -> None:
    logits = torch.tensor([2.0, 0.5, -1.0, float("-inf"), 0.0])
    row_math = TorchRowMath()
    drawn = [coupled_argmax(row_math, logits, 99, position) for position in range(5_000)]
    counts = torch.bincount(torch.tensor(drawn), minlength=5)
    assert counts[3] == 0
    allowed = [0, 1, 2, 4]
    expected = torch.softmax(logits.double(), -1)[allowed] * 5_000
    assert stats.chisquare(counts[allowed].numpy(), expected.numpy()).pvalue > 1e-3


@given(seeds)
def test_child_zero_is_the_seed_itself_and_children_differ(seed: int) -> None:
    children = [coins.mix(seed, child) for child in range(16)]
    assert children[0] == seed % 2**64
    assert len(set(children)) == 16
    assert all(0 <= child < 2**64 for child in children)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="position"):
        coins.bits(0, -1, 0, 1)
    with pytest.raises(ValueError, match="position"):
        coins.coin(0, 2**64, 0)
    with pytest.raises(ValueError, match="stream"):
        coins.bits(0, 0, 2**32, 1)
    with pytest.raises(ValueError, match="number of coins"):
        coins.bits(0, 0, 0, -1)
    with pytest.raises(ValueError, match="child"):
        coins.mix(0, -1)
