"""Speculation changes neither ids nor logits, on ten prompts of the real model; and the check can
fail.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from foredraft.bench.identity import Committed, IdentitySettings, bench_identity, first_mismatch
from foredraft.bench.workload import Item, read_workload
from foredraft.kernels.catalog import native_available
from foredraft.models.load import LoadedModel, load_model
from foredraft.testing.models import tiny_model

PROMPTS = Path("benchmarks/data/bench.jsonl")
PER_TASK = 2
MAX_TOKENS = 48  # three pages; `make identity` reads 128 of all prompts


def _silent(_what: str, _done: int, _total: int) -> None:
    """No progress in tests."""


def _shortest_of_each_task() -> list[Item]:
    chosen: list[Item] = []
    items = sorted(read_workload(PROMPTS), key=lambda item: len(item.turns[0]))
    for task in sorted({item.task for item in items}):
        chosen.extend([item for item in items if item.task == task][:PER_TASK])
    return chosen


@pytest.mark.slow
def test_ten_prompts_of_the_real_model_are_identical(smollm2_path: Path) -> None:
    # Without a compiler the reference kernels run: slow, and exact in float64. Two tokens each.
    native = native_available()
    dtype, max_tokens = ("bfloat16", MAX_TOKENS) if native else ("float64", 2)

    def load(threads: int | None) -> LoadedModel:
        return load_model(smollm2_path, dtype=dtype, num_threads=threads)

    items = _shortest_of_each_task()
    result = bench_identity(load, items, IdentitySettings(max_tokens), _silent)
    assert result["passed"], result["checks"][-1]
    assert len(result["checks"]) == 8
    for check in result["checks"]:
        assert check["prompts"] == 10
        assert check["compared_logits"] is native


ITEMS = [
    Item("a", "chat", ("one two one two one",)),
    Item("b", "edit", ("abc abc abc abc",)),
    Item("c", "edit", ("z",)),
]


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_a_tiny_model_is_identical_in_every_way_of_running(kernels: str) -> None:
    dtype = "float64" if kernels == "reference" else "float32"

    def load(threads: int | None) -> LoadedModel:
        return tiny_model(seed=5, kernels=kernels, dtype=dtype, num_threads=threads)

    result = bench_identity(load, ITEMS, IdentitySettings(48, threads=1), _silent)
    assert result["passed"], result["checks"][-1]
    assert all(check["tokens"] > 48 for check in result["checks"])


def test_another_model_is_caught_with_place_tokens_and_margin() -> None:
    def load(threads: int | None) -> LoadedModel:  # the check of threads gets other weights
        return tiny_model(seed=threads or 0)

    result = bench_identity(load, ITEMS, IdentitySettings(48, threads=1), _silent)
    assert not result["passed"]
    assert [check["passed"] for check in result["checks"]] == [*[True] * 7, False]
    mismatch = result["checks"][-1]["mismatch"]
    assert mismatch["prompt_id"] == "a"
    assert mismatch["token"] != mismatch["plain_token"]
    assert mismatch["plain_top2_margin"] > 0


def _rows(*tokens: int, digest: bytes = b"x") -> list[Committed]:
    return [Committed(10 + n, token, digest, 0.5) for n, token in enumerate(tokens)]


def test_the_first_difference_is_found_whatever_it_is() -> None:
    assert first_mismatch("p", _rows(1, 2), _rows(1, 2), compare_logits=True) is None
    other = first_mismatch("p", _rows(1, 3), _rows(1, 2), compare_logits=True)
    assert other is not None
    assert (other.position, other.token, other.plain_token) == (11, 3, 2)
    shorter = first_mismatch("p", _rows(1), _rows(1, 2), compare_logits=False)
    assert shorter is not None
    assert (shorter.position, shorter.token, shorter.plain_token) == (11, None, 2)
    longer = first_mismatch("p", _rows(1, 2), _rows(1), compare_logits=False)
    assert longer is not None
    assert (longer.token, longer.plain_token) == (2, None)
    logits = first_mismatch("p", _rows(1, digest=b"y"), _rows(1), compare_logits=True)
    assert logits is not None
    assert (logits.token, logits.plain_token, logits.same_logits) == (1, 1, False)
    assert first_mismatch("p", _rows(1, digest=b"y"), _rows(1), compare_logits=False) is None
