"""The README's figures come from the result files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft.bench.report import BEGIN, END, figures, update

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
    assert update(page, results) is True
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| plain | 50.0 | 1.00x |" in text
    assert "a CPU, 2 cores" in text
    assert "old" not in text
    assert update(page, results) is False


def test_a_page_without_markers_and_an_unknown_kind_are_errors(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("no markers")
    with pytest.raises(ValueError, match="lacks the markers"):
        update(page, tmp_path)
    (tmp_path / "x.json").write_text('{"kind": "guess"}')
    with pytest.raises(ValueError, match="guess"):
        figures(tmp_path)


def test_the_readme_shows_what_the_result_files_say() -> None:
    text = Path("README.md").read_text(encoding="utf-8")
    shown = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == figures(Path("benchmarks/results"))
