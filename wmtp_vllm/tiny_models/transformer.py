"""MiMo and its MTP head in plain torch: what vLLM computes, differentiable and without a KV cache.

The parameters carry the names of the checkpoint, so `state_dict` is its contents.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wmtp_vllm.tiny_models import mimo, rotary
from wmtp_vllm.tiny_models.checkpoint import VOCAB_SIZE

EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model; heads have `hidden // heads` channels."""

    hidden: int = 192
    layers: int = 3
    heads: int = 3
    kv_heads: int = 1
    intermediate: int = 512
    theta: float = rotary.THETA
    max_position_embeddings: int = 8192

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def config(self) -> dict[str, Any]:
        """config.json: MiMo's, with these sizes."""
        return mimo.config(self.layers, self.max_position_embeddings) | {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": EPS,
            "rope_theta": self.theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.theta},
        }


@dataclass(frozen=True)
class KV:
    """Keys and values, both [batch, heads, tokens, channels], one per query head."""

    keys: Tensor
    values: Tensor


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, EPS)


class Rotary(nn.Module):
    """Turns channel pairs (i, i + half) by position: the layout called neox in vLLM."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        exponents = torch.arange(0, sizes.head_dim, 2, dtype=torch.float32) / sizes.head_dim
        self.register_buffer("frequencies", sizes.theta**-exponents, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine for positions [batch, tokens]: two of [batch, 1, tokens, half]."""
        angles = positions[:, None, :, None] * self.get_buffer("frequencies")
        return angles.cos(), angles.sin()


def turn(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of [batch, heads, tokens, channels]."""
    cos, sin = rotation
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.q_proj = nn.Linear(sizes.hidden, sizes.hidden)
        self.k_proj = nn.Linear(sizes.hidden, sizes.kv_heads * sizes.head_dim)
        self.v_proj = nn.Linear(sizes.hidden, sizes.kv_heads * sizes.head_dim)
        self.o_proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def project(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, KV]:
        """Queries [batch, heads, tokens, channels], and the KV of the same tokens."""

        def by_head(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2)

        group = self.sizes.heads // self.sizes.kv_heads
        keys = turn(by_head(self.k_proj(x)), rotation).repeat_interleave(group, dim=1)
        values = by_head(self.v_proj(x)).repeat_interleave(group, dim=1)
        return turn(by_head(self.q_proj(x)), rotation), KV(keys, values)

    def output(self, attended: Tensor) -> Tensor:
        return self.o_proj(attended.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A decoder layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(sizes.hidden)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = RMSNorm(sizes.hidden)
        self.mlp = MLP(sizes)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, KV]:
        """Every token attends to itself and all before it. Returns the output and the KV."""
        queries, kv = self.self_attn.project(self.input_layernorm(x), rotation)
        attended = F.scaled_dot_product_attention(queries, kv.keys, kv.values, is_causal=True)
        return self.finish(x, attended), kv

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.self_attn.output(attended)
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(Block):
    """The MTP head: a decoder layer over a token's embedding and the hidden state before it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.token_layernorm = RMSNorm(sizes.hidden)
        self.hidden_layernorm = RMSNorm(sizes.hidden)
        self.input_proj = nn.Linear(2 * sizes.hidden, sizes.hidden, bias=False)
        self.final_layernorm = RMSNorm(sizes.hidden)

    def enter(self, hidden: Tensor, embedded: Tensor, positions: Tensor) -> Tensor:
        # vLLM hides the token at position 0 from the head.
        embedded = embedded * (positions != 0)[..., None]
        both = [self.hidden_layernorm(hidden), self.token_layernorm(embedded)]
        return self.input_proj(torch.cat(both, dim=-1))


class Trunk(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, sizes.hidden)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.hidden)
        self.mtp_layers = nn.ModuleList([Head(sizes)])


class Transformer(nn.Module):
    """The target and its draft.

    Shapes: tokens and positions are int64[batch, tokens], hidden states [batch, tokens, hidden],
    logits [batch, tokens, VOCAB_SIZE].
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.model = Trunk(sizes)
        self.lm_head = nn.Linear(sizes.hidden, VOCAB_SIZE, bias=False)
        self.rotary = Rotary(sizes)

    def target(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of each next token, and the hidden states that the draft gets."""
        rotation = self.rotary(positions)
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x, _ = layer(x, rotation)
        return self.lm_head(self.model.norm(x)), x

    def draft(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, starts: Tensor, depth: int
    ) -> list[Tensor]:
        """Logits of the token after the next one, and on from there as vLLM drafts.

        The first step runs on all positions. Each further step runs at the positions one later,
        with the token there and its own last output for a hidden state; it attends to what the first
        step left up to its start, and to the steps of its own chain.

        Args:
            hidden: the target's at `positions`.
            tokens: the token *after* each position.
            positions: position ids.
            starts: int64[chains], indices into the tokens from which chains go on. The chains are
                taken to end before the last token.
            depth: steps in all, at least 1.

        Returns:
            For each step its logits: the first [batch, tokens, VOCAB_SIZE], the others
            [batch, chains, VOCAB_SIZE].
        """
        (head,) = self.model.mtp_layers
        assert isinstance(head, Head)
        embedded = self.model.embed_tokens(tokens)
        entered = head.enter(hidden, embedded, positions)
        x, first = head(entered, self.rotary(positions))
        x = head.final_layernorm(x)
        logits = [self.lm_head(x)]
        x, chain = x[:, starts], []
        beyond = torch.arange(tokens.shape[1]) > starts[:, None]
        for step in range(1, depth):
            here = starts + step
            entered = head.enter(x, embedded[:, here], positions[:, here])
            queries, kv = head.self_attn.project(
                head.input_layernorm(entered), self.rotary(positions[:, here])
            )
            chain.append(kv)
            attended = _attend_chain(queries, first, beyond, chain)
            x = head.final_layernorm(head.finish(entered, attended))
            logits.append(self.lm_head(x))
        return logits


def _attend_chain(queries: Tensor, first: KV, beyond: Tensor, chain: list[KV]) -> Tensor:
    """Attention of one query a chain to the first step's KV, and to the chain's own.

    Args:
        queries: [batch, heads, chains, channels]; the KV of each step of `chain` likewise.
        first: KV of all tokens.
        beyond: bool[chains, tokens], what of `first` a chain does not have.
        chain: KV of this chain's steps, each a key for the query of the same chain only.
    """
    shared = (queries @ first.keys.transpose(-1, -2)).float().masked_fill(beyond, -torch.inf)
    own = [(queries * kv.keys).float().sum(-1, keepdim=True) for kv in chain]
    scores = torch.cat([shared, *own], dim=-1) / queries.shape[-1] ** 0.5
    weights = scores.softmax(-1).to(queries.dtype)
    tokens = first.keys.shape[2]
    attended = weights[..., :tokens] @ first.values
    for index, kv in enumerate(chain, start=tokens):
        attended = attended + weights[..., index : index + 1] * kv.values
    return attended
