"""Is the text the same with and without speculation, greedy and with a seed?

Knows ways of running the same requests, and compares what they commit with plain decoding alone,
token by token and, where rows do not depend on their company, logit by logit. Samples no law.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foredraft.bench.certificate.check import Check
from foredraft.bench.certificate.drafts import FirstTokens
from foredraft.bench.certificate.draws import Pair, check_finished
from foredraft.bench.identity import Committed, Mismatch, Recorder, first_mismatch
from foredraft.core.sampling import SamplingParams
from foredraft.engine.llm import LLM
from foredraft.engine.outputs import RequestOutput

Progress = Callable[[str, int, int], None]  # what, done, of
TEMPERATURE = 0.8
CHUNKS = (1, 7, 64)  # prompt rows a pass
BATCH = 16  # requests at once
ALONE = "one request at a time"


@dataclass(frozen=True, slots=True)
class Way:
    """A way of running all requests: at once or one by one, and prompts in chunks."""

    name: str
    width: int
    at_once: bool = True
    chunk: int | None = None


PLAIN = Way("plain", 0, at_once=False)


@dataclass(frozen=True, slots=True)
class Job:
    """One request: a prompt, greedy or with a seed."""

    name: str
    prompt: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class IdentityResults:
    """The checks, the pair's outputs by way of running, and what plain decoding said greedily."""

    checks: Sequence[Check]
    outputs: Mapping[str, Sequence[RequestOutput]]
    greedy: Mapping[tuple[int, ...], Sequence[int]]  # prompt -> its plain output
    # Of every draft of the widest run: its first token, and what was said there.
    firsts: Sequence[tuple[int, int]]

    @property
    def widest(self) -> Sequence[RequestOutput]:
        """The outputs with the pair's own draft length, one request at a time."""
        return self.outputs[ALONE]


def check_identity(
    pair: Pair, prompts: Mapping[str, Sequence[int]], max_tokens: int, seed: int, progress: Progress
) -> IdentityResults:
    """Every way against plain decoding, one request at a time.

    Seeded requests are verified by the coupled rule here, whatever the pair's own.
    """
    coupled = replace(pair, rule="coupled")
    jobs = _jobs(prompts, max_tokens, seed)
    plain, _ = _run(coupled, jobs, PLAIN, progress)
    checks = []
    outputs = {}
    firsts = FirstTokens(pair.drafter)
    for way in _ways(pair.num_speculative_tokens):
        watched = replace(coupled, drafter=firsts) if way.name == ALONE else coupled
        rows, outputs[way.name] = _run(watched, jobs, way, progress)
        checks.append(_compared(way, jobs, rows, plain, pair.same_bits))
    greedy = {
        tuple(job.prompt): [row.token for row in rows]
        for job, rows in zip(jobs, plain, strict=True)
        if job.params.temperature == 0
    }
    drafted = [first for output in outputs[ALONE] for first in firsts.beside(output)]
    return IdentityResults(checks, outputs, greedy, drafted)


def _jobs(prompts: Mapping[str, Sequence[int]], max_tokens: int, seed: int) -> list[Job]:
    greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    seeded = replace(greedy, temperature=TEMPERATURE, seed=seed)
    return [
        Job(f"{name}, {word}", prompt, params)
        for name, prompt in prompts.items()
        for word, params in (("greedy", greedy), ("seeded", seeded))
    ]


def _ways(most: int) -> list[Way]:
    widths = [Way(f"width {width}, all at once", width) for width in range(most + 1)]
    chunks = [Way(f"prompt chunks of {rows}, all at once", most, chunk=rows) for rows in CHUNKS]
    return [*widths, Way(ALONE, most, at_once=False), *chunks]


def _run(
    coupled: Pair, jobs: Sequence[Job], way: Way, progress: Progress
) -> tuple[list[list[Committed]], list[RequestOutput]]:
    """What each job committed, and the outputs."""
    recorder = Recorder()
    size = min(BATCH, len(jobs)) if way.at_once else 1
    sizes: dict[str, Any] = {
        "tap": recorder,
        "max_num_seqs": size,
        "prefill_chunk_size": way.chunk,
    }
    if way is PLAIN:
        llm = LLM(coupled.target, **{**coupled.engine, **sizes})
    else:
        llm = coupled.llm(way.width, **sizes)
    outputs: list[RequestOutput] = []
    for start in range(0, len(jobs), size):
        batch = jobs[start : start + size]
        outputs += llm.generate([list(job.prompt) for job in batch], [job.params for job in batch])
        check_finished(outputs[start:])
        progress(f"identity, {way.name}", len(outputs), len(jobs))
    return [recorder.rows.pop(output.request_id) for output in outputs], outputs


def _compared(
    way: Way,
    jobs: Sequence[Job],
    found: Sequence[Sequence[Committed]],
    plain: Sequence[Sequence[Committed]],
    same_bits: bool,
) -> Check:
    name = f"identity, {way.name}"
    for job, rows, reference in zip(jobs, found, plain, strict=True):
        mismatch = first_mismatch(job.name, rows, reference, compare_logits=same_bits)
        if mismatch is not None:
            return Check(name, False, None, None, _words(mismatch))
    tokens = sum(map(len, found))
    what = "tokens and logits" if same_bits else "tokens"
    detail = f"{what} of {len(jobs)} requests, greedy and seeded, equal plain decoding's"
    return Check(name, True, float(tokens), None, detail)


def _words(mismatch: Mismatch) -> str:
    """Where a run left plain decoding, and by how little plain decoding chose."""
    margin = mismatch.plain_top2_margin
    return (
        f"{mismatch.prompt_id}: at position {mismatch.position} token {mismatch.token}, plain "
        f"decoding {mismatch.plain_token}; logits {'equal' if mismatch.same_logits else 'differ'}"
        + ("" if margin is None else f", plain decoding's best two are {margin:.3g} apart")
    )
