"""`foredraft bench serve`: from what is asked to the JSON result.

Knows how engines, prompts and a sweep fit together; knows no option and no terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from foredraft.bench.clock import what_is_there_stays
from foredraft.bench.pace import Reference
from foredraft.bench.provenance import provenance
from foredraft.bench.serve.arrivals import Prompt
from foredraft.bench.serve.engines import EngineServer, Variant, variants
from foredraft.bench.serve.prompts import of_texts, of_tokens
from foredraft.bench.serve.remote import RemoteServer
from foredraft.bench.serve.results import comparisons, points
from foredraft.bench.serve.sweep import Measured, Progress, Settings, Sweep
from foredraft.bench.serve.turns import Turns
from foredraft.bench.serve.verdicts import verdicts
from foredraft.bench.workload import Item
from foredraft.core.errors import UserError
from foredraft.engine.memory import choose_cache_dtype
from foredraft.models.decoder import cache_shape
from foredraft.models.load import LoadedModel
from foredraft.planning.allocation import Objective

ROWS_PER_REQUEST = 8  # of a pass at least, so that drafts are not cut at the highest level
MIN_ROWS = 256
CROWD_OF_ARRIVALS = 32  # run at once at most where requests arrive by chance
CACHES = 2  # a drafter may have one of its own, no larger than the target's
SPARE = 128  # positions a request: drafts, and what is left of its last page
MEASURE_OF = {
    Objective.THROUGHPUT: "tokens_per_second",
    Objective.LATENCY: "tokens_per_second_per_request",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared in this process."""

    base: Mapping[str, Any]  # speculative configuration; widths and policies vary it
    widths: Sequence[int]
    objectives: Sequence[Objective]
    prompt_tokens: int | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)  # further settings of every engine
    # Drafts can't pay here: the policy is to see that, and is judged by it.
    hopeless: bool = False


async def bench_engines(
    loaded: LoadedModel,
    items: Sequence[Item],
    comparison: Comparison,
    settings: Settings,
    progress: Progress,
) -> dict[str, Any]:
    """Measure plain decoding, fixed widths and policies over one model.

    Raises UserError for a prompt that leaves no room for its answer.
    """
    limit = comparison.engine.get("max_model_len") or loaded.config.max_position_embeddings
    room = limit - settings.max_tokens
    if room < 1:
        raise UserError(
            f"answers of {settings.max_tokens} tokens leave no room for a prompt: the context "
            f"holds {limit}"
        )
    prompts = of_tokens(loaded.tokenizer, items, room, comparison.prompt_tokens)
    longest = max(len(prompt.token_ids) for prompt in prompts) + settings.max_tokens
    engine = _engine_settings(loaded, comparison, settings, longest)
    chosen = variants(comparison.base, comparison.widths, comparison.objectives)
    costs: dict[str, Any] = {}
    reference, turns = Reference(loaded), Turns()
    async with AsyncExitStack() as stack:
        servers = []
        for variant in chosen:
            server = EngineServer(loaded, variant, settings.temperature, engine, reference, turns)
            stack.push_async_callback(server.close)
            servers.append(server)
            if server.policy is not None:
                costs.setdefault("calibrated", server.policy.costs.curve.as_json())
        with what_is_there_stays():
            measured = await Sweep(servers, prompts, settings).run(progress)
        for server in servers:
            server.check_drafter()
            if server.policy is not None:
                learnt = server.policy.costs
                costs.setdefault("learnt", {})[server.label] = learnt.curve.as_json()
                costs.setdefault("draft_ratio", {})[server.label] = learnt.draft_ratio
    result, step_costs = _result(measured, prompts, settings), measured.step_costs()
    return {
        **result,
        "model": loaded.name,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "kernels": loaded.model.kernels.name,
        "speculative_config": dict(comparison.base),
        "method": next((s.engine.method for s in servers if s.engine.method), None),
        "hopeless": comparison.hopeless,
        "prompt_tokens": comparison.prompt_tokens,
        **_judged(measured, result["points"], chosen, hopeless=comparison.hopeless),
        "costs": costs,
        "step_costs": {"decoding": step_costs.decoding(), "reading": step_costs.reading()},
        # Of every prompt in order, where an answer was seen to its end: [prompt, answer] in tokens.
        "lengths": [measured.lengths.get(prompt.id) for prompt in prompts],
        "prompt_lengths": [len(prompt.token_ids) for prompt in prompts],
    }


async def bench_server(
    url: str,
    model: str,
    items: Sequence[Item],
    settings: Settings,
    progress: Progress,
    api_key: str | None = None,
) -> dict[str, Any]:
    """Measure a server that is seen from outside. Raises UserError where it fails."""
    server = RemoteServer(url, model, settings.temperature, api_key)
    prompts = of_texts(items)
    measured = await Sweep([server], prompts, settings).run(progress)
    return {**_result(measured, prompts, settings), "model": model, "url": url}


def _engine_settings(
    loaded: LoadedModel, comparison: Comparison, settings: Settings, longest: int
) -> dict[str, Any]:
    """Room for the highest level, of requests of up to `longest` tokens: nobody is to wait for
    pages where loads are compared.
    """
    crowd = max((each.concurrency or 0 for each in settings.levels), default=0)
    if any(each.rate is not None for each in settings.levels):
        crowd = max(crowd, CROWD_OF_ARRIVALS)
    dtype = choose_cache_dtype(comparison.engine.get("kv_dtype", "auto"), loaded)
    position_bytes = CACHES * cache_shape(loaded.config, dtype).bytes_per_position
    room = max(2.0, crowd * (longest + SPARE) * position_bytes / 2**30)
    return {
        "max_num_seqs": crowd,
        "max_num_batched_tokens": max(MIN_ROWS, ROWS_PER_REQUEST * crowd),
        **({"kv_cache_gib": room} if comparison.engine.get("memory") is None else {}),
        **{key: value for key, value in comparison.engine.items() if value is not None},
    }


def _result(measured: Measured, prompts: Sequence[Prompt], settings: Settings) -> dict[str, Any]:
    return {
        "kind": "serve",
        **provenance(),
        "prompts": len({prompt.id for prompt in prompts}),
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "rounds": settings.rounds,
        "window": {"requests": settings.requests, "seconds": settings.seconds},
        "warm_up": measured.warm_up,
        "points": points(measured),
    }


def _judged(
    measured: Measured,
    found: Sequence[Mapping[str, Any]],
    chosen: Sequence[Variant],
    *,
    hopeless: bool,
) -> dict[str, Any]:
    fixed = [variant.label for variant in chosen if variant.width]
    ratios = comparisons(measured, fixed)
    objectives = {
        variant.label: MEASURE_OF[variant.objective]
        for variant in chosen
        if variant.objective is not None
    }
    return {
        "objectives": objectives,
        "fixed": {variant.label: variant.width for variant in chosen if variant.width is not None},
        "comparisons": ratios,
        "verdicts": verdicts(found, ratios, objectives, hopeless=hopeless),
    }
