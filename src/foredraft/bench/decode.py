"""`foredraft bench decode`: the speed of decoding, plain and speculative, one request at a time.

Knows engines, prompts and clocks of the engine's own metrics. Plain decoding is always the first
run, in the same process, and all answer a prompt together: a step each in turn, in an order drawn
anew each time, with a pass of one row as a reference. So whatever the machine does in these tenths
of a second falls on all alike, and no step always comes behind the same other one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from foredraft.bench.clock import what_is_there_stays
from foredraft.bench.pace import Reference
from foredraft.bench.peers import Peer
from foredraft.bench.prompts import first_turn_ids, lengthened
from foredraft.bench.provenance import provenance, usable_cores
from foredraft.bench.samples import Run, Sample, summarise
from foredraft.bench.workload import Item
from foredraft.core.acceptance import Origin
from foredraft.core.errors import InvalidRequest
from foredraft.core.sampling import SamplingParams
from foredraft.engine.llm import LLM
from foredraft.engine.memory import choose_cache_dtype
from foredraft.engine.outputs import RequestMetrics, RequestOutput
from foredraft.models.decoder import cache_shape
from foredraft.models.load import LoadedModel

if TYPE_CHECKING:
    from foredraft.bench.kernels import Memory

WARM_UP_TOKENS = 8
Progress = Callable[[str, int, int], None]  # what, done, of


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """What `bench decode` measures."""

    configs: Sequence[Mapping[str, Any]]  # speculative configurations beside plain decoding
    max_tokens: int = 128
    repeats: int = 1
    peers: Sequence[str] = ()
    engine: Mapping[str, Any] = field(default_factory=dict)  # further settings of every LLM
    ignore_eos: bool = False
    prompt_tokens: int | None = None  # of every prompt; None: as they are


def prompt_ids(
    loaded: LoadedModel,
    items: Sequence[Item],
    max_model_len: int | None,
    prompt_tokens: int | None = None,
) -> dict[str, list[int]]:
    """Token ids of every item's prompt, by its id; with `prompt_tokens`, each is that long: it goes
    on with the texts of the items after it.

    Raises InvalidRequest for one that leaves no room for an answer, naming its line and id: before
    anything is measured.
    """
    limit = max_model_len or loaded.config.max_position_embeddings
    prompts: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        ids = first_turn_ids(loaded.tokenizer, item)
        if prompt_tokens is not None:
            following = [*items[number:], *items[:number]]
            ids = lengthened(loaded.tokenizer, following, prompt_tokens)
        prompts[item.id] = ids
        if len(ids) >= limit:
            raise InvalidRequest(
                f"workload line {item.line}, prompt {item.id!r}: {len(ids)} tokens, the context "
                f"holds {limit} with at least one for the answer"
            )
    return prompts


def label_of(method: str | None, config: Mapping[str, Any] | None) -> str:
    """A short name for a method in effect: `plain`, `ngram num_speculative_tokens=4`."""
    if method is None or config is None:
        return "plain"
    return " ".join([method, *(f"{key}={v}" for key, v in config.items() if key != "method")])


class BandwidthLimit:
    """Tokens per second if a token cost no more than reading its weights once (and the keys and
    values of its context).

    Read between the prompts, since a shared machine's memory is slower and faster by the minute.
    None without the native kernels, whose threads do the reading.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._memory: Memory | None = None
        self._seconds: list[float] = []
        if loaded.model.kernels.name == "native":
            from foredraft.bench.kernels import Memory
            from foredraft.kernels.native import NativeKernels

            self._memory = Memory(NativeKernels(loaded.num_threads))
        config = loaded.config
        self._bytes = loaded.weight_bytes
        if not config.tie_word_embeddings:  # of an embedding that is no head, one row is read
            self._bytes -= config.vocab_size * config.hidden_size * loaded.dtype.itemsize

    def measure(self) -> None:
        """Read memory once."""
        if self._memory is not None:
            self._seconds.append(self._memory.seconds_per_byte())

    def tokens_per_second(self, cache_bytes: float = 0.0) -> float | None:
        """`cache_bytes`: of keys and values that a token reads."""
        read = self._bytes + cache_bytes
        return 1 / (median(self._seconds) * read) if self._seconds else None


