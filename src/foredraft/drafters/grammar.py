"""What the grammar of a structured answer forces, as the draft.

Knows the matcher of each request; knows no model, text or probability. A request without a grammar
gets no drafts. The same tokens are put before any other drafter's by the engine, so this method is
for those who want nothing else, or want them weighed beside other drafters' in a combination.
"""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.core.errors import ConfigError
from foredraft.drafters.interface import Capabilities, Draft, DraftRequest, StepResult

DEFAULT_DRAFT_LENGTH = 8


class GrammarDrafter:
    """Drafts tokens of which each is the only one that may follow: they are accepted for certain,
    and cost nothing to find.
    """

    def __init__(self, num_speculative_tokens: int = DEFAULT_DRAFT_LENGTH) -> None:
        """Raises ConfigError for a length below 1."""
        length = num_speculative_tokens
        if type(length) is not int or length < 1:
            raise ConfigError(
                f"num_speculative_tokens must be an integer of 1 or more, got {length!r}"
            )
        self.capabilities = Capabilities(num_speculative_tokens=length)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        return [_draft(request) for request in requests]

    def observe(self, results: Sequence[StepResult]) -> None:
        """Nothing to learn: the grammar says it all."""

    def release(self, request_id: str) -> None:
        """Nothing is kept by request."""


def _draft(request: DraftRequest) -> Draft:
    if request.matcher is None:
        return Draft()
    tokens = request.matcher.forced(request.max_nodes)
    return Draft.chain(tokens, confidence=[1.0] * len(tokens))
