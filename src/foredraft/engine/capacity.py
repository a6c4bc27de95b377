"""How many requests of a size an engine lets run at once.

Knows the rule by which the scheduler admits (`Scheduler._admit`), for requests that share nothing;
runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.engine.config import EngineConfig
from foredraft.planning.policy import Load, Policy, RequestState

MIDDLING = 2048  # tokens of a request that a line may take as its measure
ANSWER_SHARE = 8  # an eighth of them is the answer


@dataclass(frozen=True, slots=True)
class Capacity:
    """Requests of `prompt_tokens` and up to `max_tokens` more, of different texts."""

    prompt_tokens: int
    max_tokens: int  # at most what the context leaves
    admitted: int  # at once, whatever waits
    # Of these, so many can all reach their end without one of them being computed anew.
    undisturbed: int
    limit: str  # what admits no more: "pages", "max_num_seqs" or "max_model_len"


def capacity(config: EngineConfig, policy: Policy, prompt_tokens: int, max_tokens: int) -> Capacity:
    """What fits in an empty engine, with the widths that `policy` would choose now."""
    room = config.max_model_len - prompt_tokens
    max_tokens = min(max_tokens, room)
    if max_tokens < 1:
        return Capacity(prompt_tokens, 0, 0, 0, "max_model_len")
    longest = config.pages_for(prompt_tokens + max_tokens - 1)
    admitted = 0
    if longest <= config.num_pages:  # else it is refused
        while admitted < config.max_num_seqs and _admits(
            config, policy, admitted, prompt_tokens, max_tokens
        ):
            admitted += 1
    return Capacity(
        prompt_tokens,
        max_tokens,
        admitted,
        min(admitted, config.num_pages // longest),
        "max_num_seqs" if admitted == config.max_num_seqs else "pages",
    )


def _admits(
    config: EngineConfig, policy: Policy, running: int, prompt_tokens: int, max_tokens: int
) -> bool:
    """Whether one more may start beside `running` that have just been admitted: there must be pages
    for its tokens and its first draft, and one to spare for each of the others.
    """
    most = max_tokens - 1  # the step adds a token of its own
    state = RequestState(id="", request_type="greedy", max_width=most)
    (width,) = policy.widths(Load(running + 1, prompt_tokens), [state])
    needed = config.pages_for(prompt_tokens + max(0, min(width, most)))
    return needed + running <= config.num_pages - running * config.pages_for(prompt_tokens)


def middling_size(config: EngineConfig) -> tuple[int, int]:
    """Tokens of the prompt and of the answer of a request to measure an engine by: 2,048 together,
    or fewer where the context or the cache holds fewer.
    """
    size = min(MIDDLING, config.max_model_len, config.num_pages * config.page_size)
    answer = max(1, size // ANSWER_SHARE)
    return max(1, size - answer), answer


def capacity_words(
    here: Capacity, plain: Capacity | None, config: EngineConfig, plain_pages: int, held: str
) -> str:
    """Such as "cache: 1.85 GiB in 4,210 pages of 16 tokens; 32 requests of 1,792 + 256 tokens at
    once (36 without speculation)". `plain` is the same without a drafter, None where there is none.
    """
    pages = f"{config.num_pages:,} pages of {config.page_size} tokens"
    if plain is not None and plain_pages != config.num_pages:
        pages += f" ({plain_pages:,} without speculation)"
    notes = []
    if here.limit == "max_num_seqs":
        notes.append("max_num_seqs allows no more")
    if plain is not None:
        same = plain.admitted == here.admitted
        notes.append(f"{'as many' if same else plain.admitted} without speculation")
    note = f" ({', '.join(notes)})" if notes else ""
    size = f"{here.prompt_tokens:,} + {here.max_tokens:,} tokens"
    return f"cache: {held} in {pages}; {here.admitted:,} requests of {size} at once{note}"
