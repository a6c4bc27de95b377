"""The arithmetic of benchmark figures, on hand-made samples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foredraft.bench.intervals import bootstrap_interval, spread
from foredraft.bench.samples import Run, Sample, summarise

TASKS = {"a": "chat", "b": "edit"}


def _plain() -> Run:
    run = Run("plain")
    run.add("a", Sample((1, 2, 3), tokens=2, seconds=2.0, steps=2))
    run.add("b", Sample((4, 5, 6, 7, 8), tokens=4, seconds=4.0, steps=4))
    return run


def _speculative() -> Run:
    run = Run("ngram", {"method": "ngram"})
    run.add("a", Sample((1, 2, 3), tokens=2, seconds=2.0, steps=2))
    run.add(
        "b",
        Sample(
            (4, 5, 6, 7, 8), tokens=4, seconds=2.5, steps=2,
            drafts=2, drafted=4, accepted=2, accepted_by_position=(1.0, 1.0),
        ),
    )  # fmt: skip
    return run


def test_speed_is_tokens_over_seconds_of_decoding() -> None:
    figures = summarise(_speculative(), _plain(), TASKS)
    assert figures["tokens"] == 6
    assert figures["tokens_per_second"] == pytest.approx(6 / 4.5)
    assert figures["speedup"] == pytest.approx(6 / 4.5)
    assert figures["per_task"]["chat"]["speedup"] == pytest.approx(1.0)
    assert figures["per_task"]["edit"]["speedup"] == pytest.approx(1.6)
    for each in figures["per_task"].values():
        cost = each["mean_step_cost"]
        assert cost is not None
        assert cost > 0
        assert len(each["acceptance_by_position"]) <= len(figures["acceptance_by_position"])


def test_speedup_is_emitted_tokens_over_step_cost() -> None:
    figures = summarise(_speculative(), _plain(), TASKS)
    assert figures["mean_emitted_tokens"] == pytest.approx(6 / 4)
    assert figures["mean_step_cost"] == pytest.approx((4.5 / 4) / (6.0 / 6))
    assert figures["speedup"] == pytest.approx(
        figures["mean_emitted_tokens"] / figures["mean_step_cost"]
    )


def test_speeds_are_compared_at_equal_pace_of_the_machine() -> None:
    fast, slow = Run("plain"), Run("suffix", {"method": "suffix"})
    for prompt in TASKS:  # the machine takes twice as long for anything beside the second run
        sample = Sample((1, 2), tokens=2, seconds=2.0, steps=2, reference_seconds=1.0)
        fast.add(prompt, sample)
        slow.add(prompt, replace(sample, seconds=3.0, reference_seconds=2.0))
    figures = summarise(slow, fast, TASKS)
    assert figures["speedup"] == pytest.approx(2.0 / 1.5)
    assert figures["mean_step_cost"] == pytest.approx(1.5 / 2.0)
    assert figures["per_task"]["edit"]["speedup"] == pytest.approx(2.0 / 1.5)
    assert figures["tokens_per_second"] == pytest.approx(4 / 6.0)  # as it was
    assert figures["reference_ms"] == pytest.approx(2000.0)


def test_a_run_without_reference_passes_is_compared_as_it_was() -> None:
    plain = Run("plain")
    for prompt in TASKS:
        plain.add(prompt, Sample((1, 2), tokens=2, seconds=1.0, steps=2, reference_seconds=1.0))
    peer = Run("peer", peer="other")
    for prompt in TASKS:
        peer.add(prompt, Sample((1, 2), tokens=2, seconds=2.0, steps=2))
    assert summarise(peer, plain, TASKS)["speedup"] == pytest.approx(0.5)


def test_a_steps_time_is_stated_by_its_parts() -> None:
    run = Run("timed")
    for seconds in (0.5, 1.5):
        parts = {"drafter": seconds, "target": 4 * seconds}
        run.add("a", Sample((1, 2, 3), tokens=2, seconds=9.0, steps=2, part_seconds=parts))
    assert summarise(run, run, {"a": "chat"})["step_ms"] == {"drafter": 500.0, "target": 2000.0}


def test_tokens_a_step_are_stated_by_stretches_of_64() -> None:
    run = Run("long")
    halves = (True, False) * 32 + (True, True, True, False) * 16 + (True,) * 5
    run.add("a", Sample((1,) * len(halves), 128, 1.0, 60, from_draft=halves))
    run.add("b", Sample((1,), 0, 0.0, 0, from_draft=(False,)))
    assert summarise(run, run, TASKS)["tokens_per_step_by_stretch"] == [2.0, 4.0]


def test_acceptance_counts_drafts_only() -> None:
    figures = summarise(_speculative(), _plain(), TASKS)
    assert figures["mean_acceptance_length"] == pytest.approx(2.0)
    assert figures["acceptance_rate"] == pytest.approx(0.5)
    assert figures["acceptance_by_position"] == pytest.approx([0.5, 0.5])


def test_plain_is_its_own_baseline() -> None:
    figures = summarise(_plain(), _plain(), TASKS)
    assert figures["speedup"] == pytest.approx(1.0)
    assert figures["mean_step_cost"] == pytest.approx(1.0)
    assert figures["mean_acceptance_length"] == 1.0
    assert figures["acceptance_by_position"] == []
    assert figures["identical_to_plain"] is True


def test_one_different_token_is_not_identical() -> None:
    run = _speculative()
    run.add("a", Sample((1, 2, 9), tokens=2, seconds=1.0, steps=2))
    assert summarise(run, _plain(), TASKS)["identical_to_plain"] is False


def test_repeats_are_taken_by_their_median() -> None:
    run = _plain()
    for seconds in (100.0, 2.5):
        run.add("a", Sample((1, 2, 3), tokens=2, seconds=seconds, steps=2))
        run.add("b", Sample((4, 5, 6, 7, 8), tokens=4, seconds=4.0, steps=4))
    assert summarise(run, _plain(), TASKS)["tokens_per_second"] == pytest.approx(6 / 6.5)


def test_a_one_token_answer_has_no_speed_and_divides_nothing_by_zero() -> None:
    plain, run = Run("plain"), Run("ngram", {"method": "ngram"})
    for each in (plain, run):
        each.add("a", Sample((1,), tokens=0, seconds=0.0, steps=0))
    figures = summarise(run, plain, {"a": "chat"})
    assert figures["tokens_per_second"] == 0.0
    assert figures["speedup"] is None
    assert figures["mean_step_cost"] is None


def test_spread_and_interval() -> None:
    assert spread([]) is None
    assert spread([3.0]) == {"p25": 3.0, "p50": 3.0, "p75": 3.0}
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == {"p25": 2.0, "p50": 3.0, "p75": 4.0}
    assert bootstrap_interval([1.0], max) is None
    low, high = bootstrap_interval([1.0, 2.0, 3.0], lambda items: sum(items) / len(items)) or []
    assert 1.0 <= low < 2.0 < high <= 3.0
    assert bootstrap_interval([5.0, 5.0], max) == [5.0, 5.0]
