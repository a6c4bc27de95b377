"""Tiny random models, whole or as a checkpoint on disk, so that tests need no download.

Know how a Llama is built from a config, random weights and a tokenizer of single characters; know
no engine and no drafter. A model is a function of its seed and sizes alone.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TypedDict, Unpack

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from torch import Tensor

from foredraft.kernels.catalog import load_kernels
from foredraft.kernels.interface import Segment
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import Decoder, activation_dtype, new_cache
from foredraft.models.hf_writer import config_to_json, write_json
from foredraft.models.interface import FlatBatch
from foredraft.models.load import LoadedModel
from foredraft.models.rope import Rope
from foredraft.models.tokenizer import Tokenizer
from foredraft.models.weights import expected_shapes

BOS_ID, EOS_ID = 0, 1
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ bos_token }}{{ message['role'][0] }} {{ message['content'] }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}a {% endif %}"
)
_SYMBOLS = f" {string.ascii_lowercase}.,?{string.ascii_uppercase}{string.digits}"
_FIRST_IDEOGRAPH = 0x4E00  # 20,000 printable characters follow, enough for every tiny vocabulary
# Makes attention look at few tokens, so that a row depends on more than the last.
_QUERY_SCALE = 2.0


class TinySizes(TypedDict, total=False):
    """What may be set of a tiny model; the defaults are those of `tiny_config`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    tie_word_embeddings: bool


def tiny_config(
    vocab_size: int = 32,
    hidden_size: int = 32,
    intermediate_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    max_positions: int = 256,
    tie_word_embeddings: bool = False,
) -> ModelConfig:
    """A small Llama. Raises ValueError below 3 ids: BOS, EOS and one character."""
    if vocab_size < 3:
        raise ValueError(f"vocab_size must be 3 or more, got {vocab_size}")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=1e-5,
        rope=Rope(10000.0),
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=BOS_ID,
        eos_token_ids=(EOS_ID,),
    )


def tiny_model(
    seed: int = 0,
    *,
    kernels: str = "reference",
    dtype: str = "float64",
    device: str = "cpu",
    num_threads: int | None = None,
    sharpness: float = 2.0,
    **sizes: Unpack[TinySizes],
) -> LoadedModel:
    """A random model with a tokenizer, as `load_model` would return it.

    `sharpness` is about the standard deviation of a row of logits: at 0.5 the law is near uniform,
    at 5 one token has most of it. `dtype` is the weights': float64 (reference kernels only),
    float32 or bfloat16.
    """
    config = tiny_config(**sizes)
    weights = random_weights(config, seed, sharpness)
    return assemble(config, weights, f"tiny-{seed}", kernels, dtype, device, num_threads)


def assemble(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    name: str,
    kernels: str,
    dtype: str,
    device: str,
    num_threads: int | None,
) -> LoadedModel:
    """A model of any weights with the tiny tokenizer; arguments as in `tiny_model`."""
    weight_dtype: torch.dtype = getattr(torch, dtype)
    activation = activation_dtype(weight_dtype)
    chosen = load_kernels(kernels, device, activation, num_threads, config.head_dim)
    model = Decoder(config, weights, chosen, weight_dtype, device)
    return LoadedModel(
        model=model,
        tokenizer=tiny_tokenizer(config.vocab_size),
        config=config,
        name=name,
        path=Path(),
        dtype=weight_dtype,
        device=torch.device(device),
        weight_bytes=model.weight_bytes,
        eos_ids=config.eos_token_ids,
        num_threads=num_threads,
    )


def random_weights(config: ModelConfig, seed: int, sharpness: float = 2.0) -> dict[str, Tensor]:
    """Float64 weights under Hugging Face's names. The scale of a linear keeps rows near size 1."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    for name, shape in expected_shapes(config).items():
        noise = torch.randn(shape, dtype=torch.float64, generator=generator)
        if len(shape) == 1:
            weights[name] = 1.0 + 0.1 * noise
        elif name == head:
            weights[name] = noise * (sharpness / shape[1] ** 0.5)
        elif name == "model.embed_tokens.weight":
            weights[name] = noise
        else:
            scale = _QUERY_SCALE if "q_proj" in name else 1.0
            weights[name] = noise * (scale / shape[1] ** 0.5)
    return weights


def tiny_tokenizer(vocab_size: int) -> Tokenizer:
    """Each id one character: BOS, EOS, a space, letters, ... Characters without an id are read as
    a space.
    """
    return Tokenizer(
        _backend(vocab_size),
        chat_template=CHAT_TEMPLATE,
        special_tokens=SPECIAL_TOKENS,
        eos_ids=(EOS_ID,),
    )


def target_logits(loaded: LoadedModel) -> Callable[[tuple[int, ...]], Tensor]:
    """The function context -> logits `[V]` of the next token, each context computed by itself.

    Results are kept: do not write to them.
    """
    config = loaded.config
    page_size = 16
    num_pages = -(-config.max_position_embeddings // page_size)

    @lru_cache(maxsize=65536)
    def logits(context: tuple[int, ...]) -> Tensor:
        used = -(-len(context) // page_size)
        cache = new_cache(
            config, min(used, num_pages), page_size, activation_dtype(loaded.dtype), loaded.device
        )
        segment = Segment(0, len(context), (), range(used))
        batch = FlatBatch(context, [segment], [len(context) - 1])
        return loaded.model.run(batch, cache).logits[0]

    return logits


def write_tiny_checkpoint(
    path: str | Path,
    seed: int = 0,
    *,
    dtype: str = "float32",
    sharpness: float = 2.0,
    **sizes: Unpack[TinySizes],
) -> Path:
    """A directory in Hugging Face's format with the weights of `tiny_model(seed, ...)`.

    `config.json`, `model.safetensors` (weights rounded to `dtype`), `tokenizer.json`,
    `tokenizer_config.json`. Returns the directory, which is made where it is missing.
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(**sizes)
    stored: torch.dtype = getattr(torch, dtype)
    weights = random_weights(config, seed, sharpness)
    tensors = {name: tensor.to(stored).contiguous() for name, tensor in weights.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_json(directory / "config.json", config_to_json(config) | {"torch_dtype": dtype})
    _backend(config.vocab_size).save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        **SPECIAL_TOKENS,
    }
    write_json(directory / "tokenizer_config.json", tokenizer_config)
    return directory


def _backend(vocab_size: int) -> Backend:
    characters = _SYMBOLS + "".join(
        chr(_FIRST_IDEOGRAPH + i) for i in range(max(0, vocab_size - 2 - len(_SYMBOLS)))
    )
    tokens = [*SPECIAL_TOKENS.values(), *characters][:vocab_size]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.WordLevel(vocabulary, unk_token=_SYMBOLS[0]))
    # \s\S is any character: in Oniguruma, `.` leaves out the line break.
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS.values()]
    )
    return backend
