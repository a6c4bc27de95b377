"""How a model's logits become draft tokens: the draw, the law it was drawn from, and whether to go
on.

Knows requests, rows of logits and laws; knows no model, no cache and no tree. What draws tokens one
by one for a chain, from whatever logits, draws them here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.core import coins, sampling
from foredraft.core.acceptance import draw_from
from foredraft.core.errors import ConfigError, UserError
from foredraft.core.row_math import RowMath
from foredraft.drafters.interface import DraftRequest
from foredraft.grammar.guide import Guide, draft_mask, guide_of

GREEDY, PROBABILISTIC = "greedy", "probabilistic"
SAMPLE_METHODS = (PROBABILISTIC, GREEDY)


def check_sample_method(method: object) -> bool:
    """Whether a `draft_sample_method` draws from the draft's law. Raises ConfigError."""
    if method not in SAMPLE_METHODS:
        raise ConfigError(
            f"draft_sample_method must be one of {', '.join(SAMPLE_METHODS)}, got {method!r}"
        )
    return method == PROBABILISTIC


@dataclass(slots=True)
class DrawnChain:
    """The draft tokens of one request so far."""

    request: DraftRequest
    tokens: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)  # [V] each; none where no rule reads them
    confidence: list[float] = field(default_factory=list)  # one a token, where it is asked for
    guide: Guide | None = field(init=False)  # of the output's grammar

    def __post_init__(self) -> None:
        self.guide = guide_of(self.request.matcher)

    @property
    def rates_tokens(self) -> bool:
        """Whether somebody wants to know how likely the tokens are: it costs a reduction each."""
        request = self.request
        return request.confidence_threshold > 0.0 or bool(request.least_path)

    @property
    def goes_on(self) -> bool:
        """Whether one more token is wanted, by those that are kept and never by the next one, so
        that no token is drawn and then dropped for its own value.
        """
        request, count = self.request, len(self.tokens)
        if count >= request.max_nodes:
            return False
        if not self.rates_tokens:
            return True
        path = 1.0
        for each in self.confidence:
            path *= each
        if self.confidence and self.confidence[-1] < request.confidence_threshold:
            return False
        return not request.least_path or (
            count < len(request.least_path) and path >= request.least_path[count]
        )

    @property
    def probs(self) -> Tensor | None:
        """`[n, V]`, as `Draft.probs` has them."""
        return torch.stack(self.laws) if self.laws else None

    def row(self, logits: Tensor) -> sampling.Row:
        """The row of logits `[V]` that the next draft token comes from."""
        request = self.request
        history = request.history.extended(self.tokens)
        position = len(request.tokens) + len(self.tokens)
        mask = draft_mask(self.guide, self.tokens, logits.device)
        return sampling.Row(request.sampler, logits, history, request.seed, position, mask)


def draw(
    chains: Sequence[DrawnChain], logits: Tensor, row_math: RowMath, *, sampled: bool
) -> list[int | None]:
    """One more token for each chain, from its row of `logits` `[chains, V]`; it is appended, its
    law and its confidence too. None where the processors leave no token to draft.

    `sampled`: tokens are drawn from the law under the request's own processors, with the target's
    noise in the coupled rule; else they are the most likely ones.
    """
    if chains and all(chain.request.sampler.plain_argmax for chain in chains):
        best = list(row_math.argmax_rows(logits))
        for chain, row, token in zip(chains, logits, best, strict=True):
            keep(chain, token, row, row_math)
        return list(best)
    rows = [chain.row(each) for chain, each in zip(chains, logits, strict=True)]
    own = [
        row.sampler.greedy or (chain.request.coupled and sampled)
        for chain, row in zip(chains, rows, strict=True)
    ]
    answers = sampling.answers(list(zip(rows, own, strict=True)), row_math)
    return [
        _kept(chain, row, answer, row_math, sampled)
        for chain, row, answer in zip(chains, rows, answers, strict=True)
    ]


def _kept(
    chain: DrawnChain,
    row: sampling.Row,
    answer: int | Tensor | UserError,
    row_math: RowMath,
    sampled: bool,
) -> int | None:
    if isinstance(answer, Tensor):
        if sampled:
            token = _drawn(chain, answer, row_math)
            chain.laws.append(answer)
        else:
            token = row_math.argmax_rows(answer[None])[0]
        if chain.rates_tokens:
            chain.confidence.append(min(1.0, float(answer[token])))
        chain.tokens.append(token)
        return token
    if isinstance(answer, int):
        adjusted = row.adjusted() if chain.rates_tokens else row.logits
        keep(chain, answer, adjusted, row_math)
        return answer
    return None  # the target will say the same of a row without tokens, or not


def keep(chain: DrawnChain, token: int, logits: Tensor, row_math: RowMath) -> None:
    """Append a token that is the best of `logits` `[V]`, after the request's processors up to the
    penalties, or of them and noise.
    """
    if chain.rates_tokens:
        temperature = chain.request.sampler.truncation.temperature
        logarithm = row_math.log_softmax(logits / temperature)[token]
        chain.confidence.append(min(1.0, float(torch.exp(logarithm))))
    chain.tokens.append(token)


def _drawn(chain: DrawnChain, law: Tensor, row_math: RowMath) -> int:
    request = chain.request
    coin = coins.coin(request.seed, len(request.tokens), coins.DRAFT, len(chain.tokens))
    return draw_from(law, coin, row_math)
