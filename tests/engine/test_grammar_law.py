"""Law 1 under a grammar: what is emitted follows the masked law of the target, whatever is cut from
drafts and put into them. Exactly, over all drafts and coins; and by counts through the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import LLM, SamplingParams, StructuredOutputs
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.engine import fitting
from foredraft.engine.drafting import CheckedDraft
from foredraft.grammar.compiler import GrammarCompiler
from foredraft.grammar.guide import Guide
from foredraft.testing import RepeatDrafter, SkewedDrafter, TreeDrafter, target_logits, tiny_model
from foredraft.testing.branches import Choices
from foredraft.testing.draft_sources import (
    DraftSource,
    WeightedDraft,
    drawn_chain,
    drawn_tree,
    fixed_draft,
    regular_tree,
)
from foredraft.testing.law import (
    exact_block,
    exact_rejection,
    largest_error,
    sample_and_match,
    sequence_law,
    target_sequence_law,
)
from foredraft.testing.siblings import without_replacement
from foredraft.testing.tables import random_law

from .test_law import chi_square

LETTERS = "abcd"
VOCAB, LENGTH = len(LETTERS), 4
EXACT = 1e-12
GRAMMARS = ["(ab|ba|cd*)+", "(abc|abd|[cd]a){2,}", "a[bc]+d[ab]+", "(a|b|c|d)+"]


class Source:
    control_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        return LETTERS[token_id].encode()

    def encode(self, text: str) -> list[int]:
        return [LETTERS.index(letter) for letter in text]


COMPILER = GrammarCompiler(Source(), VOCAB)
Law = Callable[[tuple[int, ...]], Tensor]


class Masked:
    """A random target under a grammar."""

    def __init__(self, seed: int, regex: str) -> None:
        self.matcher = COMPILER.compile(StructuredOutputs(regex=regex)).matcher(())
        self._guide = Guide(self.matcher)
        self._law = random_law(seed, VOCAB)

    def __call__(self, prefix: tuple[int, ...]) -> Tensor:
        law, mask = self._law(prefix), self._guide.mask(prefix)
        if mask is None:  # nobody comes by here
            return law
        masked = law * mask
        return masked / masked.sum()

    def fits(self, source: DraftSource, *, drawn: bool) -> DraftSource:
        """The drafts of `source`, fitted as the engine does."""
        request: Any = SimpleNamespace(sampler=SimpleNamespace(greedy=not drawn), coupled=False)

        def fit(choices: Choices) -> WeightedDraft:
            draft = source(choices)
            tokens = tuple(draft.tokens)
            probs = draft.probs
            laws = None if probs is None else torch.stack([probs[i] for i in range(len(tokens))])
            given = CheckedDraft(tokens, draft.tree, laws)
            room = len(tokens) + 1
            fitted = fitting._fit(given, request, Guide(self.matcher), room)
            assert len(fitted.tokens) <= room
            return WeightedDraft(1.0, fitted.tokens, fitted.probs, fitted.tree.parents)

        return fit


def error(rule: Any, target: Masked, source: DraftSource) -> float:
    law = sequence_law(rule, target, source, LENGTH)
    assert sum(law.values()) == pytest.approx(1.0, abs=EXACT)
    return largest_error(law, target_sequence_law(target, LENGTH))


DRAWN = {
    "chain": lambda q: drawn_chain(q, 3),
    "tree": lambda q: drawn_tree(regular_tree(2, 1), q, without_replacement),
}


@pytest.mark.parametrize("regex", GRAMMARS)
@pytest.mark.parametrize("shape", DRAWN)
def test_drawn_drafts_of_a_drafter_that_knows_no_grammar(regex: str, shape: str) -> None:
    for seed in range(2):
        target = Masked(seed, regex)
        source = target.fits(DRAWN[shape](random_law(seed + 100, VOCAB)), drawn=True)
        assert error(exact_rejection, target, source) < EXACT
        if shape == "chain":
            assert error(exact_block, target, source) < EXACT


@pytest.mark.parametrize("regex", GRAMMARS)
def test_drawn_drafts_of_a_drafter_that_knows_the_grammar(regex: str) -> None:
    for seed in range(2):
        target, draft = Masked(seed, regex), Masked(seed + 50, regex)
        source = target.fits(drawn_chain(draft, 3), drawn=True)
        assert error(exact_rejection, target, source) < EXACT
        assert error(exact_block, target, source) < EXACT


FIXED: list[tuple[Sequence[int], Sequence[int] | None]] = [
    ((), None),
    ((0, 1, 2), None),
    ((3, 3, 3), None),
    ((0, 2, 1, 1, 3), (-1, -1, 0, 0, 1)),
    ((2, 0, 3, 1), (-1, -1, -1, 1)),
]


@pytest.mark.parametrize("regex", GRAMMARS)
@pytest.mark.parametrize("rule", [exact_rejection, sample_and_match])
def test_fixed_drafts_with_what_is_forced_between(regex: str, rule: Any) -> None:
    for seed in range(2):
        target = Masked(seed, regex)
        for tokens, parents in FIXED:
            source = target.fits(fixed_draft(tokens, parents), drawn=False)
            assert error(rule, target, source) < EXACT


def test_a_drawn_token_that_is_dropped_for_its_own_value_shows() -> None:
    errors = []
    for seed in range(4):
        target = Masked(seed, GRAMMARS[0])
        chains = drawn_chain(random_law(seed + 7, VOCAB), 2)

        def dropped(
            choices: Choices, target: Masked = target, chains: DraftSource = chains
        ) -> WeightedDraft:
            draft = chains(choices)
            tokens = tuple(draft.tokens)
            count = next(n for n in (2, 1, 0) if Guide(target.matcher).follows(tokens[:n]))
            probs = draft.probs
            assert probs is not None
            laws = torch.stack([probs[i] for i in range(count)]) if count else None
            return WeightedDraft(1.0, tokens[:count], laws, tuple(range(-1, count - 1)))

        errors.append(error(exact_rejection, target, dropped))
    assert max(errors) > 1e-3


# Through the engine: three letters of four, EOS among the ids.
MODEL_VOCAB, PROMPT = 6, [3, 4, 2]
CHOICES = ["ab", "abca", "ba", "cab", "cabab", "c"]


@pytest.fixture(scope="module")
def small():
    return tiny_model(seed=3, vocab_size=MODEL_VOCAB, sharpness=0.7)


def answers_law(model, temperature: float) -> dict[str, float]:
    """P of each choice: its letters, and the end where a longer one begins alike."""
    logits = target_logits(model)
    found: dict[str, float] = {}

    def walk(said: str, probability: float) -> None:
        ways = {c[len(said)] for c in CHOICES if c.startswith(said) and c != said}
        ids = {model.tokenizer.encode(way)[0]: way for way in sorted(ways)}
        if said in CHOICES:
            ids[1] = ""
        if set(ids) == {1}:
            found[said] = probability
            return
        row = logits((*PROMPT, *model.tokenizer.encode(said))) / temperature
        law = torch.softmax(row[list(ids)], dim=0).tolist()
        for (token, way), p in zip(ids.items(), law, strict=True):
            if token == 1:
                found[said] = probability * p
            else:
                walk(said + way, probability * p)

    walk("", 1.0)
    return found


def skewed(context) -> Tensor:
    weights = torch.arange(1, MODEL_VOCAB + 1, dtype=torch.float64).roll(int(context[-1]))
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("drawn", "standard"),
        ("drawn", "block"),
        ("own", "standard"),
        ("own", "coupled"),
        ("chain", None),
        ("tree", "standard"),
        ("tree", "coupled"),
    ],
)
def test_answers_follow_the_enumerated_law(small, name, rule):
    drafter = {
        "drawn": lambda: SkewedDrafter(skewed),
        "own": lambda: DraftModelDrafter(tiny_model(seed=8, vocab_size=MODEL_VOCAB), small),
        "chain": lambda: RepeatDrafter(3),
        "tree": lambda: TreeDrafter(RepeatDrafter(3), RepeatDrafter(5), RepeatDrafter(4)),
    }[name]()
    config = {"num_speculative_tokens": 3, "rejection_sample_method": rule}
    sizes = {"max_num_seqs": 128, "max_num_batched_tokens": 512, "page_size": 8}
    llm = LLM(small, drafter=drafter, speculative_config=config, seed=2024, **sizes)
    params = SamplingParams(
        temperature=0.8, max_tokens=9, structured_outputs=StructuredOutputs(choice=CHOICES)
    )
    law = answers_law(small, 0.8)
    assert sum(law.values()) == pytest.approx(1.0)
    texts = [output.text for output in llm.generate([PROMPT] * 800, params)]
    assert set(texts) <= set(CHOICES)
    counts = [texts.count(choice) for choice in CHOICES]
    assert chi_square(counts, [law[choice] for choice in CHOICES]) >= 1e-3
