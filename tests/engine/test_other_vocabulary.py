"""Draft models of other vocabularies: the same tokens under other ids, few tokens in common, and
none but the text.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer as Backend

from foredraft import LLM, ConfigError, SamplingParams
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.models.decoder import cache_shape
from foredraft.models.tokenizer import Tokenizer
from foredraft.models.vocabulary import OtherVocabulary, SharedVocabulary
from foredraft.testing.drafters import RecordingDrafter
from foredraft.testing.models import (
    EOS_ID,
    SPECIAL_TOKENS,
    assemble,
    random_weights,
    target_logits,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)

from .conftest import GREEDY, PROMPTS, SEEDED
from .test_draft_model_trees import asked, drafted
from .test_law import LENGTH, PROMPT, VOCAB, chi_square, enumerate_law
from .test_rules import SAMPLED, small, speculating
from .test_trees import PROCESSORS

__all__ = ["small"]  # a fixture

BOTH = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "coupled"])
EACH = pytest.mark.parametrize("way", ["shared", "text"])


def ids(outputs):
    return [list(output.token_ids) for output in outputs]


def permutation(size, seed=0):
    """Where each id goes; BOS and EOS stay."""
    others = list(range(2, size))
    random.Random(seed).shuffle(others)
    return [0, 1, *others]


def renamed(size, places, strange=0):
    """The tiny tokenizer with ids in other `places`; the last `strange` tokens are ones of its
    own.
    """
    state = json.loads(tiny_tokenizer(size)._backend.to_str())
    vocabulary = state["model"]["vocab"]
    for number in range(strange):
        token = next(token for token, i in vocabulary.items() if i == size - 1 - number)
        vocabulary[chr(0x3041 + number)] = vocabulary.pop(token)
    state["model"]["vocab"] = {token: places[i] for token, i in vocabulary.items()}
    backend = Backend.from_str(json.dumps(state))
    return Tokenizer(backend, special_tokens=SPECIAL_TOKENS, eos_ids=(EOS_ID,))


def twin(size, places, seed=1, strange=0):
    """`tiny_model(seed)` under other ids."""
    config = tiny_config(vocab_size=size)
    weights = random_weights(config, seed)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        moved = torch.empty_like(weights[name])
        moved[torch.tensor(places)] = weights[name]
        weights[name] = moved
    made = assemble(config, weights, "twin", "reference", "float64", "cpu", None)
    return replace(made, tokenizer=renamed(size, places, strange))


@pytest.fixture(scope="module")
def target():
    return tiny_model(seed=1, vocab_size=32)


def llm_of(target, draft, way, width=4, **options):
    own = {key: options.pop(key) for key in ("draft_tree",) if key in options}
    config = {"method": "draft_model", "model": draft, "draft_vocabulary": way, **own}
    config["num_speculative_tokens"] = width
    return LLM(target, speculative_config=config, **({"seed": 5, "page_size": 4} | options))


@EACH
def test_the_target_under_other_ids_is_always_right(target, way):
    """A vocabulary of equal size with other ids, which is refused unless it is said."""
    draft = twin(32, permutation(32))
    params = replace(GREEDY, max_tokens=60)
    llm = llm_of(target, draft, way)
    for output in llm.generate(PROMPTS[:3], params):
        assert output.metrics.speculative_decoding.draft_acceptance_rate == 1.0
    assert not llm.drafter._computed
    with pytest.raises(ConfigError, match="has another vocabulary than"):
        llm_of(target, draft, "same")


def test_the_targets_noise_is_shared_under_other_ids(target):
    llm = llm_of(target, twin(32, permutation(32)), "shared")
    for output in llm.generate(PROMPTS[:3], SEEDED):
        assert output.metrics.speculative_decoding.draft_acceptance_rate == 1.0


@EACH
@BOTH
@pytest.mark.parametrize("size", [24, 40])
def test_few_tokens_in_common_change_nothing(target, plain, way, params, size):
    """Of another size, a third of its tokens strange; in few pages, under penalties."""
    draft = twin(size, permutation(size, 3), seed=6, strange=size // 3)
    params = replace(params, **PROCESSORS["penalties"])
    shapes = [cache_shape(m.config, m.cache_dtype) for m in (target, draft)]
    room = 14 * 4 * sum(shape.bytes_per_position for shape in shapes)
    llm = llm_of(target, draft, way, kv_cache_gib=room / 2**30, prefill_chunk_size=3)
    outputs = llm.generate(PROMPTS, params)
    assert ids(outputs) == plain(params)
    assert sum(o.metrics.speculative_decoding.num_draft_tokens for o in outputs) > 0
    assert llm.engine.pool.num_used == 0


@BOTH
def test_trees_of_shared_tokens_change_nothing(target, plain, params):
    draft = twin(32, permutation(32), seed=6, strange=10)
    for tree in ("top_k", "sampled"):
        llm = llm_of(target, draft, "shared", 6, draft_tree=tree)
        assert ids(llm.generate(PROMPTS[:3], params)) == plain(params, PROMPTS[:3])


def test_only_shared_tokens_are_drafted_and_their_law_is_true(target):
    """Reported fault 68: 70% in common, and never an id outside of that; the law is the draft
    model's own, given that the token is shared.
    """
    draft = twin(32, permutation(32), seed=6, strange=10)
    vocabulary = SharedVocabulary(target, draft)
    assert len(vocabulary.own_ids) == 22
    drafter = DraftModelDrafter(draft, target, draft_vocabulary="shared")
    logits = target_logits(draft)
    for seed in range(40):
        params = SamplingParams(temperature=1.5)
        request = asked(target, (3, 4, 5), sampling=params, seed=seed)
        made = drafted(drafter, request)
        assert set(made.tokens) <= vocabulary.own_ids.keys()
        context = [vocabulary.read(token) for token in (3, 4, 5)]
        law = torch.zeros(32, dtype=torch.float64)
        for token, own in vocabulary.own_ids.items():
            law[token] = torch.exp(logits(tuple(context))[own] / 1.5)
        torch.testing.assert_close(made.probs[0], law / law.sum())


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_the_law_is_the_targets(small, rule):
    places = permutation(VOCAB, 2)
    draft = twin(VOCAB, places, seed=8, strange=2)
    drafter = RecordingDrafter(DraftModelDrafter(draft, small, draft_vocabulary="shared"))
    llm = speculating(small, drafter, rule, width=2)
    observed = [0] * VOCAB**LENGTH
    for output in llm.generate([PROMPT] * 500, SAMPLED):
        observed[sum(t * VOCAB**i for i, t in enumerate(reversed(output.token_ids)))] += 1
    assert chi_square(observed, enumerate_law(small, 0.8)) >= 1e-3
    assert all(token < VOCAB - 2 for each in drafter.drafts for token in each.tokens)


class WordsOf:
    """A tokenizer of whole words, as far as `OtherVocabulary` asks."""

    control_ids = frozenset({0})

    def __init__(self, *words):
        self.words = [b"<s>", *words]

    def token_bytes(self, token, skip_special_tokens=True):
        return b"" if skip_special_tokens and token in self.control_ids else self.words[token]

    def encode(self, text):
        """The longest word first."""
        raw, found = text.encode(), []
        while raw:
            fitting = [i for i, word in enumerate(self.words) if i and raw.startswith(word)]
            if not fitting:
                return found
            found.append(max(fitting, key=lambda i: len(self.words[i])))
            raw = raw[len(self.words[found[-1]]) :]
        return found


def respelling(target_words, draft_words):
    made = OtherVocabulary.__new__(OtherVocabulary)
    made._target, made._draft = WordsOf(*target_words), WordsOf(*draft_words)
    return made.respelled


def test_text_is_read_behind_what_is_known():
    respelled = respelling((b"a", b"b", b"ab", b"c"), (b"a", b"bc", b"b", "é".encode()[:1]))
    assert respelled([4], [1, 2]) == [3, 4]  # c | a bc -> ab c
    assert respelled([1], [3, 1]) == []  # a | b: the two are one token, so the past would change
    assert respelled([2], [1, 0, 2]) == [1], "nothing after a control token"
    assert respelled([1, 0, 2], [1]) == [1], "nor before one"
    assert respelled([4], [1, 4]) == [1], "nor half a character"
    assert respelled([4], []) == []
    assert respelled([4], [4, 1]) == []  # no UTF-8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_vocabulary": "any"}, "draft_vocabulary must be one of same, shared, text, got"),
        (
            {"draft_vocabulary": "text", "draft_tree": "top_k"},
            """draft_tree 'top_k' needs "draft_vocabulary": "same" or "shared\"""",
        ),
    ],
)
def test_mistakes_are_named(target, options, message):
    with pytest.raises(ConfigError, match=message):
        DraftModelDrafter(target, target, **options)
