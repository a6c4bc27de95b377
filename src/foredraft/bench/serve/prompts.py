"""The prompts of a load, from a workload.

Knows items and a model's tokenizer; knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.bench.decode import first_turn_ids
from foredraft.bench.serve.arrivals import Prompt, by_turns
from foredraft.bench.workload import Item
from foredraft.core.errors import UserError
from foredraft.models.tokenizer import Tokenizer

LONGEST_TAIL = 32  # tokens that close a prompt of a chat template


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
    ordered = by_turns(items)
    prompts = []
    for number, item in enumerate(ordered):
        ids = first_turn_ids(tokenizer, item)
        if prompt_tokens is not None:
            ids = _lengthened(tokenizer, ordered[number:] + ordered[:number], prompt_tokens)
        if len(ids) > limit:
            raise UserError(
                f"workload line {item.line}, prompt {item.id!r}: {len(ids)} tokens, valid with "
                f"such answers are up to {limit}"
            )
        prompts.append(Prompt(item.id, item.task, item.turns[0], tuple(ids)))
    return prompts


def _lengthened(tokenizer: Tokenizer, items: Sequence[Item], length: int) -> list[int]:
    """Exactly `length` tokens: the texts of `items`, in the chat template, cut before its end."""
    texts: list[str] = []
    ids: list[int] = []
    while len(ids) < length:
        grown = 1 + length // (1 + len(ids)) if texts else 4
        texts += [items[(len(texts) + n) % len(items)].turns[0] for n in range(min(grown, 64))]
        joined = Item(items[0].id, items[0].task, ("\n\n".join(texts),))
        ids = first_turn_ids(tokenizer, joined)
    tail = min(LONGEST_TAIL, length // 2)
    return [*ids[: length - tail], *ids[len(ids) - tail :]]
