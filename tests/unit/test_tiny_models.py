"""Tiny models: the same from the same seed, dependent on the context, loadable by others."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from foredraft.models.detokenizer import Detokenizer
from foredraft.models.load import load_model
from foredraft.testing.models import (
    BOS_ID,
    EOS_ID,
    target_logits,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
    write_tiny_checkpoint,
)

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
