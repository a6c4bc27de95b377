"""Chains of a model that begin with guesses: a cheaper drafter's tokens, verified by the model's
law in the pass that reads the committed tokens (staged speculation, Spector and Re 2308.04623).

Knows requests, rows of logits and guesses; knows no model and not who guesses. What stands is what
the model says: its own tokens at temperature 0 and with the target's noise, else tokens whose law
is the model's by the rejection rule, with coins of a stream of its own. So the next stage may
verify the chain by the model's law.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foredraft.core import coins, sampling
from foredraft.core.acceptance import BadRow, Verdict, Walk, decide_all, match
from foredraft.core.errors import UserError
from foredraft.core.rejection import rejection
from foredraft.core.row_math import RowMath
from foredraft.core.trees import topology
from foredraft.drafters.drawing import draw, keep
from foredraft.drafters.growth import ChainGrowth, Rows
from foredraft.drafters.interface import Draft, DraftRequest
from foredraft.grammar.guide import draft_mask
from foredraft.kernels.interface import Segment


class StagedGrowth(ChainGrowth):
    """A chain whose first pass computes guesses too."""

    def __init__(
        self, request: DraftRequest, start: int, room: int, max_depth: int, guess: Draft
    ) -> None:
        super().__init__(request, start, room, max_depth)
        self.guess = cut_depth(guess, self.room - 1)

    def rows(self) -> Rows:
        rows = super().rows()
        if not rows.wanted or not self.guess.tokens:
            return rows
        segment = rows.segment
        segment = Segment(segment.prefix, segment.chain, tuple(self.guess.parents), segment.pages)
        last, count = rows.wanted[0], len(self.guess.tokens)
        return Rows([*rows.token_ids, *self.guess.tokens], segment, range(last, last + count + 1))

    def row(self, node: int, logits: Tensor) -> sampling.Row:
        """The row of logits `[V]` that follows a guess, -1 = the pending token."""
        path = [self.guess.tokens[each] for each in topology(tuple(self.guess.parents)).path(node)]
        request = self.request
        history = request.history.extended(path)
        position = len(request.tokens) + len(path)
        mask = draft_mask(self.drawn.guide, path, logits.device)
        return sampling.Row(request.sampler, logits, history, request.seed, position, mask)

    def settle(
        self,
        accepted: Sequence[int],
        next_token: int | None,
        logits: Tensor,
        laws: Mapping[int, Tensor],
        row_math: RowMath,
    ) -> None:
        """Take the tokens that stand: accepted guesses, then the model's own; as far as they are
        wanted, which the tokens before each decide.

        `logits` `[1 + guesses, V]`; `laws`: by guess, what the token after it was drawn from.
        """
        drawn, guess = self.drawn, self.guess
        tokens = [guess.tokens[node] for node in accepted]
        if next_token is not None:
            tokens.append(next_token)
        for node, token in zip((-1, *accepted), tokens, strict=False):
            law = laws.get(node)
            if law is None:
                row = drawn.row(logits[1 + node])
                adjusted = row.adjusted() if drawn.rates_tokens else row.logits
                keep(drawn, token, adjusted, row_math)
            else:
                drawn.laws.append(law)
                if drawn.rates_tokens:
                    drawn.confidence.append(min(1.0, float(law[token])))
                drawn.tokens.append(token)
            if not drawn.goes_on:
                break
        kept = len(drawn.tokens)
        self.guess = Draft()
        # Guesses lie in the order of their rows: those that are a chain from the root lie in place.
        in_place = next((i for i, node in enumerate(accepted) if node != i), len(accepted))
        self.start += min(in_place, kept)
        self.room = self.room - kept if drawn.goes_on and next_token is not None else 0
        self.pending = drawn.tokens[min(in_place, kept) :] if self.room > 0 else []


class StagedGrower:
    """Verifies `guesses`, by request id, before chains go on alone."""

    def __init__(self, sampled: bool) -> None:
        self.sampled = sampled
        self.guesses: Mapping[str, Draft] = {}

    def open(self, request: DraftRequest, start: int, room: int, max_depth: int) -> StagedGrowth:
        guess = self.guesses.get(request.id, Draft())
        return StagedGrowth(request, start, room, max_depth, guess)

    def grow(self, growths: Sequence[StagedGrowth], logits: Tensor, row_math: RowMath) -> None:
        parts = torch.split(logits, [1 + len(each.guess.tokens) for each in growths])
        guessed: list[tuple[StagedGrowth, Tensor]] = []
        alone: list[tuple[StagedGrowth, Tensor]] = []
        for growth, part in zip(growths, parts, strict=True):
            (guessed if growth.guess.tokens else alone).append((growth, part))
        if alone:
            rows = torch.cat([part for _, part in alone]) if guessed else logits
            tokens = draw([each.drawn for each, _ in alone], rows, row_math, sampled=self.sampled)
            for (growth, _), token in zip(alone, tokens, strict=True):
                growth.took(token)
        if guessed:
            self._verify(guessed, row_math)

    def _verify(self, parts: Sequence[tuple[StagedGrowth, Tensor]], row_math: RowMath) -> None:
        laws: list[dict[int, Tensor]] = [{} for _ in parts]

        def answer(asked: Sequence[tuple[int, int]]) -> list[Any]:
            rows = []
            for index, node in asked:
                growth, logits = parts[index]
                own = growth.request.sampler.greedy or (growth.request.coupled and self.sampled)
                rows.append((growth.row(node, logits[1 + node]), own))
            replies: list[Any] = []
            for (index, node), reply in zip(asked, sampling.answers(rows, row_math), strict=True):
                if isinstance(reply, UserError):
                    replies.append(BadRow(node, str(reply)))
                elif isinstance(reply, int):
                    replies.append(reply)
                elif self.sampled:
                    laws[index][node] = reply
                    replies.append(reply)
                else:
                    replies.append(row_math.argmax_rows(reply[None])[0])
            return replies

        verdicts = decide_all([self._walk(growth, row_math) for growth, _ in parts], answer)
        for (growth, logits), verdict, drawn_from in zip(parts, verdicts, laws, strict=True):
            if isinstance(verdict, Verdict):
                accepted, token = verdict.accepted, verdict.next_token
                growth.settle(accepted, token, logits, drawn_from, row_math)
            else:  # the processors leave no token there
                accepted = topology(tuple(growth.guess.parents)).path(verdict.node)
                growth.settle(accepted, None, logits, drawn_from, row_math)

    def _walk(self, growth: StagedGrowth, row_math: RowMath) -> Walk[Any]:
        request, guess = growth.request, growth.guess
        tree = topology(tuple(guess.parents))
        if request.sampler.greedy or request.coupled or not self.sampled:
            return match(tree, guess.tokens)
        key = request.seed, len(request.tokens)
        accept_coin = partial(coins.coin, *key, coins.STAGE_ACCEPT)
        residual_coin = coins.coin(*key, coins.STAGE_RESIDUAL)
        return rejection(tree, guess.tokens, None, accept_coin, residual_coin, row_math)


def cut_depth(draft: Draft, max_depth: int) -> Draft:
    """The nodes of a fixed draft that may be verified, none deeper than `max_depth`."""
    tokens: list[int] = []
    parents: list[int] = []
    depths = {-1: 0}
    places = {-1: -1}
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        own = draft.verify is not None and not draft.verify[node]
        if own or parent not in places or depths[parent] == max_depth:
            continue
        depths[node] = depths[parent] + 1
        places[node] = len(tokens)
        tokens.append(token)
        parents.append(places[parent])
    return Draft(tuple(tokens), tuple(parents))
