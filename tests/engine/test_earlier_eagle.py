"""Heads of EAGLE-1 and EAGLE-2: what they compute is the formula, what they draft changes nothing,
and a checkpoint that isn't exactly one is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from foredraft import LLM
from foredraft.cache.tensors import KVCache
from foredraft.core.errors import ConfigError, ModelError
from foredraft.drafters.earlier_eagle import EarlierEagleDrafter
from foredraft.kernels.interface import Segment
from foredraft.models.heads.config import EagleConfig
from foredraft.models.heads.eagle import Eagle, KernelEagle, tensor_shapes
from foredraft.models.heads.eagle_checkpoint import load_eagle
from foredraft.models.interface import HEAD_INPUT
from foredraft.models.load import LoadedModel
from foredraft.testing.drafters import RecordingDrafter
from foredraft.testing.models import tiny_model

from .conftest import GREEDY, PROMPTS, SEEDED
from .eagle_rig import eagle_llm, features_of
from .pair_rig import ids

THETA = 10000.0
EPS = 1e-5


def made(target: LoadedModel, seed: int = 0, **options: Any) -> Eagle:
    """A random head, its tensors in the target's dtype."""
    c = target.config
    config = EagleConfig(
        hidden_size=c.hidden_size, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8,
        vocab_size=c.vocab_size, max_position_embeddings=64, rms_norm_eps=EPS, rope=c.rope,
        **options,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator, dtype=target.dtype) * shape[-1] ** -0.5
        for name, shape in tensor_shapes(config).items()
    }
    return Eagle(config, tensors)


def embedded(head: Eagle, target: LoadedModel, tokens: Sequence[int]) -> Tensor:
    own = head.tensors.get("embed_tokens.weight")
    ids_ = torch.tensor(list(tokens))
    return target.model.embed(ids_) if own is None else own[ids_]


