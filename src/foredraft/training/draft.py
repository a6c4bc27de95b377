"""Training a draft model: a few of the target's layers over a reduced vocabulary.

Knows the target and what a draft model's directory holds; knows no loop. The student learns the
target's law of each token of an answer from the tokens before it (DistillSpec, 2310.08461), reading
ids as the engine will: tokens that its vocabulary lacks as the last of their smaller parts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from foredraft.models.atomic_directory import appearing
from foredraft.models.config import ModelConfig
from foredraft.models.hf_writer import config_to_json, write_json, write_tokenizer
from foredraft.models.load import LoadedModel, load_model, open_files
from foredraft.models.safetensors_weights import SINGLE
from foredraft.models.safetensors_writer import save_tensors
from foredraft.models.tokenizer import Tokenizer
from foredraft.models.vocabulary import SharedVocabulary, check_same_vocabulary
from foredraft.training.batches import Batch
from foredraft.training.begin import StoredWeights
from foredraft.training.decoder import TrainableDecoder
from foredraft.training.reduced_tokenizer import named_tokens, reduced_tokenizer
from foredraft.training.student import Lesson, Objective, Teaching, likeliest, shifted
from foredraft.training.target import Target


@dataclass(frozen=True, slots=True)
class Reading:
    """A draft model's ids beside the target's."""

    of_target: Tensor  # [V] the draft's id that a target's is read as
    ids: Tensor | None  # [D] target ids that can be drafted, ascending; None: all
    own: Tensor | None  # [D] the draft's ids of these

    @classmethod
    def between(cls, target: LoadedModel, draft: LoadedModel) -> Reading:
        """As the engine reads them (`models.vocabulary`). Raises ConfigError where nothing is
        shared.
        """
        size = target.config.vocab_size
        if target.tokenizer.vocabulary == draft.tokenizer.vocabulary:
            check_same_vocabulary(target, draft)
            last = draft.config.vocab_size - 1
            return cls(torch.arange(size).clamp(max=last), None, None)
        shared = SharedVocabulary(target, draft)
        of_target = torch.tensor([shared.read(token) for token in range(size)])
        pairs = sorted(shared.own_ids.items())
        ids, own = (torch.tensor(column) for column in zip(*pairs, strict=True))
        return cls(of_target, ids, own)


class DraftModelStudent:
    """`Student` for a draft model."""

    first_pending = 0

    def __init__(
        self,
        decoder: TrainableDecoder,
        tokenizer: Tokenizer,
        reading: Reading,
        target: Target,
        num_drafts: int,
        objective: Objective,
    ) -> None:
        self.module = decoder
        self.num_drafts = num_drafts
        self._tokenizer, self._target, self._objective = tokenizer, target, objective
        parts = (reading.of_target, reading.ids, reading.own)
        self._read, self._ids, self._own = (
            None if each is None else each.to(target.device) for each in parts
        )

    def lesson(self, batch: Batch) -> Lesson:
        """See `Student.lesson`: every token of an answer weighs the same."""
        taps = self._target.taps(batch, ())
        laws = self._target.laws(taps, batch.laws(), self._ids)
        teaching = Teaching.of(batch, laws.logprobs, self._ids)
        found = teaching.compare(
            self._hidden(batch), batch.laws(), 0, self._project, self._objective.loss
        )
        count = max(1, len(found.losses))
        return Lesson(found.losses.sum() / count, found.acceptance.sum()[None] / count)

    @torch.no_grad()
    def drafts(self, batch: Batch, ranks: int = 1) -> Tensor:
        """See `Student.drafts`: what a row says is the draft for the token behind it, and the next
        draft is made from the row of the token itself.
        """
        places = batch.laws()
        found = batch.tokens.new_full((*batch.tokens.shape, ranks), -1)
        rows = self._hidden(batch)[places]
        found[places] = likeliest(rows, self._project, self._ids, ranks)
        return torch.stack([shifted(found, i, fill=-1) for i in range(self.num_drafts)], dim=2)

    def save(self, directory: Path) -> None:
        """See `Student.save`."""
        write_draft(self.module, self._tokenizer, directory)

    def _hidden(self, batch: Batch) -> Tensor:
        assert self._read is not None
        hidden: Tensor = self.module(self._read[batch.tokens])
        return hidden

    def _project(self, hidden: Tensor) -> Tensor:
        logits = self.module.logits(hidden)
        return logits if self._own is None else logits.index_select(-1, self._own)


def new_draft(
    loaded: LoadedModel, ids: Tensor | None, num_layers: int
) -> tuple[TrainableDecoder, Tokenizer]:
    """A draft model of `num_layers` of the target's layers, the first and the last of them, over
    `ids` (see `begin.choose_ids`; `needed_ids` are among them).

    Raises ModelError for a family that can't be trained and for a tokenizer that can't be reduced.
    """
    weights, tokenizer = StoredWeights(loaded), loaded.tokenizer
    if ids is not None:
        tokenizer = reduced_tokenizer(tokenizer, ids.tolist())
    config = _smaller(loaded.config, tokenizer, ids, num_layers)
    decoder = TrainableDecoder(config)
    layers = _kept_layers(loaded.config.num_layers, num_layers)
    decoder.fill(_part_of(weights, decoder, layers, ids))
    return decoder, tokenizer


def _smaller(
    config: ModelConfig, tokenizer: Tokenizer, ids: Tensor | None, num_layers: int
) -> ModelConfig:
    config = replace(config, num_layers=num_layers)
    if ids is None:
        return config
    return replace(
        config,
        vocab_size=len(ids),
        bos_token_id=tokenizer.bos_id,
        eos_token_ids=tokenizer.eos_ids,
    )


def _kept_layers(count: int, wanted: int) -> list[int]:
    """The first half and the last half of as many as are wanted."""
    last = wanted // 2
    return [*range(wanted - last), *range(count - last, count)]


def _part_of(
    weights: StoredWeights, decoder: TrainableDecoder, layers: Sequence[int], ids: Tensor | None
) -> Mapping[str, Tensor]:
    found = {}
    for name, parameter in decoder.named_parameters():
        stored = name
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            stored = f"model.layers.{layers[int(layer)]}.{rest}"
        tensor = weights.tensor(stored)
        by_token = ids is not None and tensor.shape != parameter.shape
        found[name] = tensor[ids] if by_token else tensor
    return found


def write_draft(
    decoder: TrainableDecoder,
    tokenizer: Tokenizer,
    directory: Path,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a draft model as a Hugging Face directory, all of it or nothing, in place of what is
    there; norms stay float32. Raises OSError.
    """
    config = decoder.config
    tensors = {
        name: each.detach().cpu().to(dtype if each.dim() > 1 else torch.float32).contiguous()
        for name, each in decoder.named_parameters()
    }
    with appearing(directory, lambda: None) as made:
        values = config_to_json(config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
        write_json(made / "config.json", values)
        save_tensors(made / SINGLE, tensors, {"format": "pt"})
        write_tokenizer(made, tokenizer, named_tokens(tokenizer), config.max_position_embeddings)


def load_draft(directory: Path) -> tuple[TrainableDecoder, Tokenizer]:
    """A draft model out of its directory, to go on with. Raises ModelError."""
    config, stored, tokenizer = open_files(directory)
    decoder = TrainableDecoder(config)
    decoder.fill(stored)
    return decoder, tokenizer


def reading_of(target: LoadedModel, decoder: TrainableDecoder, tokenizer: Tokenizer) -> Reading:
    """How a draft model that isn't written yet will be read. Raises ConfigError."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "draft"
        write_draft(decoder, tokenizer, path)
        return Reading.between(target, load_model(path, kernels="reference"))
