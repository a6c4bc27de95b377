"""A request that runs in the simulator: how far it is, what its drafter has, what becomes of that.

Knows one request; knows no policy, no cost and no clock. Where drafts come from, and which of their
nodes are accepted, is for subclasses to say: `ByLaw` draws them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random

from foredraft.core.counts import AcceptanceCounts
from foredraft.planning.laws import Arrival
from foredraft.planning.policy import Judged, Offer, RequestState, Tried


class Running(ABC):
    """One request, from its arrival on."""

    def __init__(
        self,
        id_: str,
        num_prompt: int,
        num_answer: int,
        *,
        request_type: str = "greedy",
        at: float = 0.0,
        num_cached: int = 0,
    ) -> None:
        """`at`: seconds, when it comes; `num_cached`: positions before the prompt that the prefix
        cache holds.
        """
        self.id = id_
        self.request_type = request_type
        self.at = at
        self.num_answer = num_answer
        self.num_output = 0  # of the answer
        self.first_token = 0.0
        self.counts = AcceptanceCounts()
        self._num_prompt, self._num_cached, self._num_read = num_prompt, num_cached, 0

    @property
    def left_to_read(self) -> int:
        """Prompt tokens."""
        return self._num_prompt - self._num_read

    @property
    def left_to_say(self) -> int:
        """Tokens of the answer."""
        return self.num_answer - self.num_output

    @property
    def num_positions(self) -> int:
        """In its cache."""
        return self._num_cached + self._num_read + self.num_output

    @property
    def state(self) -> RequestState:
        """As a policy sees it."""
        most = max(0, self.left_to_say - 1)
        return RequestState(self.id, self.request_type, most, self.num_positions, self.counts)

    def read(self, rows: int) -> None:
        """So many rows of it were in a step: of its prompt, as far as it wasn't read."""
        self._num_read += min(rows, self.left_to_read)

    @abstractmethod
    def offer(self, width: int) -> Offer:
        """What the drafter has when it is asked for `width` tokens."""

    @abstractmethod
    def accepted(self, offer: Offer, nodes: Sequence[int]) -> list[int]:
        """Of the `nodes` that are verified, those that are accepted: a path from the root."""

    def emitted(self, at: float, tokens: int) -> None:
        """It said so many tokens more."""
        self.num_output += tokens

    def judged(
        self, width: int, offer: Offer, nodes: Sequence[int], accepted: Sequence[int]
    ) -> Judged:
        """What the policy is told of a step in which it was asked for `width` tokens."""
        depths: dict[int, int] = {-1: 0}
        for node in nodes:
            depths[node] = depths[offer.parents[node]] + 1
        stated, right = offer.confidence, {-1, *accepted}
        return Judged(
            self.id,
            self.request_type,
            width,
            max(depths.values()),
            len(accepted),
            ended=self.left_to_say <= 0,
            offer=offer if width else None,
            tried=[
                Tried(depths[node] - 1, None if stated is None else stated[node], node in right)
                for node in nodes
                if offer.parents[node] in right
            ],
            num_nodes=len(nodes),
        )


class ByLaw(Running):
    """Drafts are chains that fare by a law. Deterministic: a token's coin is a function of the
    seed, the request and its position, so that every policy meets the same luck.
    """

    def __init__(self, index: int, arrival: Arrival, seed: int) -> None:
        super().__init__(
            str(index),
            arrival.num_prompt,
            arrival.num_output,
            request_type=arrival.request_type,
            at=arrival.at,
            num_cached=arrival.num_cached,
        )
        self._law = arrival.law
        coins = Random(f"{seed}/{index}")
        self._accept = [coins.random() for _ in range(arrival.num_output)]
        self._find = [coins.random() for _ in range(arrival.num_output)]
        self._kind = [coins.random() for _ in range(arrival.num_output)]

    def offer(self, width: int) -> Offer:
        law, start = self._law, self.num_output
        length = width if self._find[start] < law.filled else 0
        kind = law.kind(self._kind[start])
        confidence = None if kind is None else [min(1.0, law.stated * kind)] * length
        parents = range(-1, length - 1)
        return Offer(self.id, self.request_type, self.num_positions, parents, confidence)

    def accepted(self, offer: Offer, nodes: Sequence[int]) -> list[int]:
        law, start = self._law, self.num_output
        kind = law.kind(self._kind[start])
        for position in range(len(nodes)):
            rate = law.rate(start, position) if kind is None else kind
            if self._accept[start + position] >= rate:
                return list(nodes[:position])
        return list(nodes)
