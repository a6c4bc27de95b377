"""The EAGLE-3 head in plain torch: what is trained, and what the kernels' version is held to.

Knows tensors and one config; knows no file, no kernel and no request. Parameters are called as
published checkpoints call them (yuhuili/EAGLE3-*, SpecForge), so that `state_dict` is one.
Shapes: B sequences, T positions, H hidden size, Ht the target's, V its vocabulary, D the draft's.

Formulas: Li et al. 2503.01840. Row t stands for the pair (target features at t, token at t + 1) and
its logits are for the token at t + 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.models.heads.config import NUM_FEATURES, Eagle3Config
from foredraft.models.heads.reduced import check_draft_ids


@dataclass(frozen=True, slots=True)
class KeysValues:
    """Of one call: keys behind their rotation, and values, `[B, Hkv, T, head_dim]` each."""

    keys: Tensor
    values: Tensor


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension; the mean is a wide one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        scaled: Tensor = (wide * scale).to(x.dtype) * self.weight
        return scaled


class Attention(nn.Module):
    """Grouped-query attention over inputs `[B, T, 2H]`; outputs `[B, T, H]`."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        inputs, dim = 2 * config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(inputs, config.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(inputs, config.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(inputs, config.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * dim, config.hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None,
        steps: list[KeysValues] | None,
    ) -> Tensor:
        config, (batch, length, _) = self.config, x.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, config.head_dim).transpose(1, 2)

        queries = rotate(heads(self.q_proj(x)), *rotation)
        own = KeysValues(rotate(heads(self.k_proj(x)), *rotation), heads(self.v_proj(x)))
        every = [*(steps or ()), own]
        if steps is not None:
            steps.append(own)
        attended = attend(queries, every, mask)
        out: Tensor = self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))
        return out


class GatedNetwork(nn.Module):
    """`down(silu(gate x) * up x)`."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """The one decoder layer."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config)
        self.mlp = GatedNetwork(config)
        self.input_layernorm = RMSNorm(hidden, eps)  # of the embedding
        self.hidden_norm = RMSNorm(hidden, eps)  # of the features
        self.post_attention_layernorm = RMSNorm(hidden, eps)

    def forward(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None,
        steps: list[KeysValues] | None,
    ) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        both = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        residual = residual + self.self_attn(both, rotation, mask, steps)
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class Eagle3(nn.Module):
    """A head for one target.

    One step of drafting, or of training-time test: `hidden = forward(embed(token at t + 1),
    hidden, ...)`, `logits(hidden)` for the token at t + 2; the next step reads this `hidden` in
    place of `fuse(features)`.

    `d2t [D]` int64: draft id i is target id `i + d2t[i]`; `t2d [V]` bool: target ids that the draft
    has. Both are buffers, and part of the checkpoint.
    """

    d2t: Tensor
    t2d: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        config: Eagle3Config,
        draft_ids: Tensor | None = None,
        embedding: Tensor | None = None,
    ) -> None:
        """
        Args:
            draft_ids: `[D]` int64, the target's ids that can be drafted, ascending; None: the
                first D, all of them where D is V.
            embedding: `[V, H]`, the target's, shared and not trained; None: the head has its own
                (`own_embedding`), or `embed` isn't used.

        Raises ModelError for ids that are no ascending ids of the target's, D in number.
        """
        super().__init__()
        self.config = config
        if draft_ids is None:
            draft_ids = torch.arange(config.draft_vocab_size)
        check_draft_ids(draft_ids, config.draft_vocab_size, config.vocab_size)
        hidden = config.hidden_size
        self.fc = nn.Linear(NUM_FEATURES * config.target_hidden_size, hidden, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self._shared_embedding = (embedding,)  # in a tuple: no parameter of this module
        self.register_buffer("d2t", draft_ids - torch.arange(config.draft_vocab_size))
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[draft_ids] = True
        self.register_buffer("t2d", t2d)
        tables = config.rope.tables(
            config.head_dim, config.max_position_embeddings, torch.float32, "cpu"
        )
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, table, persistent=False)

    @property
    def draft_ids(self) -> Tensor:
        """`[D]`: the target's id of each draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Target ids `[B, T]` -> `[B, T, H]`, in the dtype of the head's weights."""
        if self.config.own_embedding:
            own: Tensor = self.embed_tokens(token_ids)
            return own
        (embedding,) = self._shared_embedding
        if embedding is None:
            raise RuntimeError("this head was made without the target's embedding")
        return F.embedding(token_ids, embedding).to(self.fc.weight.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's three features `[B, T, 3 Ht]`, lowest depth first -> `[B, T, H]`."""
        fused: Tensor = self.fc(features)
        return fused

    def forward(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        steps: list[KeysValues] | None = None,
    ) -> Tensor:
        """One step for all rows: `[B, T, H]` in, `[B, T, H]` out, which the next step reads.

        Args:
            embeddings: row t: of the token behind what `hidden` stands for.
            hidden: `fuse(features)` in the first step, then what the step before gave.
            positions: `[T]` or `[B, T]`, at which keys and queries are rotated. In step s of
                training-time test row t stands for position t + s.
            mask: bool, broadcast to `[B, 1, T, T]`, True where row i sees row j of the first
                step; None: rows up to itself.
            steps: of training-time test: keys and values of the steps before, to which this
                call's are added. Of the first step a row sees what `mask` says, of each later one
                its own row alone, as it will be when drafting.
        """
        rotation = self.cos[positions], self.sin[positions]
        if positions.dim() == 2:  # the same for all heads
            rotation = rotation[0].unsqueeze(1), rotation[1].unsqueeze(1)
        out: Tensor = self.midlayer(embeddings, hidden, rotation, mask, steps)
        if self.config.norm_output:
            out = self.norm(out)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """What `forward` gave `[B, T, H]` -> `[B, T, D]` over the draft's vocabulary."""
        if not self.config.norm_output:
            hidden = self.norm(hidden)
        out: Tensor = self.lm_head(hidden)
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x [B, heads, T, D]` by cos and sin `[.., T, D / 2]`; i is paired with i + D / 2."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(queries: Tensor, steps: list[KeysValues], mask: Tensor | None) -> Tensor:
    """Softmax attention of `queries [B, heads, T, D]` in one softmax over: the first of `steps`,
    where `mask` allows (None: causal); of each later one, the query's own row.
    """
    heads, length = queries.shape[1], steps[0].keys.shape[2]
    groups = heads // steps[0].keys.shape[1]
    scale = queries.shape[-1] ** -0.5
    keys = [each.keys.repeat_interleave(groups, dim=1) for each in steps]
    values = [each.values.repeat_interleave(groups, dim=1) for each in steps]
    if len(steps) == 1:
        causal = mask is None
        return F.scaled_dot_product_attention(
            queries, keys[0], values[0], attn_mask=mask, is_causal=causal, scale=scale
        )
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=queries.device).tril()
    scores = (queries @ keys[0].transpose(-1, -2) * scale).masked_fill(~mask, -torch.inf)
    own = [(queries * each).sum(-1, keepdim=True) * scale for each in keys[1:]]
    wide = torch.promote_types(queries.dtype, torch.float32)
    weights = torch.cat([scores, *own], dim=-1).softmax(-1, dtype=wide).to(queries.dtype)
    attended = weights[..., :length] @ values[0]
    for i, each in enumerate(values[1:]):
        attended = attended + weights[..., length + i : length + i + 1] * each
    return attended
