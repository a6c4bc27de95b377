"""Is the output the same, bit for bit: greedy and seeded, drafted, in chunks and batches?

Knows engines and hashes; knows no clock. Every committed token is compared with plain decoding's,
and so is a hash of the row of logits that it came from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from foredraft.bench.decode import prompt_ids
from foredraft.bench.provenance import provenance
from foredraft.bench.workload import Item
from foredraft.core.sampling import SamplingParams
from foredraft.engine.llm import LLM
from foredraft.models.load import LoadedModel

Progress = Callable[[str, int, int], None]  # what, done, of
SEED = 20_260_101
TEMPERATURE = 0.8
CHUNKS = (1, 7, 64)
BATCH = 8
SPECULATION = {"method": "ngram", "num_speculative_tokens": 4}


@dataclass(frozen=True, slots=True)
class IdentitySettings:
    """What `bench identity` runs."""

    max_tokens: int = 128
    threads: int = 2  # of the baseline
    engine: Mapping[str, Any] = field(default_factory=dict)  # further settings of every LLM


@dataclass(frozen=True, slots=True)
class Committed:
    """One token, a hash of the logits it came from, and the gap between the best two logits."""

    position: int
    token: int
    digest: bytes
    margin: float


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first place where a run left plain decoding."""

    prompt_id: str
    position: int
    token: int | None  # None: the run ended there
    plain_token: int | None
    same_logits: bool
    plain_top2_margin: float | None


@dataclass(frozen=True, slots=True)
class Check:
    """One way of running, compared with plain decoding."""

    name: str
    temperature: float
    speculative_config: Mapping[str, Any] | None
    batch: int = 1
    prefill_chunk_size: int | None = None
    threads: int | None = None  # None: as loaded


@dataclass(frozen=True, slots=True)
class CheckResult:
    """How far a check got."""

    name: str
    passed: bool
    prompts: int
    tokens: int
    compared_logits: bool
    mismatch: Mismatch | None


class Recorder:
    """An engine's tap: what was committed, by request."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Committed]] = {}

    def __call__(self, request_id: str, position: int, token: int, row: Tensor) -> None:
        best = torch.topk(row, 2).values
        self.rows.setdefault(request_id, []).append(
            Committed(
                position,
                token,
                hashlib.sha256(row.contiguous().numpy().tobytes()).digest(),
                float(best[0] - best[1]),
            )
        )


def checks(threads: int) -> list[Check]:
    """The ways of running; the last has another number of threads than the baseline."""
    found = [
        Check("greedy, n-gram speculation", 0.0, SPECULATION),
        Check("seeded, n-gram speculation", TEMPERATURE, SPECULATION),
    ]
    for rows in CHUNKS:
        name = f"greedy, n-gram speculation, prompt chunks of {rows}"
        found.append(Check(name, 0.0, SPECULATION, prefill_chunk_size=rows))
    found.append(Check(f"greedy, plain, batch of {BATCH}", 0.0, None, batch=BATCH))
    name = f"greedy, n-gram speculation, batch of {BATCH}"
    found.append(Check(name, 0.0, SPECULATION, batch=BATCH))
    other = 2 if threads == 1 else 1
    name = f"greedy, n-gram speculation, {other} thread{'s' if other > 1 else ''}"
    found.append(Check(name, 0.0, SPECULATION, threads=other))
    return found


def bench_identity(
    load: Callable[[int | None], LoadedModel],
    items: Sequence[Item],
    settings: IdentitySettings,
    progress: Progress,
) -> dict[str, Any]:
    """Compare every way of running with plain decoding alone; stop at the first mismatch.

    `load` gives the model at a number of threads. Raises InvalidRequest for a prompt that does not
    fit, naming its line and id.

    Logits are compared on the native kernels; the reference kernels' matrix library is not
    batch-invariant.
    """
    loaded = load(settings.threads)
    compare_logits = loaded.model.kernels.name == "native"
    prompts = prompt_ids(loaded, items, settings.engine.get("max_model_len"))
    baselines: dict[float, dict[str, list[Committed]]] = {}
    results: list[CheckResult] = []
    for check in checks(settings.threads):
        if check.temperature not in baselines:
            word = "greedy" if check.temperature == 0 else "seeded"
            baseline = Check(f"{word}, plain, alone", check.temperature, None)
            recorded = _record(loaded, baseline, prompts, settings, progress)
            baselines[check.temperature] = dict(recorded)
        model = loaded if check.threads is None else load(check.threads)
        recorded = _record(model, check, prompts, settings, progress)
        results.append(_compare(check, recorded, baselines[check.temperature], compare_logits))
        if not results[-1].passed:
            break
    return {
        "kind": "identity",
        **provenance(),
        "model": loaded.name,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "kernels": loaded.model.kernels.name,
        "max_tokens": settings.max_tokens,
        "prompts": len(items),
        "passed": all(result.passed for result in results),
        "checks": [asdict(result) for result in results],
    }


def _record(
    loaded: LoadedModel,
    check: Check,
    prompts: Mapping[str, Sequence[int]],
    settings: IdentitySettings,
    progress: Progress,
) -> Iterator[tuple[str, list[Committed]]]:
    """What each prompt committed, batch by batch."""
    recorder = Recorder()
    llm = LLM(
        loaded,
        speculative_config=check.speculative_config,
        max_num_seqs=check.batch,
        prefill_chunk_size=check.prefill_chunk_size,
        tap=recorder,
        **settings.engine,
    )
    seed = None if check.temperature == 0 else SEED
    params = SamplingParams(
        max_tokens=settings.max_tokens, temperature=check.temperature, seed=seed
    )
    ids = list(prompts)
    for start in range(0, len(ids), check.batch):
        batch = ids[start : start + check.batch]
        outputs = llm.generate([list(prompts[prompt_id]) for prompt_id in batch], params)
        for prompt_id, output in zip(batch, outputs, strict=True):
            yield prompt_id, recorder.rows.pop(output.request_id)
        progress(check.name, min(start + check.batch, len(ids)), len(ids))


def _compare(
    check: Check,
    recorded: Iterator[tuple[str, list[Committed]]],
    baseline: Mapping[str, list[Committed]],
    compare_logits: bool,
) -> CheckResult:
    prompts = tokens = 0
    mismatch = None
    for prompt_id, rows in recorded:
        mismatch = first_mismatch(prompt_id, rows, baseline[prompt_id], compare_logits)
        if mismatch is not None:
            break
        prompts += 1
        tokens += len(rows)
    return CheckResult(check.name, mismatch is None, prompts, tokens, compare_logits, mismatch)


def first_mismatch(
    prompt_id: str, rows: Sequence[Committed], plain: Sequence[Committed], compare_logits: bool
) -> Mismatch | None:
    """Where `rows` first differ from plain decoding's; None if nowhere."""
    for ours, theirs in zip_longest(rows, plain):
        if ours is None:
            return Mismatch(prompt_id, theirs.position, None, theirs.token, False, theirs.margin)
        if theirs is None:
            return Mismatch(prompt_id, ours.position, ours.token, None, False, None)
        same_logits = ours.digest == theirs.digest
        same_token = (ours.position, ours.token) == (theirs.position, theirs.token)
        if not same_token or (compare_logits and not same_logits):
            return Mismatch(
                prompt_id, theirs.position, ours.token, theirs.token, same_logits, theirs.margin
            )
    return None
