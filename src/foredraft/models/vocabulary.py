"""Whether two models speak the same vocabulary: the same tokens under the same ids.

Knows two loaded models; knows no drafter. The padding of embeddings is no part of a vocabulary.
"""

from __future__ import annotations

from foredraft.core.errors import ConfigError
from foredraft.models.load import LoadedModel


def check_same_vocabulary(target: LoadedModel, draft: LoadedModel) -> None:
    """Raise ConfigError, with both sizes and the first differing id, unless they are the same."""
    theirs, own = target.tokenizer.vocabulary, draft.tokenizer.vocabulary
    if theirs == own:
        return
    by_id, own_by_id = ({i: token for token, i in each.items()} for each in (theirs, own))
    first = min(i for i in by_id.keys() | own_by_id.keys() if by_id.get(i) != own_by_id.get(i))
    raise ConfigError(
        f"draft model {draft.name} has another vocabulary than {target.name}: {len(own)} tokens, "
        f"the target {len(theirs)}; the first that differs is id {first}: "
        f"{_quoted(own_by_id.get(first))}, the target's {_quoted(by_id.get(first))}"
    )


def _quoted(token: str | None) -> str:
    return "no token" if token is None else repr(token)
