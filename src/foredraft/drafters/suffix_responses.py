"""Past responses as a source of drafts, kept apart by salt and bounded.

Knows texts by request; knows no engine. Each salt has an index of its own, so that what one tenant
was told is neither proposed to another nor seen in another's speed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foredraft.drafters.suffix_draft import NOTHING, DraftLimits, Proposal
from foredraft.drafters.suffix_source import SuffixSource

Key = tuple[str, int]  # salt, number of the text in the salt's index


@dataclass(slots=True)
class _Response:
    """A text and where it stands in its request."""

    request_id: str
    start: int  # of the text, in the request's tokens
    length: int  # of the text


class ResponseCache:
    """The responses of `max_requests` requests, of `max_tokens` tokens together, at most; the least
    recently used ones go first. A response is used when it grows and when a draft comes from it.
    """

    def __init__(
        self,
        make_index: Callable[[], SuffixSource],
        max_requests: int,
        max_tokens: int,
        max_context: int,
    ) -> None:
        """`max_context`: tokens of a prompt that a response keeps before it, so that its beginning
        is found too; never proposed.
        """
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.max_context = max_context
        self.num_tokens = 0
        self._make_index = make_index
        self._indexes: dict[str, SuffixSource] = {}
        self._responses: OrderedDict[Key, _Response] = OrderedDict()  # the last used one last
        self._by_request: dict[str, Key] = {}

    @property
    def num_responses(self) -> int:
        """Responses kept, of all salts."""
        return len(self._responses)

    @property
    def num_bytes(self) -> int:
        """Memory of all indexes."""
        return sum(index.num_bytes for index in self._indexes.values())

    def begin(self, request_id: str, salt: str, tokens: Sequence[int], num_prompt: int) -> Key:
        """The text of a request's response, up to the end of `tokens` (prompt and output).

        A response that was begun before its request was preempted is gone on with.
        """
        key = self._by_request.get(request_id)
        if key is not None and key[0] == salt and self._continues(key, tokens):
            return key
        index = self._indexes.get(salt)
        if index is None:
            index = self._indexes[salt] = self._make_index()
        start = max(0, num_prompt - self.max_context)
        key = (salt, index.add_text(tokens[start:num_prompt]))
        self._responses[key] = _Response(request_id, start, num_prompt - start)
        self._by_request[request_id] = key
        self.num_tokens += num_prompt - start
        return key

    def extend(self, key: Key, tokens: Sequence[int]) -> bool:
        """Append to a response what its request's `tokens` have more; False if it is evicted."""
        response = self._responses.get(key)
        if response is None:
            return False
        end = response.start + response.length
        return self.append(key, end, tokens[end:])

    def append(self, key: Key, position: int, new: Sequence[int]) -> bool:
        """Append the tokens of a request from `position` on; False if its response is evicted.

        A response that does not end at `position` stays as it is.
        """
        response = self._responses.get(key)
        if response is None:
            return False
        if response.start + response.length == position:
            self._append(key, response, new)
        return key in self._responses

    def others(self, key: Key) -> SuffixSource | None:
        """The texts of the salt; None: all are evicted."""
        return self._indexes.get(key[0])

    def propose(
        self, key: Key, context: Sequence[int], limits: DraftLimits, estimates: Sequence[float]
    ) -> Proposal:
        """A draft from other responses of the salt than the one at `key`."""
        index = self._indexes.get(key[0])
        if index is None:  # all of the salt's are evicted
            return NOTHING
        return index.propose(context, limits, estimates, excluded=key[1])

    def use(self, salt: str, text: int) -> None:
        """A draft came from this text."""
        self._responses.move_to_end((salt, text))

    def check_integrity(self) -> None:
        """Raises RuntimeError if counts, texts and places contradict one another."""
        lengths = {key: r.length for key, r in self._responses.items()}
        held = sum(index.num_tokens for index in self._indexes.values())
        facts = {
            "the counted tokens": sum(lengths.values()) == self.num_tokens == held,
            "the lengths of its texts": all(
                len(self._indexes[salt].text(text)) == length
                for (salt, text), length in lengths.items()
            ),
            "its bounds": self.num_responses <= self.max_requests
            and self.num_tokens <= self.max_tokens,
            "no salt without a response": {salt for salt, _ in lengths} == set(self._indexes),
            "no request without a response": set(self._by_request.values()) <= set(lengths),
            "the places of its texts": all(i.is_consistent() for i in self._indexes.values()),
        }
        broken = [fact for fact, holds in facts.items() if not holds]
        if broken:
            raise RuntimeError(f"the cache of responses lacks: {'; '.join(broken)}")

    def _append(self, key: Key, response: _Response, new: Sequence[int]) -> None:
        self._responses.move_to_end(key)
        if new:
            self._indexes[key[0]].extend(key[1], new)
            response.length += len(new)
            self.num_tokens += len(new)
        while len(self._responses) > self.max_requests or self.num_tokens > self.max_tokens:
            self._evict()

    def _evict(self) -> None:
        key, response = self._responses.popitem(last=False)
        salt, text = key
        self._indexes[salt].remove(text)
        self.num_tokens -= response.length
        if self._by_request.get(response.request_id) == key:
            del self._by_request[response.request_id]
        if not self._indexes[salt].num_tokens and all(s != salt for s, _ in self._responses):
            del self._indexes[salt]

    def _continues(self, key: Key, tokens: Sequence[int]) -> bool:
        response = self._responses[key]
        known = self._indexes[key[0]].text(key[1])
        return list(tokens[response.start : response.start + response.length]) == known
