"""Drafters that follow a script, so that a test knows every draft before it is made.

Know requests and drafts, and the known continuation or law they were given; know no engine and no
model. All follow one rule about positions: the token at index `i` of prompt and output has the
absolute position `i`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from foredraft.drafters.interface import Capabilities, Draft, DraftRequest, StepResult

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
