"""A GGUF file as a config and weights under Hugging Face's names.

Knows how llama.cpp names and lays out a decoder's tensors; what a family's metadata means
`gguf_model_families` knows. Knows neither kernels nor tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from foredraft.core.errors import ModelError
from foredraft.models.config import ModelConfig, check_num_layers
from foredraft.models.fields import Fields
from foredraft.models.gguf import GGUFFile, WidenedTensors
from foredraft.models.gguf_model_families import FAMILIES, ROPE_TENSORS, Family, Sizes
from foredraft.models.weights import mlp_norm_part

Change = Callable[[Tensor], Tensor]

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "ffn_down": "mlp.down_proj",
}
_APART = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The config its metadata describes. Raises ModelError for what the decoder cannot honour."""
    source = str(file.path)
    family = _family(file)
    name = file.metadata["general.architecture"]
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
        config = _config(file, fields, tokens, embedding.shape[0], family)
    except ModelError as error:
        if str(error).startswith(source):
            raise
        raise ModelError(f"{source}: {error}") from error
    if fields.unread():
        raise ModelError(f"{source}: unknown metadata {', '.join(map(repr, fields.unread()))}")
    return config


def _config(
    file: GGUFFile, fields: Fields, tokens: Fields, vocab_size: int, family: Family
) -> ModelConfig:
    sizes = _sizes(fields)
    if fields.integer("vocab_size", vocab_size) != vocab_size:
        raise fields.fail("vocab_size", f"{vocab_size}, the rows of token_embd.weight")
    if fields.integer("expert_count", 0, minimum=0):
        raise fields.fail("expert_count", "0: mixtures of experts are not supported")
    fields.integer("expert_used_count", 0, minimum=0)
    fields.text("tensor_data_layout", "")  # of the original checkpoint; the tensors say all
    options: dict[str, Any] = {"max_position_embeddings": sizes.context_length}
    options |= family.read(file, fields, sizes)
    for key, size in (
        ("attention.value_length", sizes.head_dim),
        ("rope.dimension_count", options["rope"].rotary_dim or sizes.head_dim),
    ):
        if fields.integer(key, size) != size:
            raise fields.fail(key, f"{size}, the size of a head")
    has = file.tensors.__contains__
    bos = tokens.ids("tokenizer.ggml.bos_token_id")
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", sizes.num_heads),
        head_dim=sizes.head_dim,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", whole=False),
        tie_word_embeddings=not has("output.weight"),
        qkv_bias=has("blk.0.attn_q.bias"),
        output_bias=has("blk.0.attn_output.bias"),
        mlp_bias=has("blk.0.ffn_gate.bias"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tokens.ids("tokenizer.ggml.eos_token_id"),
        **options,
    )


def weights_from_gguf(file: GGUFFile, config: ModelConfig) -> WidenedTensors:
    """The file's tensors under Hugging Face's names and with its values, widened when read.

    Raises ModelError for a tensor whose name belongs to no model of this config.
    """
    modules, changes = _layer_names(config), _changes(config, _family(file).paired_rows)
    names: dict[str, tuple[str, Change | None]] = {}
    for stored in file.tensors:
        if stored in ROPE_TENSORS:
            continue
        name, _, kind = stored.rpartition(".")
        if name in _GLOBAL_NAMES:
            module = renamed = _GLOBAL_NAMES[name]
        else:
            block, _, rest = name.partition(".")
            index, _, part = rest.partition(".")
            if block != "blk" or part not in modules or not _is_index(index):
                raise ModelError(f"{file.path}: unknown tensor {stored!r}")
            module = modules[part]
            renamed = f"model.layers.{index}.{module}"
        names[f"{renamed}.{kind}"] = (stored, changes.get(module))
    return WidenedTensors(file, names)


def _family(file: GGUFFile) -> Family:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(
            f"{file.path}: architecture {name!r} is not supported; "
            f"supported are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[name]


def _sizes(fields: Fields) -> Sizes:
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    num_layers = fields.integer("block_count")
    check_num_layers(num_layers, fields.source)
    head_dim = fields.integer("attention.key_length", max(1, hidden_size // num_heads))
    return Sizes(hidden_size, num_layers, num_heads, head_dim, fields.integer("context_length"))


def _layer_names(config: ModelConfig) -> dict[str, str]:
    """llama.cpp's names of a layer's parts, and Hugging Face's."""
    names = _LAYER_NAMES | {"ffn_norm": mlp_norm_part(config)}
    names |= _FUSED if config.fused_projections else _APART
    names |= _POST_NORMS if config.post_norms else {}
    return names | (_HEAD_NORMS if config.head_norms else {})


def _changes(config: ModelConfig, paired_rows: bool) -> dict[str, Change]:
    """What makes a part's stored tensors those of Hugging Face."""
    changes: dict[str, Change] = {}
    if paired_rows:
        for part, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            changes[f"self_attn.{part}_proj"] = _rotate_half_rows(heads, config.head_dim)
    if config.norm_offset:  # llama.cpp's converter has added it

        def without_offset(norm: Tensor) -> Tensor:
            return norm - config.norm_offset

        norms = {"input_layernorm", mlp_norm_part(config), *_POST_NORMS.values()}
        changes |= dict.fromkeys([*norms, *_HEAD_NORMS.values(), "model.norm"], without_offset)
    return changes


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
