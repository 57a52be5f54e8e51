"""The weights that training starts from, the target's and then the draft's: with a hint of how to copy.

Copying takes two heads in a row: one that says which token stands before a place, and one that looks
for the places before which the current token stands. That pair is found late in training, all at once,
after longer than there is. So some heads start out as such a pair; what they pass on, and all else, is
learned.
"""

import torch
from torch import Tensor

from wmtp_vllm.tiny_models.transformer import Attention, Head, Transformer

LOOK_BACK = (1, 2, 3)
"""Distances, in tokens, of the first heads of the first layer. They share a KV head."""
LOOK_BACK_SHARPNESS = 5.0
MATCH_SHARPNESS = 2.5
COPY_GAIN = 4.0
QUIET, UNEMBED = 0.2, 0.02


def initialise(model: Transformer, rng: torch.Generator) -> None:
    """Fill in all parameters."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            scale = QUIET if name.endswith(("down_proj.weight", "lm_head.weight")) else 1.0
            torch.nn.init.normal_(parameter, std=scale * parameter.shape[1] ** -0.5, generator=rng)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
    trunk, sizes = model.model, model.sizes
    torch.nn.init.normal_(trunk.embed_tokens.weight, generator=rng)
    model.lm_head.weight.data.copy_(trunk.embed_tokens.weight * UNEMBED)

    code = _orthonormal(sizes.head_dim, sizes.hidden, rng)
    compared = _orthonormal(sizes.head_dim // 2, sizes.head_dim, rng) @ code
    with torch.no_grad():
        first, second = (layer.self_attn for layer in trunk.layers[:2])
        assert isinstance(first, Attention)
        assert isinstance(second, Attention)
        _look_back(first, model.rotary.get_buffer("frequencies"))
        first.v_proj.weight[: sizes.head_dim] = code
        # What head 0 writes is the code of the previous token, in channels of its own.
        written = _orthonormal(sizes.head_dim, sizes.hidden, rng).T
        first.o_proj.weight[:, : sizes.head_dim] = written * 2
        _match(second, compared, compared @ code.T @ written.T, code, COPY_GAIN)

        # In the draft the token comes in by its embedding, the one before by the hidden state.
        (head,) = trunk.mtp_layers
        assert isinstance(head, Head)
        from_hidden = _orthonormal(sizes.hidden, sizes.hidden, rng)
        own = torch.eye(sizes.hidden)
        head.input_proj.weight.copy_(torch.cat([from_hidden, own], dim=1))
        _match(head.self_attn, compared, compared @ from_hidden.T, code, COPY_GAIN)


def _orthonormal(rows: int, columns: int, rng: torch.Generator) -> Tensor:
    made = torch.empty(rows, columns)
    return torch.nn.init.orthogonal_(made, generator=rng)


def _look_back(attention: Attention, frequencies: Tensor) -> None:
    """Heads that look a fixed number of tokens back, by position alone; see `rotary.py`."""
    landmark = torch.cat([torch.ones_like(frequencies), torch.zeros_like(frequencies)])
    size = len(landmark)
    attention.k_proj.weight[:size] = 0
    attention.k_proj.bias[:size] = LOOK_BACK_SHARPNESS * landmark
    for head, distance in enumerate(LOOK_BACK):
        angles = distance * frequencies
        channels = slice(head * size, (head + 1) * size)
        attention.q_proj.weight[channels] = 0
        query = torch.cat([angles.cos(), -angles.sin()])
        attention.q_proj.bias[channels] = LOOK_BACK_SHARPNESS * query


def _match(
    attention: Attention, sought: Tensor, offered: Tensor, code: Tensor, gain: float
) -> None:
    """The first head looks where what is offered equals what is sought, and copies the code there.

    In the channels that turn slowest, so that it holds at a distance. Both are float32 matrices
    [head_dim / 2, hidden], of what to compare in the query's and in the key's hidden state.
    """
    size = attention.sizes.head_dim
    slow = torch.cat([torch.arange(size // 4, size // 2), torch.arange(3 * size // 4, size)])
    attention.q_proj.weight[:size] = 0
    attention.k_proj.weight[:size] = 0
    attention.q_proj.weight[slow] = sought * MATCH_SHARPNESS
    attention.k_proj.weight[slow] = offered * MATCH_SHARPNESS
    attention.v_proj.weight[:size] = code
    attention.o_proj.weight[:, :size] = code.T * gain
