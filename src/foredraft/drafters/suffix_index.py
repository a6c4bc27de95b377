"""Where the last tokens of a sequence were seen before, and what followed them there.

Knows texts of token ids; knows no request and no draft. What a suffix tree of capped depth counts
is read here from lists of places, one for each short n-gram: a token costs the same few entries in
any text, a text is taken out entry by entry, and the newest places are counted first.
native/suffix.cpp is the same index in C++; this one is its oracle, and runs where there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from sys import getsizeof
from typing import NamedTuple

# Places are kept for n-grams of these lengths: a long match is found through the longest that it
# holds, so that a context which is rare at 8 tokens is not lost among thousands at 1.
GRAM_LENGTHS = (1, 2, 4, 8)


class Occurrence(NamedTuple):
    """A place where the last `match` tokens of a context stand: before `position` of `text`."""

    match: int
    text: int
    position: int


class SuffixIndex:
    """Texts that grow at their ends and may be taken out, and the places of their n-grams.

    A place is entered when its next token is there, so that the end of a text never finds itself.
    """

    def __init__(self, max_depth: int, max_occurrences: int) -> None:
        """Matches are followed up to `max_depth` tokens; at most `max_occurrences` places are
        visited for each n-gram length, the newest.
        """
        self.max_depth = max_depth
        self.max_occurrences = max_occurrences
        self.lengths = tuple(n for n in GRAM_LENGTHS if n <= max_depth)
        self._texts: dict[int, list[int]] = {}
        self._skipped: dict[int, int] = {}
        self._places: list[dict[tuple[int, ...], dict[tuple[int, int], None]]] = [
            {} for _ in self.lengths
        ]
        self._next_text = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(map(len, self._texts.values()))

    @property
    def num_bytes(self) -> int:
        """Memory of texts and places, without the integers themselves."""
        total = sum(map(getsizeof, self._texts.values()))
        for places in self._places:
            total += getsizeof(places)
            for gram, entries in places.items():
                total += getsizeof(gram) + getsizeof(entries)
                total += sum(map(getsizeof, entries))
        return total

    def add_text(self, context: Sequence[int] = ()) -> int:
        """Begin a text after `context`: tokens to be matched, but never proposed. Its number."""
        number, self._next_text = self._next_text, self._next_text + 1
        self._texts[number] = list(context)
        self._skipped[number] = len(context)
        return number

    def text(self, number: int) -> list[int]:
        """The tokens of a text, its context first."""
        return list(self._texts[number])

    def extend(self, number: int, tokens: Iterable[int]) -> None:
        """Append to a text."""
        text = self._texts[number]
        first = len(text)
        text.extend(tokens)
        for position in range(first, len(text)):
            for n, places in zip(self.lengths, self._places, strict=True):
                if n <= position:
                    gram = tuple(text[position - n : position])
                    places.setdefault(gram, {})[number, position] = None

    def remove(self, number: int) -> None:
        """Take a text and all its places out."""
        text = self._texts.pop(number)
        for position in range(self._skipped.pop(number), len(text)):
            for n, places in zip(self.lengths, self._places, strict=True):
                if n <= position:
                    gram = tuple(text[position - n : position])
                    entries = places[gram]
                    del entries[number, position]
                    if not entries:
                        del places[gram]

    def occurrences(self, context: Sequence[int], excluded: int | None = None) -> list[Occurrence]:
        """Places that end like `context`: the longest matches first, of equal ones the newest.

        None of the text `excluded`. Matches of `n` to twice `n` tokens are among the newest places
        of an n-gram; longer ones were found through a longer n-gram.
        """
        found: list[Occurrence] = []
        longer = self.max_depth + 1
        for n, places in zip(reversed(self.lengths), reversed(self._places), strict=True):
            if n > len(context):
                continue
            entries = places.get(tuple(context[len(context) - n :]), {})
            of_length = []
            for (number, position), _ in zip(
                reversed(entries), range(self.max_occurrences), strict=False
            ):
                match = self._match(self._texts[number], position, context)
                if match < longer and number != excluded:
                    of_length.append(Occurrence(match, number, position))
            of_length.sort(key=lambda place: -place.match)  # stable: the newest stay first
            found += of_length
            longer = n
        return found

    def token(self, place: Occurrence, ahead: int) -> int | None:
        """The token `ahead` places after an occurrence; None beyond the end of its text."""
        text = self._texts[place.text]
        at = place.position + ahead
        return text[at] if at < len(text) else None

    def length(self, number: int) -> int:
        """Tokens of a text, its context included."""
        return len(self._texts[number])

    def is_consistent(self) -> bool:
        """Whether the places are exactly those of the texts."""
        wanted: list[set[tuple[tuple[int, ...], tuple[int, int]]]] = [set() for _ in self.lengths]
        for number, text in self._texts.items():
            for position in range(self._skipped[number], len(text)):
                for n, entries in zip(self.lengths, wanted, strict=True):
                    if n <= position:
                        entries.add((tuple(text[position - n : position]), (number, position)))
        held = [
            {(gram, place) for gram, entries in places.items() for place in entries}
            for places in self._places
        ]
        return held == wanted

    def _match(self, text: list[int], position: int, context: Sequence[int]) -> int:
        most = min(self.max_depth, position, len(context))
        match = 0
        while match < most and text[position - 1 - match] == context[len(context) - 1 - match]:
            match += 1
        return match
