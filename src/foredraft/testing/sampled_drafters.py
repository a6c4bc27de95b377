"""Drafters that draw from a known law: the target's own, or one that differs from it.

Know a law per context and the coins of the request; know no engine. In the coupled rule they use
the target's own noise, `argmax(log q + G)`; in the rejection rule each token is drawn with a coin
of the stream `DRAFT`, keyed as that rule's other coins are: by the position of the step's first
token, and the offset in the draft.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foredraft.core import coins
from foredraft.core.acceptance import draw_from
from foredraft.core.row_math import RowMath, TorchRowMath, coupled_argmax
from foredraft.drafters.interface import Capabilities, Draft, DraftRequest
from foredraft.testing.scripted_drafters import ScriptedDrafter

Context = tuple[int, ...]  # prompt and output, the tokens drafted so far included
Rows = Callable[[Context], Tensor]  # what belongs to the token after a context: `[V]` numbers


class SkewedDrafter(ScriptedDrafter):
    """Draws from `law(context)`, `[V]` probabilities q of the next token, whatever the target's.

    `Draft.probs` is that law in the rejection rule and None in the coupled one. Sampling parameters
    of the request do not change the law. Raises ValueError for a law that is none.
    """

    capabilities = Capabilities(deterministic=False)

    def __init__(self, law: Rows, row_math: RowMath | None = None) -> None:
        self.law = law
        self.row_math = TorchRowMath() if row_math is None else row_math

    def draft(self, request: DraftRequest) -> Draft:
        context = tuple(request.tokens)
        first = len(context)
        laws = []
        for i in range(request.max_nodes):
            law = _checked(self.law(context))
            if request.coupled:
                position = len(context)
                token = coupled_argmax(self.row_math, law.log(), request.seed, position)
            else:
                coin = coins.coin(request.seed, first, coins.DRAFT, i)
                token = draw_from(law, coin, self.row_math)
                laws.append(law)
            context = (*context, token)
        return Draft.chain(context[first:], torch.stack(laws) if laws else None)


class SelfDrafter(ScriptedDrafter):
    """The target as its own drafter: `logits(context)` are the target's, `[V]`, unprocessed.

    They go through the request's own processors. Greedy and coupled drafts are the tokens that the
    target will choose; otherwise tokens are drawn from the target's law, which `Draft.probs` holds.
    """

    capabilities = Capabilities(deterministic=False)

    def __init__(self, logits: Rows, row_math: RowMath | None = None) -> None:
        self.logits = logits
        self.row_math = TorchRowMath() if row_math is None else row_math

    def draft(self, request: DraftRequest) -> Draft:
        committed, sampler = tuple(request.tokens), request.sampler
        drafted: list[int] = []
        laws = []
        while len(drafted) < request.max_nodes:
            row = self.logits((*committed, *drafted))
            path = request.history.extended(drafted)
            if request.coupled or sampler.greedy:
                position = len(committed) + len(drafted)
                drafted.append(sampler.token(row, path, request.seed, position))
            else:
                coin = coins.coin(request.seed, len(committed), coins.DRAFT, len(drafted))
                laws.append(sampler.law(row, path))
                drafted.append(draw_from(laws[-1], coin, self.row_math))
        return Draft.chain(drafted, torch.stack(laws) if laws else None)


def _checked(law: Tensor) -> Tensor:
    law = law.to(torch.float64)
    total = float(law.sum())
    if law.dim() != 1 or float(law.min()) < 0.0 or abs(total - 1.0) > 1e-9:
        raise ValueError(f"a law must be [V] probabilities that add up to 1, got {law.tolist()}")
    return law
