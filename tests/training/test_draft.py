"""The draft model in training: the decoder, the reduced tokenizer, and how ids are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from foredraft.core.errors import ModelError
from foredraft.kernels.reference import ReferenceKernels
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import Decoder
from foredraft.models.load import LoadedModel, load_model
from foredraft.models.tokenizer import Tokenizer
from foredraft.testing.models import assemble, random_weights, target_logits, tiny_config
from foredraft.training.answers import Answers
from foredraft.training.batches import make_batch
from foredraft.training.begin import choose_ids
from foredraft.training.decoder import TrainableDecoder
from foredraft.training.draft import (
    DraftModelStudent,
    Reading,
    load_draft,
    new_draft,
    reading_of,
    write_draft,
)
from foredraft.training.reduced_tokenizer import needed_ids, reduced_tokenizer
from foredraft.training.student import Objective
from foredraft.training.target import Target

CPU = torch.device("cpu")
OPTIONS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "head norms": {"head_norms": True, "architecture": "Qwen3ForCausalLM"},
    "gelu, scaled embedding": {"activation": "gelu_tanh", "embedding_scale": 3.0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_decoder_computes_what_runs_later(name: str) -> None:
    config: ModelConfig = replace(tiny_config(num_layers=2), **OPTIONS[name])
    weights = random_weights(config, seed=2)
    tokens = torch.randint(
        0, config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(0)
    )
    decoder = TrainableDecoder(config).double()
    decoder.fill(weights)
    loaded = assemble(config, weights, name, "reference", "float64", "cpu", None)
    logits = decoder.logits(decoder(tokens))[0]
    for length in (1, 5, 12):
        expected = target_logits(loaded)(tuple(tokens[0, :length].tolist()))
        assert torch.allclose(logits[length - 1], expected, atol=1e-5), length


def test_its_parameters_are_a_checkpoints() -> None:
    config = tiny_config()
    names = dict(TrainableDecoder(config).named_parameters())
    Decoder(config, names, ReferenceKernels())  # refuses missing and unknown ones


@pytest.mark.parametrize(
    ("option", "value"), [("final_soft_cap", 30.0), ("post_norms", True), ("windows", (4, 0))]
)
def test_options_that_it_lacks_are_named(option: str, value: object) -> None:
    config = replace(tiny_config(), **{option: value})
    with pytest.raises(ModelError, match=f"{option}.*can't be trained; heads can"):
        TrainableDecoder(config)


def test_a_draft_begins_with_the_targets_first_and_last_layers(loaded: LoadedModel) -> None:
    ids = torch.tensor([0, 1, 2, *range(7, 20)])
    decoder, tokenizer = new_draft(loaded, ids, 3)
    whole, _ = new_draft(loaded, None, 4)
    mine, theirs = dict(decoder.named_parameters()), dict(whole.named_parameters())
    for layer, source in ((0, 0), (1, 1), (2, 3)):
        name = "self_attn.q_proj.weight"
        assert torch.equal(
            mine[f"model.layers.{layer}.{name}"], theirs[f"model.layers.{source}.{name}"]
        )
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(mine[name], theirs[name][ids])
    assert tokenizer.vocab_size == len(ids)


def test_the_whole_target_as_a_draft_is_always_right(
    loaded: LoadedModel, target: Target, answers: tuple[Answers, Answers]
) -> None:
    decoder, tokenizer = new_draft(loaded, None, loaded.config.num_layers)
    reading = Reading(torch.arange(loaded.config.vocab_size), None, None)
    student = DraftModelStudent(decoder, tokenizer, reading, target, 3, Objective())
    batch = make_batch(answers[0], [0, 1, 2], 256, CPU)
    lesson = student.lesson(batch)
    assert float(lesson.loss.detach()) == pytest.approx(0.0, abs=1e-5)
    assert lesson.acceptance.tolist() == pytest.approx([1.0], abs=1e-4)
    drafts = student.drafts(batch)[..., 0]
    for row, (prompt, end) in enumerate(zip(batch.prompts, batch.lengths, strict=True)):
        for pending in range(prompt - 1, end - 3):
            expected = batch.tokens[row, pending + 1 : pending + 4].tolist()
            assert drafts[row, pending].tolist() == expected


def test_a_reduced_draft_reads_and_drafts_as_the_engine_reads_it(
    loaded: LoadedModel, answers: tuple[Answers, Answers], tmp_path: Path
) -> None:
    always = {*needed_ids(loaded.tokenizer), *loaded.eos_ids}
    ids = choose_ids(answers[0], 16, loaded.config.vocab_size, always)
    assert ids is not None
    decoder, tokenizer = new_draft(loaded, ids, 2)
    reading = reading_of(loaded, decoder, tokenizer)
    assert reading.ids is not None
    assert reading.ids.tolist() == ids.tolist()
    assert reading.of_target[ids].tolist() == list(range(len(ids)))
    assert int(reading.of_target.max()) < len(ids)
    write_draft(decoder, tokenizer, tmp_path / "draft")
    found = Reading.between(loaded, load_model(tmp_path / "draft", kernels="reference"))
    assert torch.equal(found.of_target, reading.of_target)
    again, tokenizer = load_draft(tmp_path / "draft")
    tokens = torch.arange(len(ids))[None]
    assert torch.allclose(again(tokens), decoder(tokens), atol=0.05)
    assert tokenizer.chat_template == loaded.tokenizer.chat_template


def _byte_level(added: str) -> Tokenizer:
    """A BPE tokenizer of bytes that knows the beginnings of one word."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("he", "l"), ("hel", "l"), ("hell", "o")]
    tokens = [added, *letters, *("".join(pair) for pair in merges)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([added])
    return Tokenizer(backend, special_tokens={"eos_token": added}, eos_ids=[0])


def test_a_reduced_tokenizer_spells_what_it_lacks_in_smaller_parts() -> None:
    whole = _byte_level("<end>")
    spelled = whole.vocabulary
    ids = sorted({*needed_ids(whole), spelled["he"], spelled["hel"], spelled["hell"]})
    small = reduced_tokenizer(whole, ids)
    assert small.vocab_size == len(ids) == 1 + 256 + 3
    assert small.eos_ids == (0,)
    assert [small.token_text(i) for i in small.encode("hello")] == ["hell", "o"]
    assert [whole.token_text(i) for i in whole.encode("hello")] == ["hello"]
    text = "help é 素 <end>"
    assert small.decode(small.encode(text)) == text  # users' text is never a control token
    assert small.control_ids == {0}


def test_tokenizers_that_cannot_be_reduced_are_named() -> None:
    backend = Backend(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    with pytest.raises(ModelError, match="Unigram tokenizer can't be reduced"):
        reduced_tokenizer(Tokenizer(backend), [0, 1])
