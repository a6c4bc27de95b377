"""The prompts of a load, from a workload.

Knows items and a model's tokenizer; knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.bench.prompts import first_turn_ids, lengthened
from foredraft.bench.serve.arrivals import Prompt, by_turns
from foredraft.bench.workload import Item
from foredraft.core.errors import UserError
from foredraft.models.tokenizer import Tokenizer


def of_texts(items: Sequence[Item]) -> list[Prompt]:
    """First turns as text, tasks in turn, for a server with a tokenizer of its own."""
    return [Prompt(item.id, item.task, item.turns[0]) for item in by_turns(items)]


def of_tokens(
    tokenizer: Tokenizer,
    items: Sequence[Item],
    limit: int,
    prompt_tokens: int | None = None,
) -> list[Prompt]:
    """First turns as token ids, tasks in turn; with `prompt_tokens`, each is that long: it goes on
    with the texts of the items after it.

    Raises UserError for a prompt of more than `limit` tokens, naming its line and id.
    """
    if prompt_tokens is not None and prompt_tokens > limit:  # before they are made
        raise UserError(
            f"prompts of {prompt_tokens} tokens: valid with such answers are up to {limit}"
        )
    ordered = by_turns(items)
    prompts = []
    for number, item in enumerate(ordered):
        ids = first_turn_ids(tokenizer, item)
        if prompt_tokens is not None:
            ids = lengthened(tokenizer, ordered[number:] + ordered[:number], prompt_tokens)
        if len(ids) > limit:
            raise UserError(
                f"workload line {item.line}, prompt {item.id!r}: {len(ids)} tokens, valid with "
                f"such answers are up to {limit}"
            )
        prompts.append(Prompt(item.id, item.task, item.turns[0], tuple(ids)))
    return prompts
