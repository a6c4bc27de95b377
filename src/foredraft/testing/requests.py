"""A drafter's view of a request without an engine, for asking a drafter by itself.

Knows what the engine puts into a `DraftRequest`; knows no engine and no drafter.
"""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.cache.tensors import KVCache
from foredraft.core.row_math import RowMath, TorchRowMath
from foredraft.core.sampling import Sampler, SamplingParams
from foredraft.drafters.interface import DraftRequest


def draft_request(
    tokens: Sequence[int],
    num_prompt_tokens: int | None = None,
    *,
    vocab_size: int,
    max_nodes: int = 4,
    sampling: SamplingParams | None = None,
    seed: int = 0,
    coupled: bool = False,
    name: str = "request",
    end_token_ids: frozenset[int] = frozenset(),
    row_math: RowMath | None = None,
    cache: KVCache | None = None,
    pages: Sequence[int] = (),
) -> DraftRequest:
    """A request with the committed `tokens`, of which the first `num_prompt_tokens` (all) are its
    prompt.

    `end_token_ids` are what `min_tokens` bans; the sampling is greedy where none is given.
    """
    count = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    params = SamplingParams(temperature=0.0) if sampling is None else sampling
    sampler = Sampler(params, vocab_size, end_token_ids, row_math or TorchRowMath())
    history = sampler.start(tokens[:count])
    for token in tokens[count:]:
        history.append(token)
    return DraftRequest(
        id=name,
        tokens=tokens,
        num_prompt_tokens=count,
        max_nodes=max_nodes,
        sampling=params,
        seed=seed,
        coupled=coupled,
        sampler=sampler,
        history=history,
        cache=cache,
        pages=pages,
    )
