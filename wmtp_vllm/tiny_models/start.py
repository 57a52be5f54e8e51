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
PROBED_SHARPNESS, PROBED_GAIN = 10.0, 20.0


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
        first, second = trunk.layers[0].self_attn, trunk.layers[1].self_attn
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


@torch.no_grad()
def restart_draft(model: Transformer, tokens: Tensor) -> None:
    """Give the draft its copying head again, once the target is what it is.

    While the target learns, its hidden states move away from what the head was made for. Here linear
    probes find where in the draft's input the tokens are, the one that it goes on from and the one
    before, and the first head is made of them.

    Args:
        model: with a trained target.
        tokens: rows to probe with, int64[rows, length].
    """
    (head,) = model.model.mtp_layers
    assert isinstance(head, Head)
    sizes, count = model.sizes, model.lm_head.out_features
    positions = torch.arange(tokens.shape[1] - 1).repeat(len(tokens), 1)
    _, hidden = model.target(tokens[:, :-1], positions)
    embedded = model.model.embed_tokens(tokens[:, 1:])
    seen = head.input_layernorm(head.enter(hidden, embedded, positions))[:, 1:].flatten(0, 1)

    def probe(sought: Tensor) -> Tensor:
        """Least squares from what is seen to the token: float32[tokens, hidden]."""
        one_hot = torch.nn.functional.one_hot(sought.flatten(), count).float()
        return torch.linalg.lstsq(seen, one_hot).solution.T

    rng = torch.Generator().manual_seed(0)
    current, before = probe(tokens[:, 2:]), probe(tokens[:, 1:-1])
    compared = _orthonormal(sizes.head_dim // 2, count, rng) * PROBED_SHARPNESS
    code = _orthonormal(sizes.head_dim, count, rng)
    _match(head.self_attn, compared @ current, compared @ before, code @ current, 1.0)
    spoken = torch.nn.functional.normalize(model.lm_head.weight, dim=1).T
    head.self_attn.o_proj.weight[:, : sizes.head_dim] = spoken @ code.T * PROBED_GAIN


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
