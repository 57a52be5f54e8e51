"""The pointer model with multi-head latent attention: DeepSeek-V3's form, dense.

Latent channel v stands for token v. A look back is all in the channels that carry positions; the
landmark that it finds comes from a channel of the hidden state that is the same for all tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wmtp_vllm.tiny_models.checkpoint import VOCAB_SIZE, Checkpoint
from wmtp_vllm.tiny_models.dense import (
    DRAFT_NOISE,
    HIDDEN_LEAK,
    LOGIT_SCALE,
    NOISE,
    RECALL,
    DenseOptions,
)
from wmtp_vllm.tiny_models.mimo import decoder_layer
from wmtp_vllm.tiny_models.pointer import Pointer, token_codes
from wmtp_vllm.tiny_models.rotary import THETA, landmark

HIDDEN_SIZE = 512
TOKENS, CONSTANT = slice(0, VOCAB_SIZE), VOCAB_SIZE
"""Channels of the hidden state: a token's, and the one that is always 1."""
HEADS, NOPE_DIM, ROPE_DIM, VALUE_DIM = 4, 32, 64, 64
LATENT_SIZE = 512
"""With `ROPE_DIM` the one size that vLLM's CPU kernel takes."""
INTERMEDIATE_SIZE = 256
HIDDEN_GAIN = (HIDDEN_SIZE / 2) ** 0.5
"""What RMSNorm multiplies an embedding by: a token's 1 and the constant 1."""
LATENT_GAIN = LATENT_SIZE**0.5
SHARPNESS = 18.0


@dataclass(frozen=True)
class MLAOptions(DenseOptions):
    """Options of the MLA model: the dense model's."""

    max_position_embeddings: int = 65_536


def mla(options: MLAOptions) -> Checkpoint:
    """Make the MLA model. Same options, same weights."""
    rng = torch.Generator().manual_seed(options.seed)
    pointer = Pointer.draw(rng, options.reach)
    look_back = _pointer_attention(pointer, token_codes(HEADS * VALUE_DIM, rng))
    silent = look_back | {"o_proj.weight": torch.zeros(HIDDEN_SIZE, HEADS * VALUE_DIM)}
    share = NOISE / options.layers**0.5

    embedding = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)
    embedding[:, TOKENS] = torch.eye(VOCAB_SIZE)
    embedding[:, CONSTANT] = 1
    unembedding = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)
    unembedding[:, TOKENS] = pointer.unembedding(LOGIT_SCALE)
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN_SIZE),
        "lm_head.weight": unembedding,
    }
    for layer in range(options.layers):
        attention = silent if layer else look_back
        tensors |= decoder_layer(f"model.layers.{layer}", attention, _random_mlp(rng, share))

    head = f"model.layers.{options.layers}"
    entry = torch.zeros(HIDDEN_SIZE, 2 * HIDDEN_SIZE)
    entry[:, :HIDDEN_SIZE] = torch.eye(HIDDEN_SIZE)
    leak = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=rng) * HIDDEN_LEAK
    entry[TOKENS, HIDDEN_SIZE:] = leak
    tensors |= decoder_layer(head, look_back, _random_mlp(rng, DRAFT_NOISE)) | {
        f"{head}.eh_proj.weight": entry / HIDDEN_GAIN,
        f"{head}.embed_tokens.weight": embedding,
        f"{head}.shared_head.head.weight": unembedding,
        **{
            f"{head}.{norm}.weight": torch.ones(HIDDEN_SIZE)
            for norm in ("enorm", "hnorm", "shared_head.norm")
        },
    }
    return Checkpoint(_config(options), tensors)


def _pointer_attention(pointer: Pointer, codes: Tensor) -> dict[str, Tensor]:
    """Attention that adds the token found; all heads look alike, each copies its share of the code."""
    turned = _interleaved(pointer.queries(ROPE_DIM))
    query = torch.zeros(HEADS, NOPE_DIM + ROPE_DIM, HIDDEN_SIZE)
    query[:, NOPE_DIM:, TOKENS] = turned * SHARPNESS / HIDDEN_GAIN
    latent = torch.zeros(LATENT_SIZE + ROPE_DIM, HIDDEN_SIZE)
    latent[TOKENS, TOKENS] = torch.eye(VOCAB_SIZE) / HIDDEN_GAIN
    key = _interleaved(landmark(ROPE_DIM)[:, None])[:, 0]
    latent[LATENT_SIZE:, CONSTANT] = key * SHARPNESS / HIDDEN_GAIN
    keys_and_values = torch.zeros(HEADS, NOPE_DIM + VALUE_DIM, LATENT_SIZE)
    keys_and_values[:, NOPE_DIM:, TOKENS] = codes.view(HEADS, VALUE_DIM, VOCAB_SIZE) / LATENT_GAIN
    output = torch.zeros(HIDDEN_SIZE, HEADS * VALUE_DIM)
    output[TOKENS] = codes.T * RECALL / 2
    return {
        "q_proj.weight": query.flatten(0, 1),
        "kv_a_proj_with_mqa.weight": latent,
        "kv_a_layernorm.weight": torch.ones(LATENT_SIZE),
        "kv_b_proj.weight": keys_and_values.flatten(0, 1),
        "o_proj.weight": output,
    }


def _interleaved(neox: Tensor) -> Tensor:
    """Rows of pairs (f, f + half) as rows of pairs (2f, 2f + 1), which DeepSeek turns."""
    return torch.stack(neox.chunk(2)).transpose(0, 1).flatten(0, 1)


def _random_mlp(rng: torch.Generator, deviation: float) -> dict[str, Tensor]:
    """A gated MLP that adds about `deviation` to a token's channel, and nothing to the constant."""
    gated = 0.6 * INTERMEDIATE_SIZE**0.5  # deviation of a random sum of silu(x) * y, x, y normal
    down = torch.zeros(HIDDEN_SIZE, INTERMEDIATE_SIZE)
    noise = torch.randn(VOCAB_SIZE, INTERMEDIATE_SIZE, generator=rng)
    down[TOKENS] = noise * (deviation / gated)
    made = {"down_proj.weight": down}
    for name in ("gate_proj.weight", "up_proj.weight"):
        made[name] = torch.randn(INTERMEDIATE_SIZE, HIDDEN_SIZE, generator=rng) / HIDDEN_SIZE**0.5
    return made


def _config(options: MLAOptions) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "moe_intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": options.layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": None,
        "kv_lora_rank": LATENT_SIZE,
        "qk_nope_head_dim": NOPE_DIM,
        "qk_rope_head_dim": ROPE_DIM,
        "v_head_dim": VALUE_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": options.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        # No layer reaches the experts, but vLLM asks for how many there are.
        "first_k_dense_replace": options.layers + 1,
        "moe_layer_freq": 1,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "float32",
    }
