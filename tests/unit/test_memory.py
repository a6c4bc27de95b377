"""The memory budget: what may be asked for, what there is, and what is left for pages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft import LLM, ConfigError
from foredraft.engine import machine_memory, memory
from foredraft.engine.machine_memory import control_group_limits, memory_of
from foredraft.engine.memory import GIB, choose_budget, memory_amount, size_words
from foredraft.models.decoder import cache_shape
from foredraft.models.load import LoadedModel
from foredraft.testing.pairs import TinyPair, tiny_pair

CPU = torch.device("cpu")


@pytest.fixture
def eight_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_of", lambda _device: 8 * GIB)


@pytest.mark.parametrize(
    ("asked", "gib"),
    [(4, 4), (4.5, 4.5), ("4", 4), ("4.5", 4.5), (".5", 0.5), ("4GiB", 4), ("4.5 gib", 4.5),
     (" 3 ", 3), ("50%", 4), ("12.5%", 1), ("100 %", 8)],
)  # fmt: skip
def test_a_budget_is_gib_or_a_share(eight_gib: None, asked: float | str, gib: float) -> None:
    budget = choose_budget(asked, None, CPU)
    assert (budget.num_bytes, budget.holds_weights) == (gib * GIB, True)


@pytest.mark.parametrize(
    "asked",
    [0, -1, 0.0, float("nan"), float("inf"), True, "", "x", "4GB", "4 MiB", "-4", "1e3", "101%",
     "0%", "%", "nan", "inf", "٤", "4,5", [4], b"4", "9" * 400],
    ids=repr,
)  # fmt: skip
def test_what_is_no_amount_is_refused_with_what_would_be(eight_gib: None, asked: Any) -> None:
    with pytest.raises(ConfigError, match=r'"4\.5GiB", or a share .* "50%", got') as error:
        choose_budget(asked, None, CPU)
    assert "\n" not in str(error.value)


def test_more_than_there_is_is_refused(eight_gib: None) -> None:
    with pytest.raises(ConfigError, match=r"memory 9 GiB is more than there is: 8\.00 GiB"):
        choose_budget(9, None, CPU)
    assert choose_budget(8, None, CPU).num_bytes == 8 * GIB


def test_a_machine_that_says_nothing_has_no_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_of", lambda _device: None)
    with pytest.raises(ConfigError, match="doesn't say how much memory"):
        choose_budget("50%", None, CPU)
    assert choose_budget(900, None, CPU).num_bytes == 900 * GIB


def test_two_budgets_exclude_each_other(eight_gib: None) -> None:
    with pytest.raises(ConfigError, match="memory '4' and kv_cache_gib 2 exclude each other"):
        choose_budget("4", 2, CPU)


def test_without_either_keys_and_values_have_two_gib() -> None:
    budget = choose_budget(None, None, CPU)
    assert (budget.num_bytes, budget.holds_weights) == (2 * GIB, False)


@given(st.one_of(st.text(), st.floats(), st.integers(), st.none()))
def test_any_setting_is_an_amount_or_a_mistake(asked: object) -> None:
    try:
        amount, is_share = memory_amount(asked)
    except ConfigError:
        return
    assert 0 < amount <= (100 if is_share else 1e9)


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(0, "0 bytes"), (640, "640 bytes"), (1536, "1.5 KiB"), (12 * 2**20, "12.0 MiB"),
     (int(1.85 * GIB), "1.85 GiB"), (2048 * GIB, "2,048.00 GiB")],
)  # fmt: skip
def test_sizes_are_said_in_their_unit(num_bytes: int, words: str) -> None:
    assert size_words(num_bytes) == words


# What the machine has.


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def limits(tmp_path: Path, groups: str) -> list[int]:
    write(tmp_path / "own", groups)
    return sorted(control_group_limits(tmp_path / "cgroup", tmp_path / "own"))


def test_version_2_limits_count_from_the_group_to_the_root(tmp_path: Path) -> None:
    write(tmp_path / "cgroup" / "a" / "b" / "memory.max", "max\n")
    write(tmp_path / "cgroup" / "a" / "memory.max", "3000\n")
    write(tmp_path / "cgroup" / "memory.max", "5000\n")
    write(tmp_path / "memory.max", "1\n")  # outside the hierarchy
    assert limits(tmp_path, "0::/a/b\n") == [3000, 5000]


def test_a_container_sees_its_limit_at_the_root_of_what_is_mounted(tmp_path: Path) -> None:
    write(tmp_path / "cgroup" / "memory.max", "5000\n")
    assert limits(tmp_path, "0::/system.slice/docker-0123.scope\n") == [5000]


def test_version_1_limits(tmp_path: Path) -> None:
    group = tmp_path / "cgroup" / "memory" / "box"
    write(group / "memory.limit_in_bytes", "4000\n")
    write(tmp_path / "cgroup" / "memory" / "memory.limit_in_bytes", f"{2**63 - 4096}\n")
    groups = "5:cpu,cpuacct:/box\n4:memory:/box\n1:name=systemd:/x\n0::/\n"
    assert limits(tmp_path, groups) == [4000, 2**63 - 4096]


@pytest.mark.parametrize("groups", ["", "nonsense", "0::", "::::", "0::/../../..\n", "\x00"])
def test_strange_groups_have_no_limit(tmp_path: Path, groups: str) -> None:
    assert limits(tmp_path, groups) == []
    assert list(control_group_limits(tmp_path, tmp_path / "absent")) == []


def test_the_smaller_of_machine_and_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for allowed, there in (([], 7), ([5], 5), ([9], 7), ([6, 4], 4)):
        monkeypatch.setattr(machine_memory, "_installed", lambda: 7)
        monkeypatch.setattr(machine_memory, "control_group_limits", lambda found=allowed: found)
        assert memory_of(CPU) == there


def test_a_gpu_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {0: 24 * GIB, 1: 80 * GIB}
    gpus = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(total_memory=sizes[device.index])
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _device: gpus)
    assert choose_budget("50%", None, torch.device("cuda:1")).num_bytes == 40 * GIB


# What is left for pages.


@pytest.fixture(scope="module")
def pair() -> TinyPair:
    return tiny_pair(dtype="float32")


def page_bytes(*models: LoadedModel, page_size: int = 16) -> int:
    return page_size * sum(
        cache_shape(model.config, model.cache_dtype).bytes_per_position for model in models
    )


def draft(pair: TinyPair) -> dict[str, Any]:
    return {"method": "draft_model", "model": pair.draft, "num_speculative_tokens": 2}


def test_one_budget_holds_weights_keys_and_values_of_both(pair: TinyPair) -> None:
    weights = pair.target.weight_bytes, pair.draft.weight_bytes
    both, alone = page_bytes(pair.target, pair.draft), page_bytes(pair.target)
    for pages in (1, 3, 17):
        budget = (sum(weights) + pages * both + both // 2) / GIB
        llm = LLM(pair.target, speculative_config=draft(pair), memory=budget)
        assert llm.config.num_pages == pages
        # Without the draft model its weights are free for pages too.
        left = sum(weights) + pages * both + both // 2 - weights[0]
        assert llm.config_without_drafter.num_pages == left // alone
        assert LLM(pair.target, memory=budget).config.num_pages == left // alone


def test_too_little_says_the_sizes_and_the_least_that_would_do(pair: TinyPair) -> None:
    weights = pair.target.weight_bytes + pair.draft.weight_bytes
    config = draft(pair)
    for num_bytes, left in (
        (weights + page_bytes(pair.target, pair.draft) - 1, r"KiB are left"),
        (weights - 1, "nothing is left"),
    ):
        with pytest.raises(ConfigError) as error:
            LLM(pair.target, speculative_config=config, memory=num_bytes / GIB)
        message = str(error.value)
        for size in (pair.target.weight_bytes, pair.draft.weight_bytes):
            assert f"weights take {size_words(size)}" in message
        assert left in message
        assert "a page of 16 tokens takes" in message
    least = float(message.partition("the least is ")[2].partition(" GiB")[0])
    assert LLM(pair.target, speculative_config=config, memory=least).config.num_pages >= 1
    whole = float(message.partition(", and ")[2].rpartition(", and ")[2].partition(" GiB")[0])
    config_of_whole = LLM(pair.target, speculative_config=config, memory=whole).config
    assert config_of_whole.num_pages >= config_of_whole.pages_for(config_of_whole.max_model_len)


def test_what_a_drafter_remembers_is_paid_for_and_said(pair: TinyPair) -> None:
    config = {"method": "suffix", "suffix_decoding_max_cached_tokens": 1000}
    bound = LLM(pair.target, speculative_config=config).drafter.capabilities.working_bytes
    assert bound > 1000 * 36
    for pages in (1, 5):
        num_bytes = pair.target.weight_bytes + bound + pages * page_bytes(pair.target)
        llm = LLM(pair.target, speculative_config=config, memory=num_bytes / GIB)
        assert llm.config.num_pages == pages
        assert llm.capacity_line().endswith(f"; the drafter remembers up to {size_words(bound)}")
    with pytest.raises(
        ConfigError, match=f"the drafter takes {size_words(bound)}, nothing is left"
    ):
        LLM(pair.target, speculative_config=config, memory=bound / GIB)
    none = LLM(pair.target, speculative_config=config | {"suffix_decoding_max_cached_requests": 0})
    assert none.drafter.capabilities.working_bytes == 0
    assert "remembers" not in none.capacity_line()


def test_a_share_of_the_machine_makes_an_engine(pair: TinyPair) -> None:
    llm = LLM(pair.target, memory="50%", max_model_len=32)
    assert llm.config.num_pages == llm.config.max_num_seqs * 2  # no more than can be used
