"""The lookahead drafter alone: its window's places, its pool, its tree, and what few nodes do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.core.errors import ConfigError
from foredraft.core.trees import topology
from foredraft.drafters.interface import Drafter, DraftRequest, StepResult, StepRow
from foredraft.drafters.lookahead import MAX_KEYS, LookaheadDrafter, NgramPool, trie
from foredraft.testing.requests import draft_request

V = 1000


class Successor:
    """A target that always says the next number, round and round, so that right guesses are
    known.
    """

    def __init__(self, drafter: LookaheadDrafter, prompt: list[int], turn: int = V) -> None:
        self.drafter = drafter
        self.turn = turn
        self.tokens = list(prompt)
        self.depths: list[tuple[int, ...]] = []

    def request(self, max_nodes: int) -> DraftRequest:
        return draft_request(self.tokens, vocab_size=V, max_nodes=max_nodes, name="r")

    def step(self, max_nodes: int):
        """One step of the engine; the draft."""
        (draft,) = self.drafter.propose([self.request(max_nodes)])
        tree = topology(tuple(draft.parents))
        verify = draft.verify or [True] * len(draft.tokens)
        node, path = -1, []
        while True:
            right = [
                child
                for child in tree.children(node)
                if verify[child]
                and draft.tokens[child] == (self.tokens[-1] + len(path) + 1) % self.turn
            ]
            if not right:
                break
            node = right[0]
            path.append(node)
        self.finish(draft, path, len(path) + 1)
        return draft

    def finish(self, draft, path, emitted):
        root = len(self.tokens) - 1
        tree = topology(tuple(draft.parents))
        rows = [StepRow(root, -1, self.tokens[-1], True, ((self.tokens[-1] + 1) % self.turn,))]
        rows += [
            StepRow(root + tree.depths[node], node, token, node in path, ((token + 1) % self.turn,))
            for node, token in enumerate(draft.tokens)
        ]
        self.tokens += [(self.tokens[-1] + 1 + i) % self.turn for i in range(emitted)]
        self.drafter.observe([StepResult("r", rows, len(path), self.tokens[-1])])


def own(draft):
    return [i for i, each in enumerate(draft.verify or ()) if not each]


def test_a_window_is_a_chain_of_first_tokens_with_a_chain_under_each():
    drafter = LookaheadDrafter(lookahead_window=3, lookahead_ngram=4, lookahead_guesses=2)
    assert isinstance(drafter, Drafter)
    assert drafter.capabilities.num_speculative_tokens == (3 + 2) * 3
    target = Successor(drafter, [500, 400, 300, 200, 100])
    sizes = [len(own(target.step(15))) for _ in range(4)]
    assert sizes == [3, 6, 9, 9]  # columns grow by a token a step, to N - 1
    draft = target.step(15)
    rows = own(draft)
    first = rows[0]
    parents = [draft.parents[row] for row in rows]
    assert parents == [-1, first, first + 1, first, first + 3, first + 4, first + 3, first + 6,
                       first + 7]  # fmt: skip
    assert all(confidence == 0.0 for confidence in draft.confidence[first:])


def test_columns_become_ngrams_that_the_target_says_and_are_verified_when_their_turn_comes():
    drafter = LookaheadDrafter(lookahead_window=4, lookahead_ngram=4, lookahead_guesses=2)
    target = Successor(drafter, [7, 8, 9], turn=10)
    drafted = []
    for _ in range(30):
        draft = target.step(18)
        drafted.append(len(draft.tokens) - len(own(draft)))
    assert max(drafted) >= 3
    assert len(target.tokens) > 3 + 2 * 30  # at one token a step there would be 33


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_columns_keep_their_places_as_the_text_goes_on(steps):
    """A right guess of the token i + 1 places ahead stays one, whatever was emitted meanwhile."""
    drafter = LookaheadDrafter(lookahead_window=8, lookahead_ngram=3, lookahead_guesses=1)
    target = Successor(drafter, [100] * 40)
    target.step(18)
    for _ in range(steps):
        target.finish(drafter.propose([target.request(18)])[0], [], 1)
    # From here on every column is right: it holds what comes i + 1 places after the last token.
    state = drafter._states["r"]
    last = target.tokens[-1]
    state._columns = [[last + 1 + i + j for j in range(state._length)] for i in range(8)]
    for emitted in (1, 3, 0, 2):
        (draft,) = drafter.propose([target.request(18)])
        columns = len(state._asked.columns)
        if emitted:
            target.finish(draft, list(range(emitted - 1)), emitted)
        last = target.tokens[-1]
        kept = state._columns[: columns - emitted]
        for i, column in enumerate(kept[:3]):
            assert column == [last + 1 + i + j for j in range(len(column))]


def test_where_nodes_are_few_guesses_go_first_then_the_window_shrinks_or_is_left_out():
    drafter = LookaheadDrafter(lookahead_window=3, lookahead_ngram=3, lookahead_guesses=2)
    target = Successor(drafter, [7, 8, 9])
    for _ in range(6):
        target.step(10)
    state = drafter._states["r"]
    last = target.tokens[-1]
    state.pool.add([last, last + 5, last + 6])
    state.pool.add([last, last + 7, last + 8])
    for room in range(11):
        (draft,) = drafter.propose([target.request(room)])
        assert len(draft.tokens) <= room
        guesses, rows = len(draft.tokens) - len(own(draft)), len(own(draft))
        assert guesses == min(room, 4)
        assert rows == min(3, (room - guesses) // 2) * 2
    assert draft.tokens[:4] == [last + 7, last + 8, last + 5, last + 6]


def test_a_window_that_was_left_out_or_cut_short_goes_on_later():
    drafter = LookaheadDrafter(lookahead_window=4, lookahead_ngram=4, lookahead_guesses=2)
    target = Successor(drafter, [7, 8, 9])
    for room in [18, 18, 18, 2, 0, 0, 5, 3, 18, 1, 18, 18, 7, 18] * 3:
        if room:
            assert len(target.step(room).tokens) <= room
        else:  # a step that was not drafted for
            target.finish(drafter.propose([target.request(0)])[0], [], 1)
    assert len(drafter._states["r"]._columns) <= 4
    drafter.release("r")
    assert not drafter._states
    assert len(own(target.step(18))) == 4  # it begins anew


def test_rows_that_never_came_back_are_not_learned_from():
    """A step that failed is drafted for again; a row of another token is nobody's."""
    drafter = LookaheadDrafter(lookahead_window=2, lookahead_ngram=2, lookahead_guesses=2)
    target = Successor(drafter, [7, 8, 9])
    drafter.propose([target.request(4)])  # that step failed
    draft = target.step(4)
    assert len(own(draft)) == 2
    (draft,) = drafter.propose([target.request(4)])
    rows = [StepRow(5, node, 999, False, (1,)) for node in range(len(draft.tokens))]
    known = len(drafter._states["r"].pool)
    drafter.observe([StepResult("r", rows, 0, 1)])
    assert len(drafter._states["r"].pool) == known


