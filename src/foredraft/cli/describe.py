"""`foredraft info`: the machine, the kernels in use and why, and what a model costs here.

Knows how to say it; the facts come from the rooms that own them.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

from rich.padding import Padding
from rich.table import Table
from typer import Argument

from foredraft.cli.console import output_console, visible
from foredraft.cli.option_groups import given_options, option_groups
from foredraft.cli.options import JsonFlag, RuntimeOptions, SpeculationOptions
from foredraft.core.errors import ConfigError

if TYPE_CHECKING:
    from foredraft import LLM


@option_groups
def describe(
    model: Annotated[
        str | None,
        Argument(metavar="MODEL", help="Also this model: facts and memory.", show_default=False),
    ] = None,
    json_output: JsonFlag = False,
    *,
    speculation: SpeculationOptions,
    runtime: RuntimeOptions,
) -> None:
    """Show the machine, versions, the kernels in use and why, a model's facts and memory plan."""
    config = speculation.config()
    idle = [*given_options(speculation), *given_options(runtime)]
    if model is None and idle:
        raise ConfigError(f"{', '.join(idle)}: give a MODEL too, without one nothing is loaded")
    facts = _machine_facts()
    if model is not None:
        loaded = runtime.load(model)
        llm = runtime.llm(loaded, config)
        facts["kernels"]["in_use"] = loaded.model.kernels.name
        facts["model"] = _model_facts(llm)
        facts["memory"] = _memory_plan(llm)
        facts["speculation"] = _speculation(llm)
        facts["capacity"] = _capacity(llm)
    if json_output:
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        _print(facts)


def _machine_facts() -> dict[str, dict[str, Any]]:
    from foredraft.bench.provenance import machine, versions
    from foredraft.kernels.catalog import native_available, native_status

    return {
        "machine": machine(),
        "versions": versions(),
        "kernels": {
            "native": native_status(),
            "default_on_a_cpu": "native" if native_available() else "reference",
        },
    }


def _model_facts(llm: LLM) -> dict[str, Any]:
    loaded = llm.loaded
    config = loaded.config
    return {
        "name": loaded.name,
        "architecture": config.architecture,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "attention_heads": config.num_heads,
        "key_value_heads": config.num_kv_heads,
        "vocabulary": config.vocab_size,
        "positions": config.max_position_embeddings,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "chat_template": "yes" if loaded.tokenizer.has_chat_template else "no",
    }


def _memory_plan(llm: LLM) -> dict[str, Any]:
    cache, config = llm.engine.cache, llm.config
    page_bytes = cache.num_bytes // cache.num_pages
    longest = config.pages_for(config.max_model_len)
    return {
        "weight_bytes": llm.loaded.weight_bytes,
        "page_size": config.page_size,
        "page_bytes": page_bytes,
        "cache_dtype": str(cache.dtype).removeprefix("torch."),
        "cache_pages": cache.num_pages,
        "cache_limit_bytes": cache.num_bytes,
        "cached_tokens": cache.num_pages * config.page_size,
        "longest_requests_at_once": min(config.max_num_seqs, cache.num_pages // longest),
    }


def _capacity(llm: LLM) -> dict[str, Any]:
    """Requests at once, of one middling size, and what speculation takes of them."""
    from foredraft.engine.capacity import middling_size

    prompt_tokens, max_tokens = middling_size(llm.config)
    here = llm.capacity(prompt_tokens, max_tokens)
    plain = llm.capacity(prompt_tokens, max_tokens, speculation=False)
    return {
        "prompt_tokens": prompt_tokens,
        "answer_tokens": max_tokens,
        "requests_at_once": here.admitted,
        "without_preemption": here.undisturbed,
        "without_speculation": plain.admitted,
        "limit": here.limit,
        "in_a_line": llm.capacity_line(),
    }


def _speculation(llm: LLM) -> dict[str, Any]:
    """The drafter in effect, when it does not draft, and what it takes from memory and capacity."""
    if llm.drafter is None:
        return {"method": None, "off": "no speculation was asked for"}
    drafted, capabilities = llm.num_speculative_tokens, llm.drafter.capabilities
    draft_cache = llm.engine.draft_cache
    own = 0 if draft_cache is None else draft_cache.num_bytes
    alone = llm.config_without_drafter
    return {
        "method": llm.method,
        "drafter": type(llm.drafter).__name__,
        "draft_tokens_a_step": drafted,
        "off": _when_off(llm),
        "rows_a_step": f"up to {drafted + 1} a request, of {llm.config.max_num_batched_tokens}",
        "draft_weight_bytes": capabilities.weight_bytes,
        "draft_working_limit_bytes": llm.draft_working_bytes,
        "draft_cache_limit_bytes": own,
        "cached_tokens_without": alone.num_pages * alone.page_size,
    }


def _when_off(llm: LLM) -> str:
    """Where this drafter is not asked: always, or from some length on."""
    if llm.drafter is None or llm.num_speculative_tokens == 0:
        return "always: num_speculative_tokens is 0"
    longest = llm.drafter.capabilities.max_positions
    if longest is not None and longest < llm.config.max_model_len:
        return f"beyond {longest:,} tokens, the draft model's context"
    return "never"


KEY_WIDTH = 24  # the longest key, so that the sections line up
NARROW = 60  # columns; below, two columns side by side would be a letter wide


def _print(facts: dict[str, dict[str, Any]]) -> None:
    console = output_console()
    for section, values in facts.items():
        console.print(section, style="bold")
        rows = [(key.replace("_", " "), _words(key, value)) for key, value in values.items()]
        if console.width < NARROW:
            for key, words in rows:
                console.print(Padding(f"{key}: {words}", (0, 0, 0, 2), expand=False))
        else:
            console.print(Padding(_columns(rows), (0, 0, 0, 2), expand=False))


def _columns(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=KEY_WIDTH)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _words(key: str, value: Any) -> str:
    if value is None:
        return "none"
    if key.endswith("_bytes"):
        return f"{value / 2**20:,.1f} MiB"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return visible(str(value))
