"""The dense model: MiMo's form, float32, a pointer model with a little noise from every layer.

Layer 0 of the target follows the rule of `pointer.py`; its MLP and all later layers are random and
change about one token in six, so every weight and every KV entry has its say in the output. The
MTP block follows the same rule on its own KV and knows nothing of the noise, so it is right about
five times in six: while it sees the last `reach` tokens, whatever lies before them.

Hidden channel v stands for token v; the hidden size is the size of the vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from wmtp_vllm.tiny_models import mimo
from wmtp_vllm.tiny_models.checkpoint import Checkpoint
from wmtp_vllm.tiny_models.mimo import (
    HEAD_DIM,
    HEADS,
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    KV_HEADS,
    NORM_GAIN,
)
from wmtp_vllm.tiny_models.pointer import Pointer, token_codes
from wmtp_vllm.tiny_models.rotary import landmark

SHARPNESS = 16.0
"""Size of the look-back queries and keys per channel: the right distance wins by > 15 nats."""
RECALL = 8.0
"""Weight of the token found, against 1 for the current token and NOISE for chance. Half of it
survives the squeeze into the value channels."""
NOISE = 1.15
"""Standard deviation, per hidden channel, of all the target's random contributions together."""
DRAFT_NOISE = 0.2
LOGIT_SCALE = 4.0
"""Makes sampling at temperature 1 take the best token mostly, but not always."""
HIDDEN_LEAK = 0.01
"""How much of the previous hidden state enters the draft, relative to the token's embedding."""


@dataclass(frozen=True)
class DenseOptions:
    """Options of the dense model.

    Attributes:
        layers: decoder layers of the target, at least 1.
        seed: of the tables and of the noise.
        reach: how far back the rule looks at most, in tokens, at least 1.
        max_position_embeddings: longest context, in tokens.

    Raises:
        ValueError: an option is out of range.
    """

    layers: int = 2
    seed: int = 0
    reach: int = 192
    max_position_embeddings: int = 524_288

    def __post_init__(self) -> None:
        if min(self.layers, self.reach, self.max_position_embeddings) < 1:
            raise ValueError(f"layers, reach and positions must be at least 1: {self}")


def dense(options: DenseOptions) -> Checkpoint:
    """Make the dense model. Same options, same weights."""
    rng = torch.Generator().manual_seed(options.seed)
    pointer = Pointer.draw(rng, options.reach)
    look_back = pointer_attention(pointer, token_codes(KV_HEADS * HEAD_DIM, rng))
    # The attention of layer 0 is the pointer; every other attention and MLP is noise.
    share = NOISE / (2 * options.layers - 1) ** 0.5

    tensors = {
        "model.embed_tokens.weight": torch.eye(HIDDEN_SIZE),
        "model.norm.weight": torch.ones(HIDDEN_SIZE),
        "lm_head.weight": pointer.unembedding(LOGIT_SCALE),
    }
    for layer in range(options.layers):
        attention = random_attention(rng, share) if layer else look_back
        mlp = random_mlp(rng, share)
        tensors |= mimo.decoder_layer(f"model.layers.{layer}", attention, mlp)

    tensors |= mimo.decoder_layer(mimo.MTP_LAYER, look_back, random_mlp(rng, DRAFT_NOISE))
    leak = torch.randn(HIDDEN_SIZE, HIDDEN_SIZE, generator=rng) * HIDDEN_LEAK
    tensors |= mimo.mtp_entry(leak / NORM_GAIN, torch.eye(HIDDEN_SIZE) / NORM_GAIN)
    return Checkpoint(mimo.config(options.layers, options.max_position_embeddings), tensors)


def pointer_attention(pointer: Pointer, codes: Tensor) -> dict[str, Tensor]:
    """Attention that adds the token found; all heads look alike.

    The keys are biases, so that what leaks into the draft's hidden state cannot blur them.
    """
    group = HEADS // KV_HEADS
    codes_of_head = codes.view(KV_HEADS, HEAD_DIM, HIDDEN_SIZE).repeat_interleave(group, dim=0)
    return mimo.blank_attention() | {
        "q_proj.weight": pointer.queries(HEAD_DIM).repeat(HEADS, 1) * SHARPNESS / NORM_GAIN,
        "k_proj.bias": landmark(HEAD_DIM).repeat(KV_HEADS) * SHARPNESS,
        "v_proj.weight": codes / NORM_GAIN,
        "o_proj.weight": codes_of_head.flatten(0, 1).T * RECALL / group,
    }


def random_attention(rng: torch.Generator, deviation: float) -> dict[str, Tensor]:
    """Attention that follows random likings, and adds at most `deviation` to a channel."""
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    scale = deviation / queries**0.5
    liking = 1.7 / NORM_GAIN  # scores of deviation 3: a few keys share most of the weight
    return mimo.blank_attention() | {
        "q_proj.weight": torch.randn(queries, HIDDEN_SIZE, generator=rng) * liking,
        "k_proj.weight": torch.randn(keys, HIDDEN_SIZE, generator=rng) * liking,
        "v_proj.weight": torch.randn(keys, HIDDEN_SIZE, generator=rng) / NORM_GAIN,
        "o_proj.weight": torch.randn(HIDDEN_SIZE, queries, generator=rng) * scale,
    }


def random_mlp(rng: torch.Generator, deviation: float) -> dict[str, Tensor]:
    """A gated MLP that adds about `deviation` to a channel."""
    gated = 0.6 * INTERMEDIATE_SIZE**0.5  # deviation of a random sum of silu(x) * y, x, y normal
    down = torch.randn(HIDDEN_SIZE, INTERMEDIATE_SIZE, generator=rng) * (deviation / gated)
    return {
        "gate_proj.weight": torch.randn(INTERMEDIATE_SIZE, HIDDEN_SIZE, generator=rng) / NORM_GAIN,
        "up_proj.weight": torch.randn(INTERMEDIATE_SIZE, HIDDEN_SIZE, generator=rng) / NORM_GAIN,
        "down_proj.weight": down,
    }
