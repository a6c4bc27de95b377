"""Benchmark results on a terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console, RenderableType

from foredraft.cli.tables import decode_table, identity_table, kernels_table


def _shown(table: RenderableType) -> str:
    file = io.StringIO()
    Console(file=file, width=160).print(table)
    return file.getvalue()


def test_kernels() -> None:
    result = {
        "instruction_set": "avx2", "threads": 2, "read_bandwidth_gb_s": 21.5,
        "linear": [
            {"format": "bfloat16", "shape": [576, 1536], "rows": 4, "us": 115.0, "gb_s": 15.4,
             "gflop_s": 61.0, "torch_us": 670.0}
        ],
        "forward": [{"dtype": "bfloat16", "rows": 4, "context": 256, "ms": 14.25}],
        "verify": [
            {"rule": "greedy", "requests": 8, "rows": 4, "ms": 0.125, "share_of_pass": 0.017}
        ],
        "attention": [
            {"context": 4000, "rows": 5, "us": 291.5, "bytes_limit_us": 115.0,
             "flops_limit_us": 110.0, "over_limit": 2.53}
        ],
    }  # fmt: skip
    text = _shown(kernels_table(result))
    figures = ("576 x 1536", "115.0", "670.0", "14.25", "0.125", "1.7%", "2.53")
    for words in ("read bandwidth 21.5 GB/s", *figures):
        assert words in text


def _decode(limit: float | None) -> dict[str, Any]:
    run = {
        "label": "plain", "tokens_per_second": 41.25, "speedup": None,
        "mean_acceptance_length": 1.0, "mean_step_cost": None, "identical_to_plain": False,
        "step_ms": {"drafter": 0.25, "target": 6.5, "rest": 0.125},
        "per_task": {"chat": {"speedup": 1.5}},
    }  # fmt: skip
    return {
        "model": "tiny", "dtype": "bfloat16", "prompts": 1, "runs": [run],
        "bandwidth_limit_tokens_per_second": limit,
    }  # fmt: skip


def test_decode() -> None:
    text = _shown(decode_table(_decode(80.0)))
    for words in (
        "tiny, bfloat16, 1 prompts",
        "41.2",
        "0.25, 6.50, 0.12",
        "1.50x",
        " no\n",
        "80.0 tokens/s",
    ):
        assert words in text
    assert "limit" not in _shown(decode_table(_decode(None)))
    nothing = _decode(None)
    nothing["runs"][0]["tokens_per_second"] = (
        0.0  # every answer was one token, of the prompt's step
    )
    assert "0.0" not in _shown(decode_table(nothing))


def test_identity_says_where_it_differs() -> None:
    mismatch = {
        "prompt_id": "mt_bench/82", "position": 41, "token": 3, "plain_token": 5,
        "same_logits": False, "plain_top2_margin": 0.25,
    }  # fmt: skip
    check = {
        "name": "greedy", "passed": False, "prompts": 1, "tokens": 40, "compared_logits": True,
        "mismatch": mismatch,
    }  # fmt: skip
    result = {"model": "tiny", "dtype": "float32", "kernels": "native", "checks": [check]}
    text = " ".join(_shown(identity_table(result)).replace("\u2502", " ").split())
    for words in ("mt_bench/82 at position 41", "token 3", "plain 5", "logits differ", "0.25"):
        assert words in text
