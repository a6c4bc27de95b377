"""What several folders of tests share: the real model, fetched once into the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from foredraft.models.registry import pull

# `make test` draws the same examples each time, so that a red run is due to the change under test;
# `make soak` draws new and more ones. No profile has a deadline: timings never fail a test.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("soak", max_examples=1000, deadline=None)
settings.load_profile("fixed")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file."""
    return pull("smollm2-135m")


@pytest.fixture(scope="session")
def peer_tokenizer(smollm2_path: Path) -> PreTrainedTokenizerBase:
    """transformers' reading of SmolLM2's file, with the cutting of the model's own tokenizer.json.

    transformers ignores `tokenizer.ggml.pre` and would not cut digits from each other.
    """
    peer = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    peer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return peer
