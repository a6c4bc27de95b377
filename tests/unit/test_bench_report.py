"""The README's figures come from the result files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft.bench.report import BEGIN, END, figures, main, update

RUN = {
    "label": "plain", "peer": None, "tokens_per_second": 50.0, "speedup": 1.0,
    "mean_acceptance_length": 1.0, "mean_step_cost": 1.0, "identical_to_plain": True,
    "per_task": {"chat": {"speedup": 1.0}},
}  # fmt: skip
DECODE = {
    "kind": "decode", "model": "tiny", "dtype": "bfloat16", "prompts": 1, "max_tokens": 8,
    "bandwidth_limit_tokens_per_second": 60.0, "runs": [RUN],
    "machine": {"cpu": "a CPU", "cores": 2}, "versions": {"torch": "2"}, "revision": "abc",
    "date": "2026-11-29T00:00:00+00:00", "arguments": ["foredraft", "bench", "decode"],
}  # fmt: skip


def test_the_page_between_the_markers_is_replaced_and_the_rest_kept(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "decode.json").write_text(json.dumps(DECODE))
    page = tmp_path / "README.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert update(page, figures(results)) is True
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| plain | 50.0 | 1.00x |" in text
    assert "a CPU, 2 cores" in text
    assert "old" not in text
    assert update(page, figures(results)) is False


KERNELS = {
    **DECODE, "kind": "kernels", "read_bandwidth_gb_s": 20.0, "instruction_set": "avx2",
    "threads": 2,
    "linear": [
        {"format": "bfloat16", "shape": [576, 1536], "rows": rows, "us": us, "gb_s": 18.0,
         "read_bandwidth_gb_s": 20.0,
         "torch_us": 300.0}
        for rows, us in ((1, 100.0), (2, 110.0), (4, 125.0), (256, 9000.0))
    ],
    "forward": [
        {"model": "tiny", "dtype": "bfloat16", "rows": rows, "context": 256, "ms": float(rows)}
        for rows in (1, 4)
    ],
}  # fmt: skip
IDENTITY = {
    **DECODE, "kind": "identity", "kernels": "native",
    "checks": [
        {"name": "greedy", "passed": True, "prompts": 2, "tokens": 9, "compared_logits": True},
        {"name": "seeded", "passed": False, "prompts": 1, "tokens": 4, "compared_logits": False},
    ],
}  # fmt: skip


def test_every_kind_has_its_table(tmp_path: Path) -> None:
    for number, result in enumerate((IDENTITY, KERNELS, DECODE)):
        (tmp_path / f"{number}.json").write_text(json.dumps(result))
    text = figures(tmp_path)
    assert text.index("**Decoding**") < text.index("**Kernels**") < text.index("**Identity**")
    assert "| bfloat16 | 576 x 1536 | 100 | 90% | 125 | 1.25 | 300 | 9000 | 300 |" in text
    assert "| tiny | bfloat16 | 1.0 | 4.0 |" in text
    assert "| greedy | 2 | 9 | compared | identical |" in text
    assert "| seeded | 1 | 4 | not compared | **differs** |" in text


def test_a_page_without_markers_and_an_unknown_kind_are_errors(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("no markers")
    with pytest.raises(ValueError, match="lacks the markers"):
        update(page, "shown")
    (tmp_path / "x.json").write_text('{"kind": "guess"}')
    with pytest.raises(ValueError, match="guess"):
        figures(tmp_path)


HEADLINES = ("decode-auto.json", "decode-peers.json", "serve.json")


@pytest.mark.parametrize(("page", "names"), [("README.md", HEADLINES), ("docs/figures.md", ("",))])
def test_the_pages_show_what_the_result_files_say(page: str, names: tuple[str, ...]) -> None:
    text = Path(page).read_text(encoding="utf-8")
    shown = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == figures(*(Path("benchmarks/results", name) for name in names))


RATIO = {"p25": 1.0, "p50": 1.25, "p75": 1.5}
SERVE = {
    **DECODE, "kind": "serve", "temperature": 0.0, "rounds": 3,
    "method": "ngram",
    "objectives": {"adaptive, throughput": "tokens_per_second"},
    "points": [
        {"label": label, "concurrency": 4, "tokens_per_second": rate, "width": 1.5,
         "width_0_share": 0.97, "itl_ms": {"p50": 5.0, "p99": 9.0}}
        for label, rate in (("plain", 100.0), ("K=2", 120.0), ("adaptive, throughput", 125.0))
    ],
    "comparisons": [
        {"label": label, "concurrency": 4,
         "tokens_per_second": {"over_plain": RATIO, "best_fixed": "K=2"}}
        for label in ("K=2", "adaptive, throughput")
    ],
}  # fmt: skip
SIMULATED = {
    **DECODE, "kind": "simulated", "near_share": 1.0, "near_share_of_medians": 0.97,
    "agree_share": 1.0, "same_share": 0.5, "agree_share_at_random": 0.75,
    "points": [{"concurrency": 4, "width": width, "error": error}
               for width, error in ((0, 0.01), (2, -0.04))],
    "best": [{"concurrency": 4, "measured": 2, "tied": [0, 2], "simulated": 0}],
}  # fmt: skip


REPLAYED = {
    **DECODE, "kind": "replay", "largest_error": 0.04,
    "errors": [{"concurrency": load, "label": "K=2", "error": error, "near": True}
               for load, error in ((1, 0.01), (8, -0.04))],
}  # fmt: skip


def test_a_replay_says_how_far_it_is_off(tmp_path: Path) -> None:
    (tmp_path / "replay.json").write_text(json.dumps(REPLAYED))
    text = figures(tmp_path)
    assert "| K=2 | +1.0% | -4.0% |" in text
    assert "within 10% at 2 of 2 points, the worst 4.0% off" in text


def test_serving_and_its_simulation_are_tabulated(tmp_path: Path) -> None:
    (tmp_path / "serve.json").write_text(json.dumps(SERVE))
    (tmp_path / "simulated.json").write_text(json.dumps(SIMULATED))
    text = figures(tmp_path)
    assert "| 4 | 100 | 1.25x (K=2) | 1.25x, width 1.5 | 9 | 9 |" in text
    assert "tiny, bfloat16, ngram, 1 prompts, at most 8 tokens" in text
    hopeless = {**SERVE, "hopeless": True, "prompt_tokens": 2000}
    (tmp_path / "serve.json").write_text(json.dumps(hopeless))
    assert "1.25x, width 0 in 97% of steps" in figures(tmp_path)
    assert "1 prompts made 2000 tokens long" in figures(tmp_path)
    assert "| 4 | 2 | 0, 2 | 0 | +1% | -4% |" in text
    assert "100% of the points within 10% round by round (97% where medians" in text
    assert "within 1% of the best measured at 50% of the loads, and at 100% it is one" in text


def test_drafters_have_a_page_with_a_table_a_task(tmp_path: Path) -> None:
    task = {
        "prompts": 3, "tokens_per_second": 99.0, "speedup": 1.8, "mean_acceptance_length": 2.5,
        "acceptance_by_position": [0.75, 0.5],
        "step_ms": {"drafter": 0.12, "target": 6.0, "rest": 0.3},
    }  # fmt: skip
    config = {"method": "suffix", "num_speculative_tokens": 4, "policy": "adaptive", "x": 1}
    run = {**RUN, "speculative_config": config, "per_task": {"edit": task}}
    plain = {**run, "speculative_config": None}
    result = tmp_path / "decode-drafters.json"
    result.write_text(json.dumps({**DECODE, "runs": [plain, run]}))
    page = tmp_path / "README.md"
    page.write_text(f"{BEGIN}\n{END}")
    assert main([str(page), "--by-task", str(result)]) == 0
    text = page.read_text()
    line = "| suffix, K=4, adaptive, x=1 | 99.0 | 1.80x | 2.50 | 75% | 50% | - | - | 0.12 | 6.00 |"
    assert line in text
    assert "**edit**, 3 prompts" in text
    assert "| plain | 1.00x | 1.80x | yes |" in text


def test_a_plan_and_an_agent_loop_have_their_tables(tmp_path: Path) -> None:
    checked = {
        "label": "ngram K=4", "predicted": 1.9, "predicted_at_pace": 1.7, "measured": 1.6,
        "error": 0.0625,
        "tokens": {"predicted": 1.81, "measured": 1.82}, "identical_to_plain": True,
    }  # fmt: skip
    check = {"configs": [checked], "num_close": 1, "close": 0.1, "repeats": 3}
    (tmp_path / "plan.json").write_text(json.dumps({**DECODE, "kind": "plan", "check": check}))
    ran = {
        "label": "suffix", "tokens_per_second": 300.0, "speedup": 5.0, "share_of_ceiling": 0.8,
        "mean_acceptance_length": 7.5, "identical_to_plain": True,
    }  # fmt: skip
    loop = {
        **DECODE, "kind": "agent-loop", "turns": 20, "context": 800, "runs": [ran],
        "ceiling": {"num_speculative_tokens": 8, "speedup": 6.25},
        "plain_tokens_per_second": 60.0,
    }  # fmt: skip
    (tmp_path / "agent-loop.json").write_text(json.dumps(loop))
    text = figures(tmp_path)
    assert "| ngram K=4 | 1.90x | 1.70x | 1.60x | +6% | 1.81 | 1.82 | yes |" in text
    assert "1 of 1 are within 10%" in text
    assert "| suffix | 300.0 | 5.00x | 80% | 7.50 | yes |" in text
    assert "6.25, at K = 8" in text


def test_a_training_run_is_shown_to_its_last_measurement(tmp_path: Path) -> None:
    measured = [
        {"tokens": 1000 * i, "mean_acceptance_length": 1 + i / 20, "acceptance_by_position": [0.5]}
        for i in range(1, 21)
    ]
    result = {**DECODE, "kind": "training", "runs": [{"method": "x", "measured": measured}]}
    (tmp_path / "training.json").write_text(json.dumps(result))
    lines = [line for line in figures(tmp_path).splitlines() if line.startswith("| x ")]
    assert 5 <= len(lines) <= 8
    assert lines[-1] == "| x | 20,000 | 2.00 | 50.0% |"


def test_acceptance_is_shown_by_drafter_and_temperature(tmp_path: Path) -> None:
    run = {
        "label": "blended", "temperature": 1.0, "mean_acceptance_length": 1.6,
        "tokens_per_step": 1.58, "acceptance_by_position": [0.4, 0.15, 0.05],
    }  # fmt: skip
    result = {**DECODE, "kind": "acceptance", "tasks": ["chat"], "runs": [run]}
    (tmp_path / "acceptance.json").write_text(json.dumps(result))
    assert "| blended | 1 | 1.60 | 1.58 | 40.0% | 15.0% | 5.0% |" in figures(tmp_path)
