"""The hybrid model: Qwen3-Next's form, bfloat16, with gated delta nets, experts and an MTP layer.

The full-attention layer follows the rule of `pointer.py`, and so does the MTP layer on its own KV.
The delta nets overrule it on one token in six. Each remembers, for 16 classes of tokens, what
followed the last token of that class; and on some tokens, which are its own, the model goes by that
memory instead. So a delta-net state that is lost, or not rolled back after a rejected draft, shows
in the output. The draft knows nothing of it, hence high but not full acceptance.

The hidden state is two fields of VOCAB_SIZE channels: the current token, which all layers read, and
the evidence for the next one, to which they write. Evidence from the rule and from a memory differ
so much in size that rounding never decides between tokens, although all of this is bfloat16.

Sizes are the least that vLLM's CPU kernels take: their delta net wants bfloat16 and heads of 128.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wmtp_vllm.tiny_models.checkpoint import FIRST_TEXT_TOKEN, VOCAB_SIZE, Checkpoint
from wmtp_vllm.tiny_models.pointer import Pointer, token_codes
from wmtp_vllm.tiny_models.rotary import THETA, landmark

HIDDEN_SIZE = 2 * VOCAB_SIZE
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
MEMORY_HEADS, MEMORY_DIM, CONV_TAPS = 2, 128, 4
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_SIZE = 4, 2, 64
LAYER_TYPES = ("full_attention", "linear_attention", "linear_attention", "linear_attention")

SHARPNESS = 16.0
"""Size of the look-back queries and keys per channel: the right distance wins by > 15 nats."""
RECALL = 8.0
"""Evidence from the rule. Half of it survives the squeeze into the value channels."""
MEMORY = 20.0
"""Evidence from a delta net's memory, on the tokens that are its own."""
MEMORY_CLASSES = 16
TOKENS_PER_MEMORY = 14
NOISE = 0.05
"""Standard deviation per channel of what one layer's experts add; too little to change a token."""
HIDDEN_LEAK = 0.01
"""How much of the previous hidden state enters the draft, relative to the token's embedding."""
LOGIT_SCALE = 0.625
"""Makes sampling at temperature 1 take the best token mostly, but not always."""

NORM_GAIN = HIDDEN_SIZE**0.5
"""What RMSNorm multiplies the current token by while there is no evidence yet."""
LATE_GAIN = 4.0
"""The same, about, where there is evidence from the rule beside it."""


@dataclass(frozen=True)
class HybridOptions:
    """Options of the hybrid model.

    Attributes:
        seed: of the tables, the classes and the noise.
        reach: how far back the rule looks at most, in tokens, at least 1.
        max_position_embeddings: longest context, in tokens.

    Raises:
        ValueError: an option is out of range.
    """

    seed: int = 0
    reach: int = 192
    max_position_embeddings: int = 262_144

    def __post_init__(self) -> None:
        if min(self.reach, self.max_position_embeddings) < 1:
            raise ValueError(f"reach and positions must be at least 1: {self}")


def hybrid(options: HybridOptions) -> Checkpoint:
    """Make the hybrid model. Same options, same weights."""
    rng = torch.Generator().manual_seed(options.seed)
    pointer = Pointer.draw(rng, options.reach)
    look_back = _pointer_attention(pointer, token_codes(KV_HEADS * HEAD_DIM, rng))
    shuffled = torch.randperm(VOCAB_SIZE - FIRST_TEXT_TOKEN, generator=rng) + FIRST_TEXT_TOKEN

    tensors = {
        "model.embed_tokens.weight": _reads_token(torch.eye(VOCAB_SIZE)),
        "model.norm.weight": _norm(HIDDEN_SIZE),
        "lm_head.weight": _writes_evidence(pointer.unembedding(LOGIT_SCALE).T).T,
    }
    for layer, kind in enumerate(LAYER_TYPES):
        owned = shuffled[layer * TOKENS_PER_MEMORY : (layer + 1) * TOKENS_PER_MEMORY]
        mixer = look_back if kind == "full_attention" else _memory(rng, owned)
        tensors |= _decoder_layer(f"model.layers.{layer}", mixer, _random_experts(rng))

    tensors |= _decoder_layer("mtp.layers.0", look_back, _random_experts(rng))
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{norm}.weight"] = _norm(HIDDEN_SIZE)
    leak = torch.randn(HIDDEN_SIZE, HIDDEN_SIZE, generator=rng) * HIDDEN_LEAK
    tensors["mtp.fc.weight"] = torch.cat([torch.eye(HIDDEN_SIZE), leak], dim=1) / NORM_GAIN
    tensors = {name: weight.bfloat16() for name, weight in tensors.items()}
    return Checkpoint(_config(options.max_position_embeddings), tensors)