def bench_decode(
    loaded: LoadedModel, items: Sequence[Item], settings: DecodeSettings, progress: Progress
) -> dict[str, Any]:
    """Measure and summarise; the form is DESIGN's section 8 with provenance beside it.

    Raises InvalidRequest for a prompt that does not fit, naming its line and id.
    """
    prompts = prompt_ids(
        loaded, items, settings.engine.get("max_model_len"), settings.prompt_tokens
    )
    tasks = {item.id: item.task for item in items}
    limit = BandwidthLimit(loaded)
    runs = _measure(loaded, prompts, settings, limit, progress)
    plain = runs[0]
    summaries = [summarise(run, plain, tasks) for run in runs]
    dtype = choose_cache_dtype(settings.engine.get("kv_dtype", "auto"), loaded)
    positions = _mean_positions(prompts, plain)
    cache_bytes = positions * cache_shape(loaded.config, dtype).bytes_per_position
    return {
        "kind": "decode",
        **provenance(),
        "model": loaded.name,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "kernels": loaded.model.kernels.name,
        "max_tokens": settings.max_tokens,
        "ignore_eos": settings.ignore_eos,
        "repeats": settings.repeats,
        "prompts": len(items),
        "bandwidth_limit_tokens_per_second": limit.tokens_per_second(),
        "mean_positions": round(positions, 1),
        "bandwidth_limit_with_cache_tokens_per_second": limit.tokens_per_second(cache_bytes),
        "runs": summaries,
        "peers": {name: _best(summaries, name) for name in settings.peers},
    }


def _mean_positions(prompts: Mapping[str, Sequence[int]], plain: Run) -> float:
    """Positions in the cache that a step of plain decoding reads."""
    lengths = [
        (sample.tokens, len(prompts[key]) + sample.tokens / 2)
        for key, samples in plain.samples.items()
        for sample in samples
    ]
    tokens = sum(count for count, _ in lengths)
    return sum(count * positions for count, positions in lengths) / tokens if tokens else 0.0


def _best(summaries: Sequence[Mapping[str, Any]], peer: str) -> dict[str, Any]:
    """The better dtype of a peer, and how many times its speed plain decoding here has."""
    best = max(
        (each for each in summaries if each["peer"] == peer),
        key=lambda each: float(each["tokens_per_second"]),
    )
    rate, plain = best["tokens_per_second"], summaries[0]["tokens_per_second"]
    return {
        "label": best["label"],
        "tokens_per_second": rate,
        "plain_over_peer": plain / rate if rate else None,
    }


def _measure(
    loaded: LoadedModel,
    prompts: Mapping[str, Sequence[int]],
    settings: DecodeSettings,
    limit: BandwidthLimit,
    progress: Progress,
) -> list[Run]:
    """Every configuration and every peer on each prompt in turn, the plain one first."""
    configs: list[Mapping[str, Any] | None] = [None, *settings.configs]
    engines = _engines(loaded, prompts, settings)
    runs = [Run(label_of(llm.method, c), c) for llm, c in zip(engines, configs, strict=True)]
    clock = _Clock(loaded, settings)
    total, done = len(prompts) * settings.repeats, 0
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(_start(name, loaded, settings)) for name in settings.peers]
        peer_runs: dict[str, Run] = {}
        for repeat in range(settings.repeats):
            if repeat:  # what remembers responses must not meet them again
                engines = _engines(loaded, prompts, settings)
            for prompt_id, ids in prompts.items():
                limit.measure()
                for run, sample in zip(runs, clock.samples(engines, prompt_id, ids), strict=True):
                    run.add(prompt_id, sample)
                for peer in peers:
                    for dtype, answer in peer.generate(ids).items():
                        label = f"{peer.name} {dtype}"
                        run = peer_runs.setdefault(label, Run(label, None, peer=peer.name))
                        run.add(prompt_id, _peer_sample(answer))
                done += 1
                progress("decode", done, total)
    return [*runs, *peer_runs.values()]


