"""Attention that looks a chosen number of tokens back, built from rotary embedding alone.

Rotary embedding turns channel pair f of a query or key at position t by the angle t * w_f. If all
keys carry the same vector and the query is that vector turned back by m * w_f, their product at
distance d is the sum over f of cos(w_f * (d - m)): highest at d = m, at any context length.
"""

import torch
from torch import Tensor

THETA = 1e12
"""Rotary base. So large that half of the channel pairs barely turn, and can carry content."""

SLOWEST_POSITIONAL = 1e-6
"""Frequency (radians per token) under which a pair counts as content: 0.5 rad over 524,288
tokens, where the frequencies above it already tell any two positions apart."""


def frequencies(head_dim: int) -> Tensor:
    """Turn of each channel pair, in radians per token: float64[head_dim / 2].

    Pair f is the channels (f, f + head_dim / 2), the layout called neox in vLLM.
    """
    return THETA ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def positional_pairs(head_dim: int) -> Tensor:
    """Indices of the pairs that turn fast enough to tell positions apart, int64[pairs]."""
    return torch.nonzero(frequencies(head_dim) > SLOWEST_POSITIONAL).flatten()


def content_channels(head_dim: int) -> Tensor:
    """Channels of the other pairs, which positions leave (nearly) alone, int64[channels]."""
    slow = torch.nonzero(frequencies(head_dim) <= SLOWEST_POSITIONAL).flatten()
    return torch.cat([slow, slow + head_dim // 2])


def landmark(head_dim: int) -> Tensor:
    """The key, equal at all positions, that `look_back` finds: float32[head_dim]."""
    key = torch.zeros(head_dim)
    key[positional_pairs(head_dim)] = 1.0
    return key


def look_back(distances: Tensor, head_dim: int) -> Tensor:
    """Queries that score `landmark` keys highest exactly `distances` tokens back.

    Args:
        distances: tokens back, 0 = the query's own position, shape [n].
        head_dim: channels of a head.

    Returns:
        float32[n, head_dim]; the product with the key at the right distance is the number of
        positional pairs, elsewhere less.
    """
    pairs = positional_pairs(head_dim)
    angles = distances.double()[:, None] * frequencies(head_dim)[pairs]
    queries = torch.zeros(len(distances), head_dim)
    queries[:, pairs] = angles.cos().float()
    queries[:, pairs + head_dim // 2] = -angles.sin().float()
    return queries
