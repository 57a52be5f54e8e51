"""The weights that training starts from, the target's and then the draft's: with a hint of how to copy.

Copying takes two heads in a row: one that says which tokens stand before a place, and one that looks
for the places before which the last tokens stand, and names what comes there. That pair is found late
in training, all at once, after longer than there is; by the draft, which has a single layer and the
target's hidden states, not at all. So some channels of the hidden state are *lanes*: to lane n the
first layer adds the code of the token n places back, and no other layer writes there. And one head of
the target and one of the draft start out comparing lanes; what they compare and pass on, and all else,
is learned.
"""

import torch
from torch import Tensor

from wmtp_vllm.tiny_models import rotary
from wmtp_vllm.tiny_models.transformer import Attention, Block, Head, Transformer

LANES, LANE_WIDTH = 4, 16
COMPARED = LANES - 1
"""Tokens that are compared: those before a place with the last ones, itself included."""
LOOK_BACK_SHARPNESS = 9.0
MATCH_SHARPNESS = 1.5
COPY_GAIN = 4.0
QUIET, UNEMBED = 0.2, 0.02

ALL_LANES = slice(0, LANES * LANE_WIDTH)
OTHERS = slice(LANES * LANE_WIDTH, None)


def lane(distance: int) -> slice:
    """Channels with the code of the token `distance` places back."""
    return slice(distance * LANE_WIDTH, (distance + 1) * LANE_WIDTH)


@torch.no_grad()
def initialise(model: Transformer, rng: torch.Generator) -> None:
    """Fill in all parameters, and see to it that training leaves the lanes alone."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            scale = QUIET if name.endswith(("down_proj.weight", "lm_head.weight")) else 1.0
            torch.nn.init.normal_(parameter, std=scale * parameter.shape[1] ** -0.5, generator=rng)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
    trunk, sizes = model.model, model.sizes
    torch.nn.init.normal_(trunk.embed_tokens.weight, generator=rng)
    model.lm_head.weight.copy_(trunk.embed_tokens.weight * UNEMBED)

    first, second = trunk.layers[:2]
    (head,) = trunk.mtp_layers
    assert isinstance(first, Block)
    assert isinstance(second, Block)
    assert isinstance(head, Head)
    for block in (*trunk.layers, head):
        assert isinstance(block, Block)
        for output in (block.self_attn.o_proj, block.mlp.down_proj):
            _keep(output.weight, ALL_LANES)
            output.weight[ALL_LANES] = 0
    _look_back(first.self_attn)

    projections = torch.stack(
        [
            _orthonormal(len(rotary.content_channels(sizes.head_dim)), LANE_WIDTH, rng)
            for _ in range(COMPARED)
        ]
    )
    code = torch.zeros(sizes.head_dim, sizes.hidden)
    code[:, OTHERS] = _orthonormal(sizes.head_dim, sizes.hidden - LANES * LANE_WIDTH, rng)
    _match(second.self_attn, projections, code)

    # In the draft the last token comes in by its embedding, those before it by the hidden state.
    entry, own = head.input_proj.weight, torch.eye(sizes.hidden)
    entry[:, : sizes.hidden] = _orthonormal(sizes.hidden, sizes.hidden, rng)
    entry[:, sizes.hidden :] = own
    entry[ALL_LANES] = 0
    entry[lane(0), sizes.hidden :] = own[lane(0)]
    for distance in range(1, LANES):
        entry[lane(distance), : sizes.hidden] = own[lane(distance - 1)]
    _keep(entry, ALL_LANES)
    _match(head.self_attn, projections, code)


def _keep(weight: Tensor, rows: slice) -> None:
    """Leave these rows as they are in training."""

    def mute(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[rows] = 0
        return gradient

    weight.register_hook(mute)


def _orthonormal(rows: int, columns: int, rng: torch.Generator) -> Tensor:
    made = torch.empty(rows, columns)
    return torch.nn.init.orthogonal_(made, generator=rng)


def _look_back(attention: Attention) -> None:
    """Head n looks n + 1 tokens back, by position alone, and fills a lane with what it finds there."""
    size, own = attention.sizes.head_dim, torch.eye(attention.sizes.hidden)
    attention.k_proj.weight.zero_()
    attention.q_proj.weight.zero_()
    attention.k_proj.bias.copy_(LOOK_BACK_SHARPNESS * rotary.landmark(size))
    distances = torch.arange(1, LANES)
    queries = rotary.look_back(distances, size).flatten()
    attention.q_proj.bias.copy_(LOOK_BACK_SHARPNESS * queries)
    for projection in (attention.q_proj, attention.k_proj):
        projection.requires_grad_(False)
    found = slice(0, LANE_WIDTH)
    attention.v_proj.weight[found] = own[lane(0)]
    _keep(attention.v_proj.weight, found)
    attention.v_proj.bias.requires_grad_(False)
    for head in range(LANES - 1):
        columns = slice(head * size, head * size + LANE_WIDTH)
        attention.o_proj.weight[lane(head + 1), columns] = torch.eye(LANE_WIDTH)


def _match(attention: Attention, projections: Tensor, code: Tensor) -> None:
    """Head 0 looks where the tokens before are the last ones here, and copies the code there.

    It compares in the channels that barely turn, so that it holds at any distance.

    Args:
        attention: whose only KV head all heads share.
        projections: [COMPARED, channels, LANE_WIDTH], of a lane into what is compared.
        code: [head_dim, hidden], what is copied of a token.
    """
    size = attention.sizes.head_dim
    content = rotary.content_channels(size)
    attention.q_proj.weight[:size] = 0
    attention.k_proj.weight[content] = 0
    for distance, projection in enumerate(projections):
        attention.q_proj.weight[content, lane(distance)] = projection * MATCH_SHARPNESS
        attention.k_proj.weight[content, lane(distance + 1)] = projection * MATCH_SHARPNESS
    attention.v_proj.weight.copy_(code)
    attention.o_proj.weight[OTHERS, :size] = code.T[OTHERS] * COPY_GAIN