class _Answer:
    """One engine's answer to a prompt, step by step."""

    def __init__(self, engine: LLM, ids: Sequence[int], params: SamplingParams) -> None:
        self._parts = engine.engine.seconds
        self._before = asdict(self._parts)
        self._stream = engine.stream(list(ids), params)
        self._seconds = 0.0
        self._paces: list[float] = []
        self._started = False
        self.output: RequestOutput | None = None  # once it is complete

    def step(self, pace: float) -> None:
        """The next one, beside a reference pass of `pace` seconds. The prompt's own isn't timed."""
        begin = time.perf_counter()
        delta = next(self._stream)
        if self._started:
            self._seconds += time.perf_counter() - begin
            self._paces.append(pace)
        self._started = True
        self.output = delta.finished

    def sample(self) -> Sample:
        """The counts and seconds of the complete answer."""
        assert self.output is not None
        metrics: RequestMetrics = self.output.metrics
        speculation = metrics.speculative_decoding
        drafts, parts = speculation.num_spec_steps, asdict(self._parts)
        return Sample(
            token_ids=tuple(self.output.token_ids),
            tokens=metrics.num_generated_tokens - metrics.num_first_step_tokens,
            seconds=self._seconds,
            steps=metrics.num_steps,
            drafts=drafts,
            drafted=speculation.num_draft_tokens,
            accepted=speculation.num_accepted_draft_tokens,
            accepted_by_position=tuple(
                rate * drafts for rate in speculation.acceptance_by_position
            ),
            part_seconds={part: parts[part] - self._before[part] for part in parts},
            from_draft=tuple(o is Origin.ACCEPTED for o in self.output.outputs[0].origins),
            reference_seconds=fmean(self._paces) if self._paces else None,
        )


class _Clock:
    """Times answers to a prompt, with a reference pass of one row between their steps."""

    def __init__(self, loaded: LoadedModel, settings: DecodeSettings) -> None:
        self._reference = Reference(loaded, rows=(1,))
        self._draw = Random(0)
        self._params = SamplingParams(
            max_tokens=settings.max_tokens, temperature=0.0, ignore_eos=settings.ignore_eos
        )

    def samples(
        self, engines: Sequence[LLM], prompt_id: str, ids: Sequence[int]
    ) -> Sequence[Sample]:
        """An answer of each. Raises InvalidRequest that names the prompt."""
        try:
            answers = [_Answer(engine, ids, self._params) for engine in engines]
        except InvalidRequest as error:
            raise InvalidRequest(f"prompt {prompt_id!r}: {error}") from None
        left = list(answers)
        with what_is_there_stays():
            while left:
                self._draw.shuffle(left)
                pace = self._reference.once()
                for answer in left:
                    answer.step(pace)
                left = [answer for answer in left if answer.output is None]
        return [answer.sample() for answer in answers]


def _engines(
    loaded: LoadedModel, prompts: Mapping[str, Sequence[int]], settings: DecodeSettings
) -> list[LLM]:
    """One of each configuration, plain decoding first, its memory touched."""
    engines = [
        LLM(loaded, speculative_config=config, max_num_seqs=1, **settings.engine)
        for config in (None, *settings.configs)
    ]
    for engine in engines:
        touch_memory(engine, max(map(len, prompts.values())) + settings.max_tokens)
    return engines


def touch_memory(engine: LLM, longest: int) -> None:
    """Let an engine answer a request of tokens drawn at random, as long as any that it will be
    given: memory is slow where it is touched for the first time, by a tenth of a step.
    """
    length = max(1, min(longest, engine.config.max_model_len) - WARM_UP_TOKENS)
    prompt = Random(0).choices(range(engine.loaded.config.vocab_size), k=length)
    params = SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=0.0, ignore_eos=True)
    engine.generate([prompt], params)


def _start(name: str, loaded: LoadedModel, settings: DecodeSettings) -> Peer:
    return Peer(
        name,
        Path(loaded.path),
        max_tokens=settings.max_tokens,
        eos_token_ids=sorted(loaded.eos_ids),
        threads=loaded.num_threads or usable_cores(),
    )


def _peer_sample(answer: Mapping[str, Any]) -> Sample:
    ids = tuple(answer["token_ids"])
    return Sample(ids, tokens=len(ids) - 1, seconds=answer["seconds"], steps=len(ids) - 1)