def _config(max_position_embeddings: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": EXPERT_SIZE,
        "num_hidden_layers": len(LAYER_TYPES),
        "layer_types": list(LAYER_TYPES),
        "num_nextn_predict_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "linear_num_key_heads": MEMORY_HEADS,
        "linear_num_value_heads": MEMORY_HEADS,
        "linear_key_head_dim": MEMORY_DIM,
        "linear_value_head_dim": MEMORY_DIM,
        "linear_conv_kernel_dim": CONV_TAPS,
        "decoder_sparse_step": 1,
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_intermediate_size": EXPERT_SIZE,
        "shared_expert_intermediate_size": EXPERT_SIZE,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": THETA,
            "partial_rotary_factor": 1.0,
        },
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "torch_dtype": "bfloat16",
    }


def _norm(size: int, gain: float = 1.0) -> Tensor:
    """Weight of an RMSNorm that multiplies by `gain`: Qwen3-Next stores the gain minus one."""
    return torch.full((size,), gain - 1.0)


def _reads_token(weight: Tensor) -> Tensor:
    """Let a weight [n, VOCAB_SIZE] read the field of the current token: [n, HIDDEN_SIZE]."""
    return torch.cat([weight, torch.zeros_like(weight)], dim=1)


def _writes_evidence(weight: Tensor) -> Tensor:
    """Let a weight [VOCAB_SIZE, n] write to the field of evidence: [HIDDEN_SIZE, n]."""
    return torch.cat([torch.zeros_like(weight), weight], dim=0)


