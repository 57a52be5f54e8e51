"""The rule that the dense and the hybrid model both follow, and the weights that express it.

Each token says how far to look back. The next token is the *successor* of the one found there:

    next = successor[text[t - distance[text[t]]]]

with `distance` and `successor` drawn from a seed. A draft that follows the same rule is right when
its own KV holds the token pointed to, so acceptance depends on what the draft can attend to, and
on little else. Distances are skewed to the recent: half of the tokens look back at most 3 tokens,
some nine in ten at most 64, and none `reach` tokens or more.

A token is a basis vector in the hidden state, so a table over tokens is simply a weight matrix.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from wmtp_vllm.tiny_models.checkpoint import FIRST_TEXT_TOKEN, VOCAB_SIZE
from wmtp_vllm.tiny_models.rotary import look_back


@dataclass(frozen=True)
class Pointer:
    """The two tables of the rule, both int64[VOCAB_SIZE]."""

    distance: Tensor
    successor: Tensor

    @classmethod
    def draw(cls, rng: torch.Generator, reach: int) -> "Pointer":
        """Draw the tables. `reach` bounds the distances: 0 <= distance < reach (tokens)."""
        spread = (torch.arange(VOCAB_SIZE, dtype=torch.float64) + 0.5) / VOCAB_SIZE
        distance = ((reach + 1) ** spread.square()).long() - 1
        distance = distance[torch.randperm(VOCAB_SIZE, generator=rng)]
        # One cycle through all text tokens: repeated copying keeps changing the token, and neither
        # <eos> nor another special is ever a successor.
        cycle = torch.randperm(VOCAB_SIZE - FIRST_TEXT_TOKEN, generator=rng) + FIRST_TEXT_TOKEN
        successor = torch.empty(VOCAB_SIZE, dtype=torch.int64)
        successor[cycle] = cycle.roll(-1)
        successor[:FIRST_TEXT_TOKEN] = cycle[:FIRST_TEXT_TOKEN]
        return cls(distance, successor)

    def queries(self, head_dim: int) -> Tensor:
        """Query weight that turns a token into its look back: float32[head_dim, VOCAB_SIZE]."""
        return look_back(self.distance, head_dim).T

    def unembedding(self, scale: float) -> Tensor:
        """Output head that names the successor: float32[VOCAB_SIZE, VOCAB_SIZE].

        Its entries are `scale` or 0; the rows of the special tokens are all zero.
        """
        head = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
        head[self.successor, torch.arange(VOCAB_SIZE)] = scale
        return head


def token_codes(channels: int, rng: torch.Generator) -> Tensor:
    """Orthonormal rows that squeeze a token into fewer value channels.

    Args:
        channels: how many, at most VOCAB_SIZE.
        rng: picks the rows.

    Returns:
        C, float32[channels, VOCAB_SIZE]. C.T @ C returns channels / VOCAB_SIZE of a token, plus
        a little of every other one. All entries are +-1/16, exact in bfloat16.
    """
    signs = torch.ones(1, 1)
    while len(signs) < VOCAB_SIZE:  # Sylvester's Hadamard matrix: all rows are orthogonal
        signs = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), signs)
    rows = torch.randperm(VOCAB_SIZE, generator=rng)[:channels]
    codes: Tensor = signs[rows] / VOCAB_SIZE**0.5
    return codes
