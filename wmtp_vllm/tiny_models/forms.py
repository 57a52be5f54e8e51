"""The pointer model in other families' forms: GLM-4.5's, and Llama's with an EAGLE-3 head.

Layers are those of `dense.py`, float32; what differs is how a family names and joins them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wmtp_vllm.tiny_models import mimo
from wmtp_vllm.tiny_models.checkpoint import VOCAB_SIZE, Checkpoint
from wmtp_vllm.tiny_models.dense import (
    DRAFT_NOISE,
    HIDDEN_LEAK,
    LOGIT_SCALE,
    NOISE,
    DenseOptions,
    pointer_attention,
    random_attention,
    random_mlp,
)
from wmtp_vllm.tiny_models.mimo import (
    HEAD_DIM,
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    KV_HEADS,
    NORM_GAIN,
)
from wmtp_vllm.tiny_models.pointer import Pointer, token_codes

EXPERTS = 2
AUX_LAYERS = (1, 2, 3)
"""Target layers whose input an EAGLE-3 head is given."""
SMALL = 0.01


@dataclass(frozen=True)
class FormOptions(DenseOptions):
    """Options of these models: the dense model's, and one more. An EAGLE-3 head's has at least 4 layers.

    Attributes:
        modules: MTP modules in a row (GLM only), at least 1.

    Raises:
        ValueError: an option is out of range.
    """

    max_position_embeddings: int = 131_072
    modules: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.modules < 1:
            raise ValueError(f"modules must be at least 1: {self}")


@dataclass(frozen=True)
class Parts:
    """What all forms are put together from."""

    pointer: Pointer
    look_back: dict[str, Tensor]
    rng: torch.Generator

    @classmethod
    def draw(cls, options: FormOptions) -> "Parts":
        rng = torch.Generator().manual_seed(options.seed)
        pointer = Pointer.draw(rng, options.reach)
        return cls(pointer, pointer_attention(pointer, token_codes(KV_HEADS * HEAD_DIM, rng)), rng)

    def target(self, options: FormOptions) -> dict[str, Tensor]:
        """All of the target but its MTP head."""
        share = NOISE / (2 * options.layers - 1) ** 0.5
        tensors = {
            "model.embed_tokens.weight": torch.eye(HIDDEN_SIZE),
            "model.norm.weight": torch.ones(HIDDEN_SIZE),
            "lm_head.weight": self.pointer.unembedding(LOGIT_SCALE),
        }
        for layer in range(options.layers):
            attention = random_attention(self.rng, share) if layer else self.look_back
            mlp = random_mlp(self.rng, share)
            tensors |= mimo.decoder_layer(f"model.layers.{layer}", attention, mlp)
        return tensors


def glm(options: FormOptions) -> Checkpoint:
    """GLM-4.5's form: each layer's MLP is the shared expert of a mixture whose others are silent.

    Each MTP module follows the rule on KV of its own.
    """
    parts = Parts.draw(options)
    tensors = parts.target(options)
    for module in range(options.modules):
        prefix = f"model.layers.{options.layers + module}"
        tensors |= mimo.decoder_layer(
            prefix, parts.look_back, random_mlp(parts.rng, DRAFT_NOISE)
        ) | {
            f"{prefix}.{name}.weight": torch.ones(HIDDEN_SIZE)
            for name in ("enorm", "hnorm", "shared_head.norm")
        }
        leak = torch.randn(HIDDEN_SIZE, HIDDEN_SIZE, generator=parts.rng) * HIDDEN_LEAK
        tensors[f"{prefix}.eh_proj.weight"] = (
            torch.cat([torch.eye(HIDDEN_SIZE), leak], dim=1) / NORM_GAIN
        )
        tensors[f"{prefix}.embed_tokens.weight"] = torch.eye(HIDDEN_SIZE)
        tensors[f"{prefix}.shared_head.head.weight"] = tensors["lm_head.weight"]
    tensors = {name.replace(".mlp.", ".mlp.shared_experts."): t for name, t in tensors.items()}
    for layer in range(options.layers + options.modules):
        prefix = f"model.layers.{layer}.mlp"
        tensors[f"{prefix}.gate.weight"] = torch.zeros(EXPERTS, HIDDEN_SIZE)
        tensors[f"{prefix}.gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
        for expert in range(EXPERTS):
            for name, silent in mimo.blank_mlp().items():
                tensors[f"{prefix}.experts.{expert}.{name}"] = silent
    config = _config(options) | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "num_nextn_predict_layers": options.modules,
        "attention_bias": True,
        "use_qk_norm": False,
        "partial_rotary_factor": 1.0,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": INTERMEDIATE_SIZE,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }
    config["rope_parameters"] |= {"partial_rotary_factor": 1.0}
    return Checkpoint(config, tensors)


def llama(options: FormOptions) -> Checkpoint:
    """Llama's form, without a head: a target for `eagle3`."""
    tensors = Parts.draw(options).target(options)
    return Checkpoint(_llama_config(options), _with_output_biases(tensors))


def eagle3(options: FormOptions) -> Checkpoint:
    """An EAGLE-3 head for the Llama of the same seed and reach, which has `layers` layers.

    Its residual stream is the hidden state that it is given; that is kept small, so that the rule's
    word counts.
    """
    if options.layers <= max(AUX_LAYERS):
        raise ValueError(f"an EAGLE-3 head reads layers {AUX_LAYERS}; layers={options.layers}")
    parts = Parts.draw(options)
    own, double = HIDDEN_SIZE, 2 * HIDDEN_SIZE
    attention = dict(parts.look_back)
    for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
        widened = torch.zeros(len(attention[name]), double)
        widened[:, :own] = attention[name]  # of the embedding, which stands first
        attention[name] = widened
    layer = mimo.decoder_layer("midlayer", attention, random_mlp(parts.rng, DRAFT_NOISE))
    tensors = _with_output_biases(layer) | {
        "midlayer.hidden_norm.weight": torch.full((own,), SMALL),
        "fc.weight": torch.eye(own).repeat(1, len(AUX_LAYERS)) / len(AUX_LAYERS),
        "norm.weight": torch.ones(own),
        "embed_tokens.weight": torch.eye(own),
        "lm_head.weight": parts.pointer.unembedding(LOGIT_SCALE),
    }
    config = _llama_config(options) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCAB_SIZE,
        "norm_before_residual": True,
        # Where Model Runner V2 looks, and where V1 does.
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS)},
    }
    return Checkpoint(config, tensors)


def _config(options: FormOptions) -> dict[str, Any]:
    made = mimo.config(options.layers, options.max_position_embeddings)
    qwen2_only = ("use_sliding_window", "max_window_layers", "num_nextn_predict_layers")
    return {k: v for k, v in made.items() if k not in qwen2_only} | {"head_dim": HEAD_DIM}


def _llama_config(options: FormOptions) -> dict[str, Any]:
    return _config(options) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": False,
    }


def _with_output_biases(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Llama's attention has a bias everywhere or nowhere."""
    biases = {
        name.replace("o_proj.weight", "o_proj.bias"): torch.zeros(len(weight))
        for name, weight in tensors.items()
        if name.endswith("o_proj.weight")
    }
    return tensors | biases
