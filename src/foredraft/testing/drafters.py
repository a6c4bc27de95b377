"""Drafters that follow a script, so that a test knows every draft before it is made.

Know requests and drafts, and the known continuation or law they were given; know no engine and no
model. All follow one rule about positions: the token at index `i` of prompt and output has the
absolute position `i`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from foredraft.drafters.interface import Capabilities, Draft, Drafter, DraftRequest, StepResult

Continuations = Mapping[tuple[int, ...], Sequence[int]] | Callable[[DraftRequest], Sequence[int]]


class ScriptedDrafter:
    """The base of the stateless ones: `draft` is asked once per request, nothing is kept."""

    capabilities: Capabilities = Capabilities()

    def draft(self, request: DraftRequest) -> Draft:
        """The draft for one request; the base proposes nothing."""
        return Draft()

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        return [self.draft(request) for request in requests]

    def observe(self, results: Sequence[StepResult]) -> None:
        return None

    def release(self, request_id: str) -> None:
        return None


class EmptyDrafter(ScriptedDrafter):
    """Never proposes anything."""


class RepeatDrafter(ScriptedDrafter):
    """Proposes the same token, as often as it may."""

    def __init__(self, token: int) -> None:
        self.token = token

    def draft(self, request: DraftRequest) -> Draft:
        return Draft.chain([self.token] * request.max_nodes)


class FixedDrafter(ScriptedDrafter):
    """Proposes the same draft whatever it is asked, well-formed or not; ignores `max_nodes`."""

    def __init__(self, draft: Draft) -> None:
        self.fixed = draft

    def draft(self, request: DraftRequest) -> Draft:
        return self.fixed


class OracleDrafter(ScriptedDrafter):
    """Replays a known output: by prompt, or by what a function says of the request.

    `continuations` gives the whole output that plain decoding makes of a prompt. The draft is the
    part that follows the tokens already output, whether or not those agree with it; for a prompt
    that is not known, and at the end of the known output, the draft is empty.
    """

    def __init__(self, continuations: Continuations) -> None:
        self.continuations = continuations

    def known_tokens(self, request: DraftRequest) -> list[int]:
        """The next tokens of the known output, at most `max_nodes`."""
        if callable(self.continuations):
            known = self.continuations(request)
        else:
            prompt = tuple(request.tokens[: request.num_prompt_tokens])
            known = self.continuations.get(prompt, ())
        start = len(request.tokens) - request.num_prompt_tokens
        return list(known[start : start + request.max_nodes])

    def draft(self, request: DraftRequest) -> Draft:
        return Draft.chain(self.known_tokens(request))


def different_token(token: int) -> int:
    """A valid id other than `token` in every vocabulary of two ids or more."""
    return token - 1 if token > 0 else 1


class WrongAtDrafter(ScriptedDrafter):
    """The oracle's draft with another token at position `k` (0 = the first); right elsewhere."""

    def __init__(self, oracle: OracleDrafter, k: int) -> None:
        self.oracle = oracle
        self.k = k

    def draft(self, request: DraftRequest) -> Draft:
        tokens = self.oracle.known_tokens(request)
        if self.k < len(tokens):
            tokens[self.k] = different_token(tokens[self.k])
        return Draft.chain(tokens)


class LiarDrafter(ScriptedDrafter):
    """Knows the oracle's draft and proposes another token at every position."""

    def __init__(self, oracle: OracleDrafter) -> None:
        self.oracle = oracle

    def draft(self, request: DraftRequest) -> Draft:
        return Draft.chain([different_token(t) for t in self.oracle.known_tokens(request)])


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
    return replace(request, tokens=tuple(request.tokens))
