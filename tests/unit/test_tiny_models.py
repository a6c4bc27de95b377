"""Tiny models: the same from the same seed, dependent on the context, loadable by others; pairs
that agree as much as they say.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from foredraft import LLM, SamplingParams
from foredraft.kernels.catalog import native_available
from foredraft.models.detokenizer import Detokenizer
from foredraft.models.load import load_model
from foredraft.testing.drafters import SelfDrafter
from foredraft.testing.models import (
    BOS_ID,
    EOS_ID,
    target_logits,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
    write_tiny_checkpoint,
)
from foredraft.testing.pairs import tiny_noisy_pair, tiny_pair

CONTEXT = (5, 9, 2, 7, 7, 11)


def test_a_model_is_a_function_of_its_seed() -> None:
    first, again, other = (target_logits(tiny_model(seed))(CONTEXT) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert first.shape == (32,)
    assert first.dtype == torch.float64


def test_logits_depend_on_every_token_before() -> None:
    logits = target_logits(tiny_model(vocab_size=16))
    for i in range(len(CONTEXT)):
        changed = (*CONTEXT[:i], (CONTEXT[i] + 1) % 16, *CONTEXT[i + 1 :])
        difference = (logits(changed) - logits(CONTEXT)).abs().max()
        assert difference > 1e-2, f"token {i} changes nothing"


def test_greedy_text_is_not_a_single_token() -> None:
    logits = target_logits(tiny_model())
    context = CONTEXT
    for _ in range(40):
        context = (*context, int(logits(context).argmax()))
    assert len(set(context[len(CONTEXT) :])) > 5


@pytest.mark.parametrize(("sharpness", "low", "high"), [(0.3, 0.0, 0.2), (6.0, 0.6, 1.0)])
def test_sharpness_moves_the_mass_of_the_likeliest_token(
    sharpness: float, low: float, high: float
) -> None:
    logits = target_logits(tiny_model(sharpness=sharpness))
    largest = [
        float(torch.softmax(logits((a, b)), dim=-1).max())
        for a, b in itertools.product(range(5), range(5))
    ]
    assert low < sum(largest) / len(largest) < high


@pytest.mark.parametrize("vocab_size", [3, 8, 32, 100, 300])
def test_every_id_is_a_character_of_its_own(vocab_size: int) -> None:
    tokenizer = tiny_tokenizer(vocab_size)
    assert tokenizer.vocab_size == vocab_size
    ids = list(range(vocab_size))
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    assert len(set(texts)) == vocab_size
    assert all(text.isprintable() for text in texts)
    assert texts[:2] == ["<s>", "</s>"]
    characters = "".join(texts[2:])
    assert len(characters) == vocab_size - 2
    assert tokenizer.encode(characters) == ids[2:]
    assert tokenizer.decode(ids) == characters
    assert tokenizer.token_text(2) == " "


def test_text_is_never_a_control_token_and_unknown_characters_are_spaces() -> None:
    tokenizer = tiny_tokenizer(32)
    assert not {BOS_ID, EOS_ID} & set(tokenizer.encode("a<s>b</s>"))
    assert tokenizer.encode("a!b") == tokenizer.encode("a b")
    assert tokenizer.encode_with_special("<s>a</s>") == [BOS_ID, 3, EOS_ID]
    assert tokenizer.eos_ids == (EOS_ID,)
    assert tokenizer.bos_id == BOS_ID


def test_a_conversation_becomes_ids() -> None:
    tokenizer = tiny_tokenizer(32)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>u hi</s><s>a "
    assert ids.count(BOS_ID) == 2


def test_streamed_text_is_the_decoded_text() -> None:
    tokenizer = tiny_tokenizer(100)
    ids = list(range(100))
    detokenizer = Detokenizer(tokenizer)
    streamed = "".join(detokenizer.push([i]) for i in ids) + detokenizer.finish()
    assert streamed == tokenizer.decode(ids)


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_is_the_model_for_us_and_for_transformers(tmp_path: Path, tied: bool) -> None:
    directory = write_tiny_checkpoint(
        tmp_path / "tiny", 3, dtype="float64", vocab_size=20, tie_word_embeddings=tied
    )
    whole = tiny_model(3, vocab_size=20, tie_word_embeddings=tied)
    expected = target_logits(whole)(CONTEXT)
    loaded = load_model(directory, dtype="float64", kernels="reference")
    assert loaded.config == whole.config
    assert torch.equal(target_logits(loaded)(CONTEXT), expected)
    assert loaded.tokenizer.encode("hello") == whole.tokenizer.encode("hello")
    assert loaded.tokenizer.chat_template == whole.tokenizer.chat_template
    assert tuple(loaded.eos_ids) == (EOS_ID,)
    theirs = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float64)
    with torch.no_grad():
        logits = theirs(torch.tensor([CONTEXT])).logits[0, -1]
    assert torch.allclose(logits, expected, atol=1e-5)
    assert AutoTokenizer.from_pretrained(directory).encode("hello") == [10, 7, 14, 14, 17]


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size must be 3 or more, got 2"):
        tiny_config(vocab_size=2)


PAIRS = [("reference", "float64"), ("reference", "bfloat16")]
if native_available():
    PAIRS += [("native", "float32"), ("native", "bfloat16")]


@pytest.mark.parametrize(("kernels", "dtype"), PAIRS)
def test_a_pairs_greedy_tokens_are_those_it_names(kernels: str, dtype: str) -> None:
    pair = tiny_pair(3, agreement=0.8, kernels=kernels, dtype=dtype)
    target, draft = target_logits(pair.target), target_logits(pair.draft)
    for token in range(42):
        for context in ((token,), (7, EOS_ID, 30, token)):
            assert int(target(context).argmax()) == pair.successors[token]
            assert int(draft(context).argmax()) == pair.draft_successors[token]
            for logits in (target(context), draft(context)):
                assert torch.softmax(logits.double(), -1)[[BOS_ID, EOS_ID]].max() == 0
    assert sorted(pair.continuation(2, 40)) == list(range(2, 42))
    agreeing = [a == b for a, b in zip(pair.successors, pair.draft_successors, strict=True)]
    assert sum(agreeing[2:]) == 32


@pytest.mark.parametrize("agreement", [0.0, 0.4, 0.9, 1.0])
@pytest.mark.parametrize("k", [1, 4])
def test_a_pairs_expected_acceptance_is_that_of_its_walk(agreement: float, k: int) -> None:
    pair = tiny_pair(5, agreement=agreement)
    # Any start: what comes before the first difference is less than a turn of the 40 tokens.
    accepted = pair.accepted_by_step(9, k, 4000)
    by_position = [sum(count > i for count in accepted) / 4000 for i in range(k)]
    assert pair.expected_acceptance_by_position(k) == pytest.approx(by_position, abs=0.02)
    tau = pair.mean_acceptance_length(k)
    assert tau == pytest.approx(1 + sum(pair.expected_acceptance_by_position(k)))
    assert 1 + k * (agreement == 1) <= tau <= 1 + k * (agreement > 0)


def test_an_engine_accepts_what_the_pair_says() -> None:
    pair = tiny_pair(7, agreement=0.75)
    accepted = pair.accepted_by_step(11, 3, 60)
    assert accepted[-1] > 0  # the engine would not draft for a last token alone
    length = sum(accepted) + len(accepted)
    drafter = SelfDrafter(target_logits(pair.draft))
    llm = LLM(pair.target, drafter=drafter, speculative_config={"num_speculative_tokens": 3})
    params = SamplingParams(temperature=0, max_tokens=length)
    output = llm.generate([[8, 4, 11]], params)[0]
    assert list(output.token_ids) == pair.continuation(11, length)
    counts = output.metrics.speculative_decoding
    assert list(counts.acceptance_histogram) == [accepted.count(j) for j in range(4)]


def test_a_draft_model_may_have_sizes_of_its_own() -> None:
    pair = tiny_pair(draft_layers=3, draft_max_positions=50, vocab_size=12, agreement=0.5)
    assert (pair.draft.config.num_layers, pair.target.config.num_layers) == (3, 2)
    assert pair.draft.config.max_position_embeddings == 50
    assert pair.draft.tokenizer.encode("hello") == pair.target.tokenizer.encode("hello")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"agreement": 0.81}, "agreement is 0.81; expected a multiple of 1/40"),
        ({"agreement": 1.5}, "0 to 1"),
        ({"agreement": 0.975}, "expected none or at least two of 40 off"),
        ({"hidden_size": 4}, "hidden_size is 4; 42 ids need 7"),
    ],
)
def test_a_pair_that_cannot_be_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tiny_pair(**arguments)


def test_noise_moves_a_draft_away_from_its_target() -> None:
    contexts = [(a, b, 4) for a in range(2, 32, 3) for b in range(2, 32, 3)]
    agreement, overlap = [], []
    for noise in (0.0, 0.1, 1.0):
        target, draft = map(target_logits, tiny_noisy_pair(1, noise=noise))
        laws = [(target(each).softmax(-1), draft(each).softmax(-1)) for each in contexts]
        agreement.append(sum(bool(p.argmax() == q.argmax()) for p, q in laws) / len(laws))
        overlap.append(sum(float(torch.minimum(p, q).sum()) for p, q in laws) / len(laws))
    assert agreement[0] == 1 > agreement[1] > 0.5 > 0.25 > agreement[2]
    assert overlap[0] == pytest.approx(1)
    assert 1 > overlap[1] > 0.7 > 0.4 > overlap[2]


def test_a_noisy_pairs_target_is_the_tiny_model_and_its_draft_may_be_shorter() -> None:
    target, draft = tiny_noisy_pair(1, draft_max_positions=40)
    assert torch.equal(target_logits(target)(CONTEXT), target_logits(tiny_model(1))(CONTEXT))
    assert draft.config.max_position_embeddings == 40