def test_a_step_reads_a_few_tokens_of_a_long_text():
    """Fault 60: nothing depends on the length of the context."""

    class Counting(list):
        read = 0

        def __getitem__(self, at):
            found = super().__getitem__(at)
            self.read += len(found) if isinstance(at, slice) else 1
            return found

        def __iter__(self):
            raise AssertionError("the whole text was read")

    drafter = LookaheadDrafter(lookahead_window=4, lookahead_ngram=4)
    target = Successor(drafter, [7, 8, 9])
    target.step(18)
    request = target.request(18)._replace(tokens=Counting(range(50_000)))
    drafter.propose([request])
    assert 0 < request.tokens.read <= 1 + 4 * 3


def test_a_pool_keeps_the_newest_of_a_token_and_is_bounded():
    pool = NgramPool(2)
    for rest in ((1, 2), (3, 4), (5, 6), (3, 4)):
        pool.add((9, *rest))
    assert pool.after(9) == [(3, 4), (5, 6)]
    assert pool.after(8) == ()
    for token in range(MAX_KEYS + 50):
        pool.add((token, 1))
    assert len(pool) == MAX_KEYS
    assert pool.after(49) == ()
    assert pool.after(MAX_KEYS) == [(1,)]


@settings(max_examples=100)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=5), st.integers(0, 12)
)
def test_a_trie_holds_its_paths_and_no_siblings_alike(paths, most):
    tokens, parents = trie(paths, most)
    assert len(tokens) <= most
    tree = topology(tuple(parents))
    assert len(set(zip(parents, tokens, strict=True))) == len(tokens)
    ways = {tuple(tokens[node] for node in tree.path(end)) for end in range(len(tokens))}
    prefixes = {tuple(path[: i + 1]) for path in paths for i in range(len(path))}
    assert ways <= prefixes
    if len(prefixes) <= most:
        assert ways == prefixes


@pytest.mark.parametrize(
    ("key", "value", "valid"),
    [
        ("lookahead_window", 0, "1..64"),
        ("lookahead_ngram", 1, "2..16"),
        ("lookahead_ngram", 2.0, "2..16"),
        ("lookahead_guesses", True, "1..64"),
        ("lookahead_guesses", 65, "1..64"),
    ],
)
def test_options_out_of_range_are_named(key, value, valid):
    with pytest.raises(ConfigError, match=f"{key} must be an integer in {valid}, got {value}"):
        LookaheadDrafter(**{key: value})