def formula(head: Eagle, embeddings: Tensor, features: Tensor) -> Tensor:
    """`[T, H]` of all rows at once, row t at position t, from the formulas alone."""
    tensors, config, rows = head.tensors, head.config, len(features)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def heads(x: Tensor) -> Tensor:
        return x.view(rows, -1, config.head_dim).transpose(0, 1)

    def rotated(x: Tensor) -> Tensor:
        half = config.head_dim // 2
        speed = THETA ** (-torch.arange(half, dtype=x.dtype) / half)
        angle = torch.arange(rows, dtype=x.dtype)[:, None] * speed
        pairs = torch.complex(x[..., :half].clone(), x[..., half:].clone())
        pairs = pairs * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    z = linear(torch.cat([embeddings, features], dim=-1), "fc")
    layer = "layers.0"
    q, k, v = (heads(linear(z, f"{layer}.self_attn.{each}_proj")) for each in "qkv")
    q, k = rotated(q), rotated(k).repeat_interleave(2, 0)
    scores = q @ k.transpose(1, 2) / config.head_dim**0.5
    seen = torch.ones(rows, rows, dtype=torch.bool).tril()
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    attended = (weights @ v.repeat_interleave(2, 0)).transpose(0, 1).reshape(rows, -1)
    a = z + linear(attended, f"{layer}.self_attn.o_proj")
    scale = tensors[f"{layer}.post_attention_layernorm.weight"]
    normed = a / (a.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * scale
    inner = F.silu(linear(normed, f"{layer}.mlp.gate_proj")) * linear(
        normed, f"{layer}.mlp.up_proj"
    )
    return a + linear(inner, f"{layer}.mlp.down_proj")


def vocabulary(head: Eagle, target: LoadedModel) -> Tensor:
    own = head.tensors.get("lm_head.weight")
    every = torch.arange(target.config.vocab_size)
    return target.model.head_rows(every) if own is None else own


def drafted(target: LoadedModel, head: Eagle, tokens: Sequence[int], length: int) -> list[int]:
    """The likeliest chain behind a text, all of it computed anew."""
    features = features_of(target, tokens[:-1], (HEAD_INPUT,))
    found: list[int] = []
    for _ in range(length):
        out = formula(head, embedded(head, target, [*tokens[1:], *found]), features)
        found.append(int((vocabulary(head, target) @ out[-1]).argmax()))
        features = torch.cat([features, out[-1:]])
    return found


@lru_cache
def trained() -> tuple[LoadedModel, Eagle]:
    """A target, and a head that was shown what it says to the prompts."""
    target = tiny_model(seed=1, vocab_size=32)
    llm = LLM(target, seed=5)
    texts = [[*prompt, *llm.generate([prompt], GREEDY)[0].token_ids] for prompt in PROMPTS]
    head = made(target)
    leaves = [tensor.requires_grad_() for tensor in head.tensors.values()]
    optimiser = torch.optim.AdamW(leaves, lr=1e-2)
    rows = vocabulary(head, target)
    shown = [(text, features_of(target, text[:-2], (HEAD_INPUT,))) for text in texts]
    for _ in range(40):
        loss = torch.zeros((), dtype=target.dtype)
        for text, features in shown:
            out = formula(head, embedded(head, target, text[1:-1]), features)
            again = formula(head, embedded(head, target, text[2:-1]), out[:-1])
            loss = loss + F.cross_entropy(out @ rows.T, torch.tensor(text[2:]))
            loss = loss + F.cross_entropy(again @ rows.T, torch.tensor(text[3:]))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    for leaf in leaves:
        leaf.requires_grad_(False)
    return target, head


OPTIONS = [
    {},
    {"fc_bias": False, "own_embedding": True},
    {"qkv_bias": True, "own_head": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("kernels", "dtype", "near"), [("reference", "float64", 1e-11),
                                                        ("native", "float32", 1e-4)])  # fmt: skip
def test_a_pass_is_the_formula(kernels, dtype, near, options):
    """In two parts and over pages, as it is computed beside a growing text."""
    target = tiny_model(seed=1, vocab_size=32, kernels=kernels, dtype=dtype)
    head = made(target, **options)
    kernel = KernelEagle(head, target)
    tokens = [(7 * i + 3) % 32 for i in range(11)]
    features = torch.randn(11, 32, generator=torch.Generator().manual_seed(2)).to(target.dtype)
    cache = KVCache(kernel.cache_shape, 4, 4, "cpu")
    parts = [
        kernel.run(tokens[a:b], kernel.fuse(features[a:b]), [Segment(a, b - a, (), [0, 2, 3])],
                   cache)
        for a, b in ((0, 6), (6, 11))
    ]  # fmt: skip
    want = formula(head, embedded(head, target, tokens), features)
    assert torch.allclose(torch.cat(parts), want, atol=near, rtol=near)
    logits = want @ vocabulary(head, target).T
    assert torch.allclose(kernel.logits(torch.cat(parts)), logits, atol=near, rtol=near)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("options", [{}, {"draft_tree": "top_k"}, {"draft_tree": "sampled"}],
                         ids=str)  # fmt: skip
def test_it_changes_nothing(plain, known_outputs, params, options):
    target, head = trained()
    drafter = EarlierEagleDrafter(target, head, **options)
    llm = eagle_llm(4, pair=(target, head), drafter=drafter)
    outputs = llm.generate(PROMPTS, params)
    assert ids(outputs) == plain(params)
    assert sum(o.metrics.speculative_decoding.num_accepted_draft_tokens for o in outputs) > 0
    llm.engine.check_integrity()
    assert llm.engine.pool.num_used == 0


@pytest.mark.parametrize("chunk", [1, 4, None])
def test_its_drafts_are_the_formulas(chunk):
    target, head = trained()
    drafter = RecordingDrafter(EarlierEagleDrafter(target, head))
    llm = eagle_llm(4, pair=(target, head), drafter=drafter, prefill_chunk_size=chunk)
    llm.generate(PROMPTS, replace(GREEDY, max_tokens=12))
    checked = 0
    for request, draft in zip(drafter.requests, drafter.drafts, strict=True):
        if draft.tokens:
            want = drafted(target, head, list(request.tokens), len(draft.tokens))
            assert list(draft.tokens) == want
            checked += 1
    assert checked >= 10


def written(head: Eagle, directory: Path, **changes: Any) -> Path:
    """As the authors publish one."""
    c = head.config
    values = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim, "vocab_size": c.vocab_size, "hidden_act": "silu",
        "max_position_embeddings": c.max_position_embeddings, "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": THETA, "bias": c.fc_bias, "qkv_bias": c.qkv_bias,
        "tie_word_embeddings": False, "torch_dtype": "float32", "use_cache": True,
        **changes,
    }  # fmt: skip
    directory.mkdir(exist_ok=True)
    kept = {key: value for key, value in values.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(kept))
    save_file({k: v.float().contiguous() for k, v in head.tensors.items()},
              directory / "model.safetensors")  # fmt: skip
    return directory


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "EagleLlamaForCausalLM",
                                  "LlamaForCausalLMEagle"])  # fmt: skip
