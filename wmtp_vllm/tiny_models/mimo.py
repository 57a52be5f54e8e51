"""MiMo's form: the config and weight names of a small Qwen2-like model with one MTP layer."""

from typing import Any

import torch
from torch import Tensor

from wmtp_vllm.tiny_models.rotary import THETA

HIDDEN_SIZE = 256
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
INTERMEDIATE_SIZE = 256
NORM_GAIN = HIDDEN_SIZE**0.5
"""What RMSNorm multiplies a unit basis vector by."""
MTP_LAYER = "model.mtp_layers.0"


def config(layers: int, max_position_embeddings: int) -> dict[str, Any]:
    """config.json of a float32 MiMo; vLLM reads MiMo as a kind of Qwen2."""
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "max_window_layers": layers,
        "attention_dropout": 0.0,
        "torch_dtype": "float32",
    }


def blank_attention() -> dict[str, Tensor]:
    """Attention weights that do nothing, to be filled in; head h owns 64 rows from 64 * h."""
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        "q_proj.weight": torch.zeros(queries, HIDDEN_SIZE),
        "q_proj.bias": torch.zeros(queries),
        "k_proj.weight": torch.zeros(keys, HIDDEN_SIZE),
        "k_proj.bias": torch.zeros(keys),
        "v_proj.weight": torch.zeros(keys, HIDDEN_SIZE),
        "v_proj.bias": torch.zeros(keys),
        "o_proj.weight": torch.zeros(HIDDEN_SIZE, queries),
    }


def blank_mlp() -> dict[str, Tensor]:
    """MLP weights that do nothing."""
    return {
        "gate_proj.weight": torch.zeros(INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "up_proj.weight": torch.zeros(INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "down_proj.weight": torch.zeros(HIDDEN_SIZE, INTERMEDIATE_SIZE),
    }


def decoder_layer(
    prefix: str, attention: dict[str, Tensor], mlp: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The named weights of one decoder layer, target's or draft's; also of other forms."""
    norms = ("input_layernorm", "post_attention_layernorm")
    hidden_size = len(attention["o_proj.weight"])
    return (
        {f"{prefix}.self_attn.{name}": weight for name, weight in attention.items()}
        | {f"{prefix}.mlp.{name}": weight for name, weight in mlp.items()}
        | {f"{prefix}.{norm}.weight": torch.ones(hidden_size) for norm in norms}
    )


def mtp_entry(from_hidden: Tensor, from_embedding: Tensor) -> dict[str, Tensor]:
    """How the draft's block gets its input, with the norms around it.

    Args:
        from_hidden: applied to the normed hidden state that predicted the token, float32[256, 256].
        from_embedding: applied to the normed embedding of the token, float32[256, 256].
    """
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    return {f"{MTP_LAYER}.{norm}.weight": torch.ones(HIDDEN_SIZE) for norm in norms} | {
        f"{MTP_LAYER}.input_proj.weight": torch.cat([from_hidden, from_embedding], dim=1)
    }
