"""Drafters around other drafters: that fail, record, choose, or merge chains into a tree.

Know drafters by the protocol only; know no engine and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from foredraft.drafters.interface import Capabilities, Draft, Drafter, DraftRequest, StepResult
from foredraft.testing.scripted_drafters import EmptyDrafter


class WrappingDrafter:
    """The base of those that pass everything on to another drafter."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        return self.inner.propose(requests)

    def observe(self, results: Sequence[StepResult]) -> None:
        self.inner.observe(results)

    def release(self, request_id: str) -> None:
        self.inner.release(request_id)


class RaisingDrafter(WrappingDrafter):
    """Raises `error` at the `n`-th call of `propose` (1 = the first), is `inner` otherwise."""

    def __init__(
        self, n: int = 1, inner: Drafter | None = None, error: Exception | None = None
    ) -> None:
        super().__init__(EmptyDrafter() if inner is None else inner)
        self.n = n
        self.error = RuntimeError("the drafter failed, as scripted") if error is None else error
        self.calls = 0

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        self.calls += 1
        if self.calls == self.n:
            raise self.error
        return self.inner.propose(requests)


class RecordingDrafter(WrappingDrafter):
    """Keeps what the drafter inside was asked and told, and what it answered."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, observes=True)
        self.requests: list[DraftRequest] = []
        self.drafts: list[Draft] = []
        self.calls: list[list[str]] = []  # ids of the requests, one list per call of propose()
        self.results: list[StepResult] = []
        self.released: list[str] = []

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        drafts = self.inner.propose(requests)
        # The engine's view of the tokens changes after the step, so a copy is kept.
        self.requests.extend(_with_own_tokens(request) for request in requests)
        self.drafts.extend(drafts)
        self.calls.append([request.id for request in requests])
        return drafts

    def observe(self, results: Sequence[StepResult]) -> None:
        self.results.extend(results)
        self.inner.observe(results)

    def release(self, request_id: str) -> None:
        self.released.append(request_id)
        self.inner.release(request_id)


class RoutingDrafter:
    """Gives each request its own drafter, so that one batch mixes oracles, liars and empty rows.

    `route` is asked at a request's first draft and its answer kept until the request is released.
    """

    def __init__(
        self, route: Callable[[DraftRequest], Drafter], capabilities: Capabilities | None = None
    ) -> None:
        self.route = route
        self.capabilities = Capabilities() if capabilities is None else capabilities
        self.routes: dict[str, Drafter] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        drafts: list[Draft] = []
        for request in requests:
            if request.id not in self.routes:
                self.routes[request.id] = self.route(request)
            drafts.extend(self.routes[request.id].propose([request]))
        return drafts

    def observe(self, results: Sequence[StepResult]) -> None:
        for result in results:
            if result.id in self.routes:
                self.routes[result.id].observe([result])

    def release(self, request_id: str) -> None:
        drafter = self.routes.pop(request_id, None)
        if drafter is not None:
            drafter.release(request_id)


class TreeDrafter:
    """Merges the deterministic chains of several drafters into one tree, common prefixes once.

    Nodes go in level by level, in the order of the drafters, until `max_nodes`: when the tree does
    not fit, every branch loses its end rather than one drafter its turn.
    """

    capabilities = Capabilities(tree=True)

    def __init__(self, *inner: Drafter) -> None:
        self.inner = inner

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        proposals = [drafter.propose(requests) for drafter in self.inner]
        return [
            merge_chains(drafts, request.max_nodes)
            for request, *drafts in zip(requests, *proposals, strict=True)
        ]

    def observe(self, results: Sequence[StepResult]) -> None:
        for drafter in self.inner:
            drafter.observe(results)

    def release(self, request_id: str) -> None:
        for drafter in self.inner:
            drafter.release(request_id)


def merge_chains(drafts: Sequence[Draft], max_nodes: int) -> Draft:
    """One tree of several deterministic chains, level by level, with at most `max_nodes` nodes.

    Raises ValueError for a draft that is no chain or carries probabilities.
    """
    for draft in drafts:
        if draft.probs is not None or list(draft.parents) != list(range(-1, len(draft.tokens) - 1)):
            raise ValueError("only deterministic chains can be merged into a tree")
    tokens: list[int] = []
    parents: list[int] = []
    nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    ends: list[int | None] = [-1] * len(drafts)  # where each chain has got to; None = cut off
    for depth in range(max((len(draft.tokens) for draft in drafts), default=0)):
        for i, draft in enumerate(drafts):
            end = ends[i]
            if end is None or depth >= len(draft.tokens):
                continue
            key = (end, draft.tokens[depth])
            if key not in nodes and len(tokens) < max_nodes:
                nodes[key] = len(tokens)
                parents.append(key[0])
                tokens.append(key[1])
            ends[i] = nodes.get(key)
    return Draft(tuple(tokens), tuple(parents))


def _with_own_tokens(request: DraftRequest) -> DraftRequest:
    return request._replace(tokens=tuple(request.tokens))