def test_a_checkpoint_is_read_whoever_named_it(tmp_path, target, name, options):
    head = made(target, **options)
    read = load_eagle(written(head, tmp_path, architectures=[name]), target.config)
    assert read.config == head.config
    assert all(torch.equal(each, head.tensors[k].float()) for k, each in read.tensors.items())


def test_a_config_need_not_tell_of_the_bias(tmp_path, target):
    for bias in (False, True):
        head = made(target, fc_bias=bias)
        assert load_eagle(written(head, tmp_path, bias=None)).config.fc_bias is bias


def test_the_method_drafts_from_a_directory(tmp_path, plain):
    target, head = trained()
    config = {"method": "eagle", "model": str(written(head, tmp_path / "head"))}
    llm = LLM(target, speculative_config=config | {"num_speculative_tokens": 3}, page_size=4)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert ids(outputs) == plain(GREEDY)
    assert sum(o.metrics.speculative_decoding.num_accepted_draft_tokens for o in outputs) > 0
    with pytest.raises(ConfigError, match="bogus"):
        LLM(target, speculative_config=config | {"bogus": 1})


def broken(tmp_path: Path, target: LoadedModel, change: Any, **changes: Any) -> Path:
    head = made(target)
    tensors = dict(head.tensors)
    change(tensors)
    return written(Eagle(head.config, tensors), tmp_path, **changes)


NORM = "layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("message", "change", "changes"),
    [
        ("missing tensor fc.weight", lambda t: t.pop("fc.weight"), {}),
        ("missing tensor fc.bias", lambda t: t.pop("fc.bias"), {}),
        ("unknown tensor fc.bias", lambda t: None, {"bias": False}),
        (f"unknown tensor {NORM}", lambda t: t.update({NORM: torch.ones(32)}), {}),
        (r"fc.weight is float32 \[64, 32\], expected floats \[32, 64\]",
         lambda t: t.update({"fc.weight": t["fc.weight"].T}), {}),
        ("holds what is no finite", lambda t: t["fc.weight"].fill_(float("nan")), {}),
        ("missing tensor layers.0.self_attn.k_proj.bias", lambda t: None, {"qkv_bias": True}),
        ("architectures is", lambda t: None, {"architectures": ["LlamaForCausalLMEagle3"]}),
        ("num_hidden_layers is 2; expected 1", lambda t: None, {"num_hidden_layers": 2}),
        ("norm_before_fc may change", lambda t: None, {"norm_before_fc": True}),
        ("cannot share 3 key", lambda t: None, {"num_key_value_heads": 3}),
        ("its hidden_size is 64", lambda t: None, {"hidden_size": 64}),
        ("its vocab_size is 33", lambda t: None, {"vocab_size": 33}),
    ],
)  # fmt: skip
def test_what_is_no_such_head_is_refused_in_one_line(tmp_path, target, message, change, changes):
    directory = broken(tmp_path, target, change, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        EarlierEagleDrafter(target, directory)
    assert str(caught.value).startswith(str(directory))
    assert "\n" not in str(caught.value)
