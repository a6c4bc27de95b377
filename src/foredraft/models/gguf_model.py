"""A GGUF file as a config and weights under Hugging Face's names.

Knows how llama.cpp names things and lays out a Llama; knows neither kernels nor tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from foredraft.core.errors import ModelError
from foredraft.models.config import ModelConfig
from foredraft.models.fields import Fields
from foredraft.models.gguf import GGUFFile, WidenedTensors
from foredraft.models.rope import Divisors, Linear, Rope

ARCHITECTURES = {"llama": "LlamaForCausalLM"}
ROPE_DIVISORS = "rope_freqs.weight"

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The config its metadata describes. Raises ModelError for what the decoder cannot honour."""
    source = str(file.path)
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{source}: architecture {name!r} is not supported; "
            f"supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    prefix = f"{name}."
    fields = Fields(
        {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)},
        f"{source}: {name}",
    )
    tokens = Fields(file.metadata, source)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{source}: missing tensor token_embd.weight of two dimensions")
    try:
        config = _config(file, fields, tokens, embedding.shape[0], ARCHITECTURES[name])
    except ModelError as error:
        if str(error).startswith(source):
            raise
        raise ModelError(f"{source}: {error}") from error
    if fields.unread():
        raise ModelError(f"{source}: unknown metadata {', '.join(map(repr, fields.unread()))}")
    return config


def _config(
    file: GGUFFile, fields: Fields, tokens: Fields, vocab_size: int, architecture: str
) -> ModelConfig:
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    if fields.integer("vocab_size", vocab_size) != vocab_size:
        raise fields.fail("vocab_size", f"{vocab_size}, the rows of token_embd.weight")
    if fields.integer("expert_count", 0, minimum=0):
        raise fields.fail("expert_count", "0: mixtures of experts are not supported")
    fields.integer("expert_used_count", 0, minimum=0)
    fields.text("tensor_data_layout", "")  # of the original checkpoint; the tensors say all
    head_dim = fields.integer("attention.key_length", max(1, hidden_size // num_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise fields.fail(key, f"{head_dim}, the size of a head")
    has = file.tensors.__contains__
    bos = tokens.ids("tokenizer.ggml.bos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=fields.integer("context_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", whole=False),
        rope=_rope(file, fields),
        tie_word_embeddings=not has("output.weight"),
        qkv_bias=has("blk.0.attn_q.bias"),
        output_bias=has("blk.0.attn_output.bias"),
        mlp_bias=has("blk.0.ffn_gate.bias"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tokens.ids("tokenizer.ggml.eos_token_id"),
    )


def _rope(file: GGUFFile, fields: Fields) -> Rope:
    theta = fields.number("rope.freq_base", 10000.0, whole=False)
    kind = fields.text("rope.scaling.type", "none")
    factor = fields.number("rope.scaling.factor", 1.0, whole=False)
    # Facts about training that change no number.
    fields.integer("rope.scaling.original_context_length", 1)
    fields.flag("rope.scaling.finetuned", False)
    if kind not in ("none", "linear"):
        raise fields.fail("rope.scaling.type", "'none' or 'linear'")
    if ROPE_DIVISORS in file.tensors:
        if kind == "linear":
            raise fields.fail("rope.scaling.type", f"'none' beside a tensor {ROPE_DIVISORS}")
        return Rope(theta, Divisors(tuple(file.tensor(ROPE_DIVISORS).flatten().tolist())))
    return Rope(theta, Linear(factor) if kind == "linear" else None)


def weights_from_gguf(file: GGUFFile, config: ModelConfig) -> WidenedTensors:
    """The file's tensors under Hugging Face's names, widened when read.

    Raises ModelError for a tensor whose name belongs to no Llama.
    """
    turn_back = {
        "self_attn.q_proj": _rotate_half_rows(config.num_heads, config.head_dim),
        "self_attn.k_proj": _rotate_half_rows(config.num_kv_heads, config.head_dim),
    }
    names: dict[str, tuple[str, Callable[[Tensor], Tensor] | None]] = {}
    for stored in file.tensors:
        if stored == ROPE_DIVISORS:
            continue
        if stored in _GLOBAL_NAMES:
            names[_GLOBAL_NAMES[stored]] = (stored, None)
            continue
        block, _, rest = stored.partition(".")
        index, _, rest = rest.partition(".")
        part, _, kind = rest.rpartition(".")
        if block != "blk" or part not in _LAYER_NAMES or not _is_index(index):
            raise ModelError(f"{file.path}: unknown tensor {stored!r}")
        module = _LAYER_NAMES[part]
        names[f"model.layers.{index}.{module}.{kind}"] = (stored, turn_back.get(module))
    return WidenedTensors(file, names)


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdecimal() and text == str(int(text[:9]))


def _rotate_half_rows(heads: int, head_dim: int) -> Callable[[Tensor], Tensor]:
    """llama.cpp stores a head's rotated rows as neighbours (0, D/2, 1, D/2 + 1, ...): undo that."""

    def change(tensor: Tensor) -> Tensor:
        if tensor.shape[0] != heads * head_dim:
            raise ModelError(
                f"a query or key tensor has {tensor.shape[0]} rows, expected {heads * head_dim}"
            )
        paired = tensor.reshape(heads, head_dim // 2, 2, *tensor.shape[1:])
        return paired.swapaxes(1, 2).reshape(tensor.shape)

    return change
