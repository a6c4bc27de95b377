"""The sampler's reductions: the coins of `core.coins` to the bit, argmax under noise exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft._native import Runtime, instruction_sets
from foredraft.core import coins
from foredraft.core.row_math import TorchRowMath, coupled_argmax
from foredraft.core.truncation import WHOLE, Truncation, truncate
from foredraft.kernels.native import NativeKernels

INF = float("inf")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**64 - 1),
    stream=st.integers(0, 2**32 - 1),
    blocks=st.integers(0, 70),
    instruction_set=st.sampled_from(instruction_sets()),
)
def test_words_are_those_of_the_coins(
    seed: int, position: int, stream: int, blocks: int, instruction_set: str
) -> None:
    words = Runtime(1, instruction_set).random_words(seed, position, stream, blocks)
    assert words == coins.bits(seed, position, stream, 4 * blocks).tolist()


@given(
    size=st.integers(1, 700),
    spread=st.sampled_from([0.0, 0.01, 1.0, 5.0, 30.0]),
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 2**40),
    wide=st.booleans(),
    banned=st.booleans(),
    instruction_set=st.sampled_from(instruction_sets()),
)
def test_a_draw_is_the_argmax_with_noise(
    size: int,
    spread: float,
    seed: int,
    position: int,
    wide: bool,
    banned: bool,
    instruction_set: str,
) -> None:
    row = random(size, seed=size) * spread
    if banned:
        row[1::2] = -INF
    row = row.double() if wide else row
    kernels = NativeKernels(instruction_set=instruction_set)
    noise = coins.gumbel_noise(seed, position, size)
    sums = row.double() + noise
    found = coupled_argmax(kernels.row_math, row, seed, position)
    # torch's logarithm and libm's may differ in the last bit: near ties may go elsewhere.
    assert float(sums[found]) >= float(sums.max()) - 1e-12


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 12.0])
def test_draws_over_a_whole_vocabulary(instruction_set: str, spread: float) -> None:
    row = random(49152) * spread
    kernels, plain = NativeKernels(instruction_set=instruction_set), TorchRowMath()
    several = [row] * 25, [WHOLE] * 25, [(11, position) for position in range(25)]
    assert kernels.row_math.draws(*several) == plain.draws(*several)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_with_one_or_no_finite_logit(instruction_set: str, dtype: torch.dtype) -> None:
    math = NativeKernels(instruction_set=instruction_set).row_math
    row = torch.full((300,), -INF, dtype=dtype)
    for cut in (WHOLE, Truncation(0.5, 0.1, 7, 0.9)):
        assert math.draws([row], [cut], [(1, 2)]) == [0]
    row[217] = -50.0
    for cut in (WHOLE, Truncation(0.5, 0.1, 7, 0.9)):
        assert math.draws([row], [cut], [(1, 2)]) == [217]
        assert math.laws([row], [cut])[0][0].tolist() == [float(i == 217) for i in range(300)]
    row[[5, 9]] = INF
    assert math.draws([row], [WHOLE], [(1, 2)]) == [5]
    assert math.laws([row], [WHOLE])[1] == [5]


ROWS = st.tuples(
    st.integers(1, 700),
    st.sampled_from([0.0, 0.01, 1.0, 5.0, 30.0, 300.0]),
    st.integers(0, 1000),
    st.booleans(),  # values in steps of a quarter: ties
    st.booleans(),  # some ids banned
    st.booleans(),  # float64
)
CUTS = st.builds(
    Truncation,
    temperature=st.sampled_from([1.0, 1.0, 0.3, 0.8, 1.7, 40.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.7, 1.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 50, 600, 100_000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.999, 1.0 - 1e-12]),
)


def drawn_row(given_row: tuple[int, float, int, bool, bool, bool]) -> Tensor:
    size, spread, seed, ties, banned, wide = given_row
    row = random(size, seed=seed) * spread
    if ties:
        row = (row * 4).round() / 4
    if banned and size > 1:
        row[1::2] = -INF
    return row.double() if wide else row


def at_the_edge(row: Tensor, cut: Truncation) -> bool:
    """Whether rounding alone decides who is the last of the nucleus."""
    kept = truncate(row, replace(cut, top_p=1.0)).double()
    running = torch.softmax(kept, -1).sort(descending=True).values.cumsum(-1)
    return bool(((running - cut.top_p).abs() < 1e-13).any())


@given(row=ROWS, cut=CUTS, instruction_set=st.sampled_from(instruction_sets()))
@settings(max_examples=300)
def test_laws_are_those_of_the_plain_statement(
    row: tuple[int, float, int, bool, bool, bool], cut: Truncation, instruction_set: str
) -> None:
    logits = drawn_row(row)
    assume(cut.top_p == 1.0 or not at_the_edge(logits, cut))
    math = NativeKernels(instruction_set=instruction_set).row_math
    (law,), (best,) = math.laws([logits], [cut])
    (expected,), (expected_best,) = TorchRowMath().laws([logits], [cut])
    assert logits[best] == logits[expected_best]
    torch.testing.assert_close(law, expected, rtol=1e-12, atol=1e-300)
    assert float(law.sum()) == pytest.approx(1.0, abs=1e-13)


@given(row=ROWS, cut=CUTS, instruction_set=st.sampled_from(instruction_sets()))
@settings(max_examples=300)
def test_draws_are_among_what_is_kept_and_win_there(
    row: tuple[int, float, int, bool, bool, bool], cut: Truncation, instruction_set: str
) -> None:
    logits = drawn_row(row)
    assume(cut.top_p == 1.0 or not at_the_edge(logits, cut))
    math = NativeKernels(instruction_set=instruction_set).row_math
    noise = coins.gumbel_noise(5, 17, len(logits))
    sums = truncate(logits, cut).double() + noise
    (found,) = math.draws([logits], [cut], [(5, 17)])
    assert float(sums[found]) >= float(sums.max()) - 1e-12


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
@pytest.mark.parametrize(
    "cut", [Truncation(top_p=0.9), Truncation(0.7, 0.01), Truncation(1.3, 0.0, 1000, 0.95)]
)
def test_rows_over_a_whole_vocabulary_do_not_depend_on_their_company(
    spread: float, cut: Truncation
) -> None:
    rows = list(random(5, 49152) * spread)
    expected, _ = TorchRowMath().laws(rows, [cut] * 5)
    bits = []
    for name in instruction_sets():
        math = NativeKernels(2, instruction_set=name).row_math
        together = math.laws(rows, [cut] * 5)[0]
        alone = [math.laws([row], [cut])[0][0] for row in rows]
        assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
        bits.append(torch.stack(list(together)))
    assert all(torch.equal(each, bits[0]) for each in bits)
    torch.testing.assert_close(bits[0], torch.stack(list(expected)), rtol=1e-11, atol=1e-300)


@given(
    size=st.integers(1, 400),
    values=st.integers(1, 4),
    seed=st.integers(0, 1000),
    wide=st.booleans(),
    instruction_set=st.sampled_from(instruction_sets()),
)
def test_argmax_gives_ties_to_the_lowest_id(
    size: int, values: int, seed: int, wide: bool, instruction_set: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(-values, 1, (size,), generator=generator).float() * 1e3
    row = row.double() if wide else row
    math = NativeKernels(instruction_set=instruction_set).row_math
    expected = row.tolist().index(max(row.tolist()))
    assert math.argmax_rows(torch.stack([row, row.flip(0)]))[0] == expected


def test_argmax_of_rows_takes_any_number(instruction_set: str) -> None:
    math = NativeKernels(2, instruction_set=instruction_set).row_math
    rows = random(37, 1001)
    assert math.argmax_rows(rows) == rows.argmax(-1).tolist()
    assert math.argmax_rows(rows[:0]) == []
    assert math.draws([], [], []) == []
    assert math.argmax_rows(torch.full((1, 20), -INF)) == [0]


@pytest.mark.parametrize("at", [0, 63, 64, 98, 99])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_with_nan_gives_its_id_and_leaves_the_others_alone(
    instruction_set: str, at: int, dtype: torch.dtype
) -> None:
    math = NativeKernels(instruction_set=instruction_set).row_math
    rows = random(3, 100).to(dtype)
    best = rows.argmax(-1).tolist()
    cuts, keys = [Truncation(0.7, 0.0, 20, 0.9)] * 3, [(1, 2)] * 3
    drawn, laws = math.draws(list(rows), cuts, keys), math.laws(list(rows), cuts)[0]
    rows[1, at] = torch.nan
    assert math.argmax_rows(rows) == [best[0], at, best[2]]
    assert math.draws(list(rows), cuts, keys) == [drawn[0], at, drawn[2]]
    after, ids = math.laws(list(rows), cuts)
    assert ids == [best[0], at, best[2]]
    assert torch.equal(after[0], laws[0])
    assert torch.equal(after[2], laws[2])
    assert math.log_softmax(rows[1]).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softmax_and_log_softmax(dtype: torch.dtype) -> None:
    math = NativeKernels().row_math
    row = (random(49152) * 5).to(dtype)
    row[100:200] = -INF
    (law,), _ = math.laws([row], [WHOLE])
    torch.testing.assert_close(law, torch.softmax(row.double(), -1), rtol=1e-12, atol=0)
    assert (law[100:200] == 0).all()
    torch.testing.assert_close(
        math.log_softmax(row), torch.log_softmax(row.double(), -1), rtol=1e-12, atol=1e-12
    )


@given(
    weights=st.lists(
        st.sampled_from([0.0, 0.0, 1.0, 0.25, 3.0, 1e-300, 5e-324, 1e16]), min_size=1, max_size=600
    ),
    coin=st.floats(2.0**-33, 1.0 - 2.0**-33),
)
def test_a_draw_by_a_coin_is_where_the_running_sum_exceeds_it(
    weights: list[float], coin: float
) -> None:
    math = NativeKernels().row_math
    row = torch.tensor(weights, dtype=torch.float64)
    drawn = math.draw(row, coin)
    assert math.total(row) == pytest.approx(sum(weights), rel=1e-12)
    if drawn is None:
        assert not any(weights)
        return
    assert weights[drawn] > 0.0
    bar, slack = coin * sum(weights), 1e-12 * sum(weights)
    assert sum(weights[: drawn + 1]) >= bar - slack
    assert sum(weights[:drawn]) <= bar + slack


def test_draws_by_coins_have_the_law_of_the_weights() -> None:
    math = NativeKernels().row_math
    weights = torch.zeros(1000, dtype=torch.float64)
    weights[[3, 256, 700, 999]] = torch.tensor([1.0, 2.0, 4.0, 1.0], dtype=torch.float64)
    drawn = [math.draw(weights, (i + 0.5) / 800) for i in range(800)]
    assert {each: drawn.count(each) for each in drawn} == {3: 100, 256: 200, 700: 400, 999: 100}


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_argmax_of_a_row_that_threads_share(threads: int, dtype: torch.dtype) -> None:
    math = NativeKernels(threads).row_math
    row = random(49153).mul(8).round().to(dtype)
    expected = row.tolist().index(float(row.max()))
    assert math.argmax_rows(row[None]) == [expected]
    for at in (0, 24575, 24576, 49152):
        high = row.clone()
        high[at:] = 1e6
        assert math.argmax_rows(high[None]) == [at]
        high[49152] = torch.nan
        assert math.argmax_rows(high[None]) == [49152]
        high[at] = torch.nan
        assert math.argmax_rows(high[None]) == [at]


@given(
    seed=st.integers(0, 99),
    size=st.sampled_from([1, 31, 256, 257, 1000, 5000]),
    k=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_top_ids_are_those_of_a_stable_sort(
    seed: int, size: int, k: int, dtype: torch.dtype
) -> None:
    rows = random(3, size, seed=seed).mul(4).round().to(dtype)  # with many ties
    rows[1, size // 3 :] = -torch.inf
    expected = rows.sort(dim=1, descending=True, stable=True).indices[:, :k].tolist()
    assert NativeKernels(2).row_math.top_ids(rows, k) == expected
    found = TorchRowMath().top_ids(rows, k)
    for row, ids, want in zip(rows, found, expected, strict=True):
        assert row[ids].tolist() == row[want].tolist()
    assert NativeKernels(1).row_math.top_ids(rows[:0], k) == []
