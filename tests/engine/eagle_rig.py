"""A tiny target with an EAGLE-3 head that has learned what it says, and the drafts that the head's
module in torch makes: the engine's have to be these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from foredraft import LLM
from foredraft.drafters.eagle import EagleDrafter
from foredraft.kernels.interface import Segment
from foredraft.models.decoder import new_cache
from foredraft.models.heads.config import Eagle3Config
from foredraft.models.heads.eagle3 import Eagle3
from foredraft.models.interface import FlatBatch
from foredraft.models.load import LoadedModel
from foredraft.testing.models import tiny_model

from .conftest import GREEDY, PROMPTS, SEEDED
from .test_law import LENGTH, PROMPT, VOCAB, chi_square, enumerate_law

LAYERS = (0, 1, 2)
NUM_STEPS = 120


def features_of(target: LoadedModel, tokens: Sequence[int], depths=LAYERS) -> Tensor:
    """`[T, depths * H]` of a text, in one pass."""
    cache = new_cache(target.config, 1, len(tokens), target.cache_dtype, target.device)
    segment = Segment(0, len(tokens), (), [0])
    batch = FlatBatch(list(tokens), [segment], feature_layers=depths)
    features = target.model.run(batch, cache).features
    assert features is not None
    return features


def new_head(target: LoadedModel, draft_ids: Sequence[int], seed: int = 0, **options) -> Eagle3:
    torch.manual_seed(seed)
    c = target.config
    config = Eagle3Config(
        hidden_size=c.hidden_size,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=c.vocab_size,
        draft_vocab_size=len(draft_ids),
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=1e-5,
        rope=c.rope,
        target_hidden_size=c.hidden_size,
        **({"feature_layers": LAYERS} | options),
    )
    ids = torch.arange(c.vocab_size)
    embedding = target.model.embed(ids)
    return Eagle3(config, torch.tensor(list(draft_ids)), embedding).to(target.dtype)


@lru_cache
def trained() -> tuple[LoadedModel, Eagle3]:
    """A target, and a head that was shown what it says to the prompts, but for one id."""
    target = tiny_model(seed=1, vocab_size=32)
    llm = LLM(target, seed=5)
    texts = [[*prompt, *llm.generate([prompt], GREEDY)[0].token_ids] for prompt in PROMPTS]
    said = sorted({token for text in texts for token in text})
    head = new_head(target, [token for token in said if token != said[len(said) // 2]])
    local = torch.full((32,), -100)
    local[head.draft_ids] = torch.arange(len(head.draft_ids))
    shown = [(torch.tensor([text]), features_of(target, text)[None]) for text in texts]
    optimiser = torch.optim.AdamW(head.parameters(), lr=5e-3)
    for _ in range(NUM_STEPS):
        loss = sum(_loss(head, *each, local) for each in shown)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return target, head.requires_grad_(False)


def _loss(head: Eagle3, tokens: Tensor, features: Tensor, local: Tensor) -> Tensor:
    """Two steps of training-time test against the tokens that were said."""
    steps: list = []
    hidden, total = head.fuse(features[:, :-2]), torch.zeros(())
    for s in range(2):
        rows = hidden.shape[1] - s
        positions = torch.arange(hidden.shape[1]) + s
        padded = torch.nn.functional.pad(tokens, (0, s))
        hidden = head(
            head.embed(padded[:, 1 + s : 1 + s + hidden.shape[1]]), hidden, positions, steps=steps
        )
        logits = head.logits(hidden[:, :rows])
        total = total + torch.nn.functional.cross_entropy(
            logits[0], local[tokens[0, 2 + s :][:rows]], ignore_index=-100
        )
    return total


def reference_draft(
    target: LoadedModel, head: Eagle3, tokens: Sequence[int], length: int
) -> list[int]:
    """The head's most likely chain behind a text, all of it computed anew."""
    drafted: list[int] = []
    hidden = head.fuse(features_of(target, tokens[:-1], head.config.layers_of(target.config)))[None]
    while len(drafted) < length:
        read = torch.tensor([[*tokens[1:], *drafted]])
        out = head(head.embed(read), hidden, torch.arange(read.shape[1]))
        best = int(head.logits(out[:, -1:])[0, 0].argmax())
        drafted.append(int(head.draft_ids[best]))
        hidden = torch.cat([hidden, out[:, -1:]], dim=1)
    return drafted


def eagle_llm(width: int = 4, pair=None, drafter=None, **options) -> LLM:
    target, head = pair or trained()
    own = {key: options.pop(key) for key in list(options) if key.startswith("draft_")}
    drafter = drafter or EagleDrafter(target, head, **own)
    config = {"num_speculative_tokens": width}
    if "rule" in options:
        config["rejection_sample_method"] = options.pop("rule")
    return LLM(
        target,
        drafter=drafter,
        speculative_config=config,
        **({"seed": 5, "page_size": 4} | options),
    )


def check_law(llm: LLM, target: LoadedModel) -> None:
    """What is sampled follows the target's enumerated law."""
    params = replace(SEEDED, seed=None, temperature=0.8, max_tokens=LENGTH)
    observed = [0] * VOCAB**LENGTH
    for output in llm.generate([PROMPT] * 800, params):
        index = 0
        for token in output.token_ids:
            index = index * VOCAB + token
        observed[index] += 1
    assert chi_square(observed, enumerate_law(target, 0.8)) >= 1e-3
