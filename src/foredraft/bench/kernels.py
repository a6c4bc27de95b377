"""`foredraft bench kernels`: what a row costs, alone and beside others, against memory and torch.

Knows kernels, shapes and a clock; knows no request. Every figure is the median of rounds in which
all the variants of a shape take turns, so that a drift of the machine falls on all alike; the
weights of a shape are copied until they no longer fit in a cache, and visited one after the other.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.bench.attention import AttentionBench
from foredraft.bench.clock import seconds_of
from foredraft.bench.passes import RepeatedPass, dtype_name, tree_entry
from foredraft.bench.provenance import provenance
from foredraft.core.acceptance import decide_all, match
from foredraft.core.rejection import rejection
from foredraft.core.row_math import RowMath
from foredraft.core.trees import chain
from foredraft.core.truncation import WHOLE, Truncation
from foredraft.kernels.native import NativeKernels
from foredraft.models.config import ModelConfig
from foredraft.models.load import LoadedModel

Progress = Callable[[str, int, int], None]  # what, done, of

FORMATS = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ROWS = (1, 2, 3, 4, 5, 8)
PREFILL_ROWS = 256
PROMPT_ROWS = 512
CONTEXT = 256
VERIFY_LOADS = ((1, 1), (1, 5), (8, 1), (8, 5))  # requests, rows of each
TOP_P = 0.9
BANDWIDTH_BYTES = 512 << 20
SMALLEST_WORKING_SET = 128 << 20
# torch's own threads go on spinning for a while after an operation, on the cores we measure on.
TORCH_REST_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class KernelSettings:
    """What `bench kernels` measures. `load` gives the model whose weights are of a format."""

    load: Callable[[str], LoadedModel]
    num_threads: int | None = None
    rounds: int = 15


def bench_kernels(settings: KernelSettings, progress: Progress) -> dict[str, Any]:
    """Measure and summarise; the form is DESIGN's section 8 with provenance and a summary."""
    kernels = NativeKernels(settings.num_threads)
    memory = Memory(kernels)
    linear: list[dict[str, Any]] = []
    forward: list[dict[str, Any]] = []
    verify: list[dict[str, Any]] = []
    for format_name in FORMATS:
        loaded = settings.load(format_name)
        shapes = linear_shapes(loaded.config)
        for done, shape in enumerate(shapes):
            progress(f"linear {format_name}", done, len(shapes))
            entries = _LinearBench(kernels, memory, format_name, shape, settings).entries()
            linear += [entry | {"uses": shapes[shape]} for entry in entries]
        progress(f"linear {format_name}", len(shapes), len(shapes))
        forward += bench_forward(loaded, settings.rounds, progress)
        if format_name == "bfloat16":
            verify += bench_verify(loaded, settings.rounds, progress)
            progress("attention", 0, 1)
            attention = AttentionBench(kernels, loaded.config).entries(
                settings.rounds, memory.seconds_per_byte
            )
            progress("attention", 1, 1)
    bandwidth = median(entry["read_bandwidth_gb_s"] for entry in linear)
    return {
        **provenance(),
        "instruction_set": kernels.instruction_set,
        "threads": kernels.num_threads,
        "read_bandwidth_gb_s": round(bandwidth, 2),
        "linear": linear,
        "forward": forward,
        "verify": verify,
        "attention": attention,
        "summary": summarise(linear, forward),
    }


