"""The target answers prompts: training data as it would say it itself.

Knows prompts, an engine and where answers are kept; knows nothing of drafters. Answers are drawn
with one seed for each prompt and temperature, so a run that was stopped, and one with another
batch size, gives the same.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from foredraft.core.errors import UserError
from foredraft.core.sampling import SamplingParams
from foredraft.engine.llm import LLM
from foredraft.engine.outputs import RequestOutput
from foredraft.training.answers import (
    Answer,
    Manifest,
    has_shard,
    read_manifest,
    write_manifest,
    write_shard,
)

OWN_PROMPT_TEMPERATURE = 1.0
_SEEDS = 2**31


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is, told after every shard."""

    done: int  # answers that are there
    total: int
    tokens: int  # of the answers of this run
    fresh: int  # answers of this run


@dataclass(frozen=True, slots=True)
class _Job:
    """One answer to draw. The prompts behind those of the file are the target's own."""

    prompt_number: int
    temperature: float
    seed: int


def generate_answers(
    llm: LLM,
    prompts: Sequence[str],
    directory: Path,
    manifest: Manifest,
    report: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Answer every prompt at every temperature, shard by shard; shards that are there stay.

    Prompts go in an order drawn from the seed, so that the first answers are a fair sample of all.

    Raises:
        UserError: the directory holds answers of another manifest, or a prompt is too long.
        OSError: a shard can't be written.
    """
    _check_same(directory, manifest)
    write_manifest(directory, manifest)
    jobs = _jobs(manifest)
    done = fresh = tokens = 0
    for number, start in enumerate(range(0, len(jobs), manifest.shard_size)):
        part = jobs[start : start + manifest.shard_size]
        if not has_shard(directory, number):
            answers = _answer(llm, prompts, part, manifest)
            write_shard(directory, number, manifest, answers)
            fresh += len(answers)
            tokens += sum(len(each.answer) for each in answers)
        done += len(part)
        report(Progress(done, len(jobs), tokens, fresh))


def digest(parts: Sequence[str]) -> str:
    """sha256, in hex, of texts in their order."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8")
        found.update(len(data).to_bytes(8, "big"))
        found.update(data)
    return found.hexdigest()


def _check_same(directory: Path, manifest: Manifest) -> None:
    if not (directory / "manifest.json").exists():
        return
    field = read_manifest(directory).difference(manifest)
    if field is not None:
        there = getattr(read_manifest(directory), field)
        raise UserError(
            f"{str(directory)!r} holds answers with {field} {there!r}, asked for is "
            f"{getattr(manifest, field)!r}: choose another directory"
        )


def _jobs(manifest: Manifest) -> list[_Job]:
    """All answers to draw, those of one temperature after the other."""
    order = random.Random(manifest.seed)
    jobs: list[_Job] = []
    for temperature in manifest.temperatures:
        numbers = list(range(manifest.num_prompts + manifest.own_prompts))
        order.shuffle(numbers)
        jobs += [_Job(number, temperature, order.randrange(_SEEDS)) for number in numbers]
    return jobs


def _answer(
    llm: LLM, prompts: Sequence[str], jobs: Sequence[_Job], manifest: Manifest
) -> list[Answer]:
    own = [job.prompt_number for job in jobs if job.prompt_number >= len(prompts)]
    texts = {**dict(enumerate(prompts)), **_own_prompts(llm, own, manifest)}
    template = llm.tokenizer.apply_chat_template
    ids = [template([{"role": "user", "content": texts[job.prompt_number]}]) for job in jobs]
    params = SamplingParams(max_tokens=manifest.max_tokens)
    each = [replace(params, temperature=job.temperature, seed=job.seed) for job in jobs]
    outputs = _generated(llm, ids, each)
    return [
        Answer(
            np.array(prompt, np.int64),
            np.array(output.token_ids, np.int64),
            job.prompt_number,
            job.temperature,
        )
        for job, prompt, output in zip(jobs, ids, outputs, strict=True)
    ]


def _own_prompts(llm: LLM, numbers: Sequence[int], manifest: Manifest) -> dict[int, str]:
    """What the target itself puts where the template expects a user's words. A prompt is the same
    at every temperature of its answers.
    """
    if not numbers:
        return {}
    params = SamplingParams(max_tokens=manifest.max_tokens, temperature=OWN_PROMPT_TEMPERATURE)
    seeds = [random.Random(f"{manifest.seed} {number}").randrange(_SEEDS) for number in numbers]
    outputs = _generated(
        llm,
        [template_opening(llm)] * len(numbers),
        [replace(params, seed=seed) for seed in seeds],
    )
    return {number: output.text for number, output in zip(numbers, outputs, strict=True)}


def _generated(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[RequestOutput]:
    """The outputs, all of them whole. Raises UserError for one that failed."""
    outputs = llm.generate(prompts, params)
    for output in outputs:
        if output.outputs[0].error is not None:
            raise UserError(output.outputs[0].error)
    return outputs


def template_opening(llm: LLM) -> list[int]:
    """The ids that the chat template puts before a user's first word."""
    template = llm.tokenizer.apply_chat_template
    one, other = ([*template([{"role": "user", "content": text}])] for text in ("a", "1"))
    same = (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return one[: next(same, 0)]
