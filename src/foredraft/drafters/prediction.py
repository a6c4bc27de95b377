"""Fixed prediction: the output that the client expects is the draft, as far as the output keeps to
it.

Knows token ids, the prediction of each request and where the output has got to in it; knows no
model, text or probability. The draft is deterministic, so that it is exact under every acceptance
rule.

Source: OpenAI's "Predicted Outputs" name the request's field; how it is followed is described in
docs/drafters/prediction.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from foredraft.core.errors import ConfigError
from foredraft.drafters.interface import Capabilities, Draft, DraftRequest, StepResult
from foredraft.drafters.ngram import DEFAULT_DRAFT_LENGTH, LATEST, NgramDrafter
from foredraft.drafters.track_record import TrackRecord

DEFAULT_REJOIN = 1  # LOG.md, "Fixed predictions"
MAX_REJOIN = 64
LONGEST_COMPARED = 32  # tokens before a place that are compared to choose among places
MAX_PLACES = 32  # of equal n-grams, those nearest to where the output left the prediction
NGRAM, NONE = "ngram", "none"
FALLBACKS = (NGRAM, NONE)
# What is believed of a draft token before anything is counted, by how many tokens in a row the
# output shares with the prediction up to it; the last for all above.
BELIEVED = (0.6, 0.75, 0.82, 0.87, 0.9, 0.92, 0.94, 0.95)


class PredictionDrafter:
    """Drafts what the prediction says next; where the output has left it, what `fallback` says."""

    def __init__(
        self,
        num_speculative_tokens: int = DEFAULT_DRAFT_LENGTH,
        prediction_rejoin: int = DEFAULT_REJOIN,
        prediction_fallback: str = NGRAM,
        prompt_lookup_min: int | None = None,
        prompt_lookup_max: int | None = None,
        prompt_lookup_match: str = LATEST,
    ) -> None:
        """`prediction_rejoin`: tokens in a row that the output must share with the prediction to be
        followed again after it has left it. `prediction_fallback`: "ngram", with the options of
        that method, or "none".

        Raises ConfigError for a value out of range, naming it.
        """
        rejoin = prediction_rejoin
        if isinstance(rejoin, bool) or not isinstance(rejoin, int) or not 1 <= rejoin <= MAX_REJOIN:
            raise ConfigError(
                f"prediction_rejoin must be an integer in 1..{MAX_REJOIN}, got {rejoin!r}"
            )
        if prediction_fallback not in FALLBACKS:
            raise ConfigError(
                f"prediction_fallback must be one of {', '.join(FALLBACKS)}, "
                f"got {prediction_fallback!r}"
            )
        ngram = NgramDrafter(
            num_speculative_tokens, prompt_lookup_min, prompt_lookup_max, prompt_lookup_match
        )
        self._fallback = ngram if prediction_fallback == NGRAM else None
        self.capabilities = Capabilities(
            num_speculative_tokens=num_speculative_tokens, prediction=True
        )
        self._rejoin = rejoin
        self._alignments: dict[str, Alignment] = {}
        self._record = TrackRecord()

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        return [self._draft(request) for request in requests]

    def observe(self, results: Sequence[StepResult]) -> None:
        """Learn how sure a draft is; its tokens come from those that `propose` reads."""
        self._record.observe(results)
        if self._fallback is not None:
            self._fallback.observe(results)

    def release(self, request_id: str) -> None:
        self._alignments.pop(request_id, None)
        self._record.forget(request_id)
        if self._fallback is not None:
            self._fallback.release(request_id)

    def _draft(self, request: DraftRequest) -> Draft:
        if request.prediction:
            alignment = self._alignments.get(request.id)
            if alignment is None:
                alignment = Alignment(request.prediction, self._rejoin)
                self._alignments[request.id] = alignment
            alignment.follow(request.tokens[request.num_prompt_tokens + alignment.num_followed :])
            predicted = alignment.ahead(request.max_nodes)
            if predicted:
                return self._followed(request, predicted, alignment.num_in_a_row)
        return Draft() if self._fallback is None else self._fallback.propose([request])[0]

    def _followed(self, request: DraftRequest, predicted: Sequence[int], in_a_row: int) -> Draft:
        """A chain; kinds: tokens in a row that agree when a token is reached."""
        last = len(BELIEVED) - 1
        kinds = [min(in_a_row + i, last) for i in range(len(predicted))]
        confidence = [self._record.value(kind, BELIEVED[kind]) for kind in kinds]
        draft = Draft.chain(predicted, confidence=confidence)
        self._record.expect(request.id, draft.tokens, draft.parents, kinds)
        return draft


class Alignment:
    """Where a growing output stands in a prediction.

    It stands at the start; each token that the prediction has there moves it on by one. Any other
    token leaves the prediction, and the output rejoins it where its last `rejoin` tokens occur: at
    the place with the most tokens before it in common; of equals one behind where it left goes
    before an earlier one, and a nearer one before a farther one.
    """

    def __init__(self, prediction: Sequence[int], rejoin: int) -> None:
        self.prediction = tuple(prediction)
        self.rejoin = rejoin
        self.next: int | None = 0  # index of the token expected next; None: it has left
        self.num_in_a_row = 0  # output tokens that agree, since it last left
        self._left_at = 0
        self._output: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}  # n-gram -> indexes after it
        for end in range(rejoin, len(self.prediction) + 1):
            self._places.setdefault(self.prediction[end - rejoin : end], []).append(end)

    @property
    def num_followed(self) -> int:
        """Output tokens taken in."""
        return len(self._output)

    def follow(self, tokens: Sequence[int]) -> None:
        """Take in the output's next tokens."""
        for token in tokens:
            self._output.append(token)
            at = self.next
            if at is not None and at < len(self.prediction) and self.prediction[at] == token:
                self.next = at + 1
                self.num_in_a_row += 1
                continue
            if at is not None:
                self._left_at = at
            self.next = self._rejoined()
            self.num_in_a_row = 0

    def ahead(self, limit: int) -> Sequence[int]:
        """At most `limit` tokens that the prediction says next; none where the output has left."""
        return () if self.next is None else self.prediction[self.next : self.next + limit]

    def _rejoined(self) -> int | None:
        if len(self._output) < self.rejoin:
            return None
        places = self._places.get(tuple(self._output[-self.rejoin :]), [])
        nearest = bisect_left(places, self._left_at)
        near = places[max(0, nearest - MAX_PLACES // 2) : nearest + MAX_PLACES // 2]
        return max(near, key=self._merit, default=None)

    def _merit(self, place: int) -> tuple[int, bool, int]:
        ahead = place - self._left_at
        return self._in_common(place), ahead >= 0, -abs(ahead)

    def _in_common(self, place: int) -> int:
        """Tokens before `place` that end the output too, as far as it is looked."""
        most = min(place, len(self._output), LONGEST_COMPARED)
        for count in range(most):
            if self.prediction[place - 1 - count] != self._output[-1 - count]:
                return count
        return most