class Memory:
    """Reads weights that are in no cache, with all threads of `kernels` together.

    Machines that share memory read more or less from second to second, so what is compared with
    a reading should be measured in the same seconds.
    """

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels
        self._packed = kernels.pack(torch.ones(BANDWIDTH_BYTES // 4096, 1024))
        kernels.read_memory(self._packed)

    def seconds_per_byte(self) -> float:
        """One reading of all of it."""
        seconds = seconds_of(lambda: self._kernels.read_memory(self._packed))
        return seconds / self._packed.num_bytes


def working_set_bytes() -> int:
    """What no cache holds: four times the last one, where the system tells its size."""
    caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [path.read_text(encoding="ascii").strip() for path in caches]
    largest = max((int(size[:-1]) << 10 for size in sizes if size[-1:] == "K"), default=0)
    return max(SMALLEST_WORKING_SET, 4 * largest)


def linear_shapes(config: ModelConfig) -> dict[tuple[int, int], int]:
    """`[N, K]` of the model's matrices as the decoder packs them, and how many a pass uses."""
    hidden, dim = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    of_a_layer = [
        ((heads + 2 * kv_heads) * dim, hidden),
        (hidden, heads * dim),
        (2 * config.intermediate_size, hidden),
        (hidden, config.intermediate_size),
    ]
    return dict(Counter([*(of_a_layer * config.num_layers), (config.vocab_size, hidden)]))


class _LinearBench:
    """One format and shape: ours and torch's, every row count."""

    def __init__(
        self,
        kernels: NativeKernels,
        memory: Memory,
        format_name: str,
        shape: tuple[int, int],
        settings: KernelSettings,
    ) -> None:
        self._kernels, self._format, self._shape = kernels, format_name, shape
        self._memory = memory
        self._rounds = settings.rounds
        n, k = shape
        self._bytes = n * k * FORMATS[format_name].itemsize
        copies = max(2, -(-working_set_bytes() // self._bytes))
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(n, k, generator=generator).to(FORMATS[format_name])
        self._packed = [kernels.pack(weight) for _ in range(copies)]
        self._plain = [weight.clone() for _ in range(copies)]
        self._inputs = {
            rows: torch.randn(rows, k, generator=generator) for rows in (*ROWS, PREFILL_ROWS)
        }

    def entries(self) -> list[dict[str, Any]]:
        ours: dict[int, list[float]] = {rows: [] for rows in self._inputs}
        theirs: dict[int, list[float]] = {rows: [] for rows in self._inputs}
        reading: list[float] = []
        with _torch_threads(self._kernels.num_threads):
            for done in range(self._rounds):
                # The order turns from round to round: the first one finds the threads asleep.
                turn = done % len(self._inputs)
                order = [*self._inputs][turn:] + [*self._inputs][:turn]
                reading.append(self._memory.seconds_per_byte())
                for rows in order:
                    ours[rows].append(self._ours(rows))
                reading.append(self._memory.seconds_per_byte())
                for rows in order:
                    theirs[rows].append(self._theirs(rows))
                time.sleep(TORCH_REST_SECONDS)
        bandwidth = round(1e-9 / median(reading), 2)
        return [
            self._entry(rows, median(ours[rows]), median(theirs[rows]))
            | {"read_bandwidth_gb_s": bandwidth}
            for rows in ours
        ]

    def _ours(self, rows: int) -> float:
        x, linear = self._inputs[rows], self._kernels.linear
        packed = self._packed if rows < PREFILL_ROWS else self._packed[:2]
        return seconds_of(lambda: [linear(x, weight) for weight in packed]) / len(packed)

    def _theirs(self, rows: int) -> float:
        x = self._inputs[rows].to(FORMATS[self._format])
        # torch is measured for comparison only: half of the copies still exceeds the cache.
        plain = self._plain[: max(2, len(self._plain) // 2)]
        plain = plain if rows < PREFILL_ROWS else plain[:2]
        return seconds_of(lambda: [F.linear(x, weight) for weight in plain]) / len(plain)

    def _entry(self, rows: int, ours: float, theirs: float) -> dict[str, Any]:
        return {
            "format": self._format,
            "shape": list(self._shape),
            "rows": rows,
            "us": round(ours * 1e6, 2),
            "gb_s": round(self._bytes / ours / 1e9, 2),
            "gflop_s": round(2 * rows * self._shape[0] * self._shape[1] / ours / 1e9, 1),
            "torch_us": round(theirs * 1e6, 2),
        }


def bench_forward(loaded: LoadedModel, rounds: int, progress: Progress) -> list[dict[str, Any]]:
    """Whole passes of the model: few rows after a context, and a prompt in one pass."""
    passes = {rows: RepeatedPass(loaded, rows, CONTEXT) for rows in ROWS}
    prompt = RepeatedPass(loaded, PROMPT_ROWS, 0)
    name = f"forward {loaded.name} {dtype_name(loaded)}"
    times: dict[int, list[float]] = {rows: [] for rows in passes}
    prompt_times = []
    for done in range(rounds):
        progress(name, done, rounds)
        for rows, one in passes.items():
            times[rows].append(seconds_of(one.run))
        if done % 5 == 0:
            prompt_times.append(seconds_of(prompt.run))
    progress(name, rounds, rounds)
    entries = [(rows, CONTEXT, median(seconds)) for rows, seconds in times.items()]
    entries.append((PROMPT_ROWS, 0, median(prompt_times)))
    passes_alone = [
        {
            "model": loaded.name,
            "dtype": dtype_name(loaded),
            "rows": rows,
            "context": context,
            "ms": round(seconds * 1e3, 3),
        }
        for rows, context, seconds in entries
    ]
    return [*passes_alone, tree_entry(loaded, CONTEXT, rounds)]


def bench_verify(loaded: LoadedModel, rounds: int, progress: Progress) -> list[dict[str, Any]]:
    """The rules on a pass's logits, beside that pass; every draft is accepted, so that no row is
    left out. Rejection samples the nucleus of `TOP_P`.
    """
    entries = []
    vocab = loaded.config.vocab_size
    for done, (requests, rows) in enumerate(VERIFY_LOADS):
        progress("verify", done, len(VERIFY_LOADS))
        one = RepeatedPass(loaded, rows, CONTEXT, requests)
        rules = _rules(loaded.model.kernels.row_math, one.run().view(requests, rows, vocab))
        times: dict[str, list[float]] = {rule: [] for rule in rules}
        passes = []
        for _ in range(rounds):
            passes.append(seconds_of(one.run))
            for rule, run in rules.items():
                times[rule].append(seconds_of(run))
        entries += [
            {
                "rule": rule,
                "requests": requests,
                "rows": rows,
                "vocab": vocab,
                "ms": round(median(seconds) * 1e3, 4),
                "pass_ms": round(median(passes) * 1e3, 3),
                "share_of_pass": round(median(seconds) / median(passes), 4),
            }
            for rule, seconds in times.items()
        ]
    progress("verify", len(VERIFY_LOADS), len(VERIFY_LOADS))
    return entries


def _rules(row_math: RowMath, logits: Tensor) -> Mapping[str, Callable[[], object]]:
    """For `logits` `[requests, rows, V]`: each request a chain of drafts that are all accepted."""
    requests, rows, vocab = logits.shape
    tree = chain(rows - 1)
    flat = logits.view(-1, vocab)
    nucleus = Truncation(top_p=TOP_P)
    best = row_math.argmax_rows(flat)

    def noisy(asked: Sequence[tuple[int, int]]) -> list[int]:
        chosen = [logits[request, node + 1] for request, node in asked]
        keys = [(request, node + 1) for request, node in asked]
        return row_math.draws(chosen, [WHOLE] * len(asked), keys)

    def laws(asked: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
        chosen = [logits[request, node + 1] for request, node in asked]
        return row_math.laws(chosen, [nucleus] * len(asked))[0]

    drafts = [best[request * rows : (request + 1) * rows - 1] for request in range(requests)]
    drawn = [noisy([(request, i - 1) for i in range(rows - 1)]) for request in range(requests)]

    def greedy() -> object:
        ids = row_math.argmax_rows(flat)
        walks = [match(tree, draft) for draft in drafts]
        return decide_all(walks, lambda asked: [ids[r * rows + node + 1] for r, node in asked])

    def coupled() -> object:
        return decide_all([match(tree, draft) for draft in drawn], noisy)

    def standard() -> object:
        # Coins of nothing accept everything, so that every row's law is worked out.
        walks = [rejection(tree, draft, None, lambda _: 0.0, 0.5, row_math) for draft in drafts]
        return decide_all(walks, laws)

    return {"greedy": greedy, "coupled": coupled, f"rejection, top-p {TOP_P}": standard}


def summarise(
    linear: Sequence[Mapping[str, Any]], forward: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The ratios that the figures are judged by; a list holds one number a shape, in order."""
    summary: dict[str, Any] = {}
    for name in FORMATS:
        one, four, many = (_of_rows(linear, name, rows) for rows in (1, 4, PREFILL_ROWS))
        torch_four = zip(
            _of_rows(linear, "bfloat16", 4), _of_rows(linear, "float32", 4), strict=True
        )
        torch_many = _of_rows(linear, "float32", PREFILL_ROWS)
        summary[name] = {
            "one_row_share_of_bandwidth": _ratios(one, one, "gb_s", "read_bandwidth_gb_s"),
            "four_rows_over_one": _ratios(four, one, "us", "us"),
            "four_rows_speed_over_faster_torch": [
                round(min(b["torch_us"], f["torch_us"]) / e["us"], 2)
                for e, (b, f) in zip(four, torch_four, strict=True)
            ],
            "prefill_speed_over_torch_float32": _ratios(torch_many, many, "torch_us", "us"),
            "all_of_a_pass": _all_of_a_pass(linear, name),
        }
        passes = {e["rows"]: e["ms"] for e in forward if e["dtype"] == name and "tree" not in e}
        if passes:
            summary[name]["forward_over_one_row"] = {
                rows: round(passes[rows] / passes[1], 3) for rows in ROWS
            }
            summary[name]["prefill_tokens_per_second"] = round(
                PROMPT_ROWS / passes[PROMPT_ROWS] * 1e3, 1
            )
    return summary


def _all_of_a_pass(linear: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    """The same ratios for all matrices of one pass together, each as often as the pass uses it."""

    def total(format_name: str, rows: int, key: str) -> float:
        return sum(float(e["uses"] * e[key]) for e in _of_rows(linear, format_name, rows))

    one, four = total(name, 1, "us"), total(name, 4, "us")
    limit = sum(
        e["uses"] * e["us"] * e["gb_s"] / e["read_bandwidth_gb_s"]
        for e in _of_rows(linear, name, 1)
    )
    torch = min(total(each, 4, "torch_us") for each in FORMATS)
    many = total(name, PREFILL_ROWS, "us")
    return {
        "one_row_share_of_bandwidth": round(limit / one, 3),
        "four_rows_over_one": round(four / one, 3),
        "four_rows_speed_over_faster_torch": round(torch / four, 2),
        "prefill_speed_over_torch_float32": round(
            total("float32", PREFILL_ROWS, "torch_us") / many, 2
        ),
    }


def _of_rows(linear: Sequence[Mapping[str, Any]], name: str, rows: int) -> list[Mapping[str, Any]]:
    return [e for e in linear if e["format"] == name and e["rows"] == rows]


def _ratios(
    above: Sequence[Mapping[str, Any]], below: Sequence[Mapping[str, Any]], a: str, b: str
) -> list[float]:
    return [round(x[a] / y[b], 3) for x, y in zip(above, below, strict=True)]


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