def _decoder_layer(
    prefix: str, mixer: dict[str, Tensor], experts: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The named weights of one decoder layer, target's or draft's."""
    norms = ("input_layernorm", "post_attention_layernorm")
    return (
        {f"{prefix}.{name}": weight for name, weight in mixer.items()}
        | {f"{prefix}.mlp.{name}": weight for name, weight in experts.items()}
        | {f"{prefix}.{norm}.weight": _norm(HIDDEN_SIZE) for norm in norms}
    )


def _pointer_attention(pointer: Pointer, codes: Tensor) -> dict[str, Tensor]:
    """Attention that adds the token found; all heads look alike.

    There are no biases here: every token's key weight is the landmark, and the norms of queries and
    keys set their size.
    """
    group = HEADS // KV_HEADS
    codes_of_head = codes.view(KV_HEADS, HEAD_DIM, VOCAB_SIZE).repeat_interleave(group, dim=0)
    key = landmark(HEAD_DIM)
    gain = SHARPNESS * float(key.square().mean().sqrt())
    queries = pointer.queries(HEAD_DIM)
    half_open = torch.zeros_like(queries)  # the output gate beside each query: sigmoid(0) = 1/2
    return {
        "self_attn.q_proj.weight": _reads_token(
            torch.cat([queries, half_open]).repeat(HEADS, 1) / NORM_GAIN
        ),
        "self_attn.k_proj.weight": _reads_token(
            key.repeat(KV_HEADS)[:, None].expand(-1, VOCAB_SIZE) / NORM_GAIN
        ),
        "self_attn.v_proj.weight": _reads_token(codes / NORM_GAIN),
        "self_attn.o_proj.weight": _writes_evidence(
            codes_of_head.flatten(0, 1).T * (RECALL * 2 / group)
        ),
        "self_attn.q_norm.weight": _norm(HEAD_DIM, gain),
        "self_attn.k_norm.weight": _norm(HEAD_DIM, gain),
    }


def _memory(rng: torch.Generator, owned: Tensor) -> dict[str, Tensor]:
    """A delta net that remembers what followed each class of tokens, used on the tokens `owned`.

    It writes "class of the previous token -> current token" and reads at the class of the current
    token. The classes are orthogonal keys, so a write replaces exactly what was there.
    """
    classes = torch.randint(MEMORY_CLASSES, (VOCAB_SIZE,), generator=rng)
    key = torch.zeros(MEMORY_HEADS, MEMORY_DIM, VOCAB_SIZE)
    key[:, classes, torch.arange(VOCAB_SIZE)] = 8.0
    # The two heads hold half of a token's code each. Large values come out of silu as 8 or 0.
    codes = token_codes(MEMORY_HEADS * MEMORY_DIM, rng)
    value = codes.sign().view(MEMORY_HEADS, MEMORY_DIM, VOCAB_SIZE) * 8.0
    gate = torch.zeros(MEMORY_HEADS, MEMORY_DIM, VOCAB_SIZE)
    gate[:, :, owned] = 4.0  # and silu(0) = 0 keeps all other tokens out, exactly
    write_strength = torch.full((MEMORY_HEADS, 1, VOCAB_SIZE), 12.0)  # sigmoid(12) = 1
    forgetting = torch.zeros(MEMORY_HEADS, 1, VOCAB_SIZE)

    # The normed read is the code as sqrt(2) or 0, so half of it is constant. The constant part adds
    # up in the channel of token 0 alone, where it is dropped.
    recall = codes.T * (MEMORY / (4.0 * 2**-0.5 * VOCAB_SIZE**0.5))
    recall[0] = 0.0
    newest, previous = torch.eye(CONV_TAPS)[-1], torch.eye(CONV_TAPS)[-2]
    width = MEMORY_HEADS * MEMORY_DIM
    taps = torch.cat([tap.repeat(width, 1, 1) for tap in (newest, previous, newest)])
    return {
        # For each head its query, key, value and gate; then its write strength and forgetting.
        "linear_attn.in_proj_qkvz.weight": _reads_token(
            torch.cat([key, key, value, gate], dim=1).flatten(0, 1) / LATE_GAIN
        ),
        "linear_attn.in_proj_ba.weight": _reads_token(
            torch.cat([write_strength, forgetting], dim=1).flatten(0, 1) / LATE_GAIN
        ),
        "linear_attn.conv1d.weight": taps,
        "linear_attn.dt_bias": torch.ones(MEMORY_HEADS),
        "linear_attn.A_log": torch.full((MEMORY_HEADS,), -20.0),  # forgets nothing by itself
        "linear_attn.norm.weight": torch.ones(MEMORY_DIM),
        "linear_attn.out_proj.weight": _writes_evidence(recall),
    }


def _random_experts(rng: torch.Generator) -> dict[str, Tensor]:
    """Routed experts and a shared one that together add about NOISE to each channel of evidence."""
    weights = {
        "gate.weight": torch.randn(EXPERTS, HIDDEN_SIZE, generator=rng) / NORM_GAIN,
        "shared_expert_gate.weight": torch.randn(1, HIDDEN_SIZE, generator=rng) / NORM_GAIN,
    }
    gated = 0.6 * EXPERT_SIZE**0.5  # deviation of a random sum of silu(x) * y, x and y normal
    for expert in ("shared_expert", *(f"experts.{i}" for i in range(EXPERTS))):
        for name in ("gate_proj", "up_proj"):
            up = torch.randn(EXPERT_SIZE, HIDDEN_SIZE, generator=rng) / NORM_GAIN
            weights[f"{expert}.{name}.weight"] = up
        down = torch.randn(VOCAB_SIZE, EXPERT_SIZE, generator=rng) * (NOISE / gated)
        weights[f"{expert}.down_proj.weight"] = _writes_evidence(down)
    return weights
