"""What a step of speculative decoding costs, predicted from what it reads and computes.

A step is one pass of the target over K + 1 tokens, and K passes of the draft: the first over K + 1
tokens, the others over one. Each pass reads weights, KV and recurrent states, and costs a fixed time
a layer. Attention at batch 1 keeps few of a GPU's multiprocessors busy, and within one of them the
loading of a block of KV, its two matrix products and its exponentials follow each other; so their
times at peak rate are added up, and divided by the share of the machine that is in use.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from wmtp_vllm.planner.hardware import GPU

STREAMING = 0.7
"""Share of the peak bandwidth at which weights and states are read: an assumption."""
COMPUTING = 0.6
"""Share of the peak matrix rate that large batches reach: an assumption."""
FULL_USE = 0.7
"""Share of the peak rate that attention reaches at best, with many sequences: an assumption."""
TILE = 16
"""Rows of the smallest matrix product: fewer queries cost as much."""
HEAD_BITS = 16
"""Bits a weight of the output head, which the usual quantized checkpoints leave as it is."""


@dataclass(frozen=True)
class Attention:
    """Layers of one kind of attention, as one GPU has them.

    Args:
        layers: how many.
        num_heads: query heads.
        kv_heads: KV heads; 1 for latent attention.
        head_size: of queries and keys.
        value_size: of values.
        token_bytes: KV of a token in one of these layers, all heads.
        reach: tokens of a sliding window, None without.

    """

    layers: int
    num_heads: int
    kv_heads: int
    head_size: int
    value_size: int
    token_bytes: float
    reach: int | None = None

    def seconds(self, tokens: int, queries: int, gpu: GPU) -> float:
        """All layers, reading `tokens` for `queries` tokens of one sequence, at peak rates."""
        rows = max(TILE, self.num_heads // self.kv_heads * queries)
        a_token = self.token_bytes / gpu.bandwidth + self.kv_heads * rows * (
            2 * (self.head_size + self.value_size) / gpu.flops + 1 / gpu.exponentials
        )
        read = tokens if self.reach is None else min(tokens, self.reach + queries)
        return self.layers * read * a_token


@dataclass(frozen=True)
class Experts:
    """Mixture-of-experts layers that are alike: `params` is all weights of all their experts."""

    experts: int
    top_k: int
    params: int

    def read(self, tokens: int) -> float:
        """Weights that `tokens` tokens reach, if each chooses evenly and by itself."""
        return self.params * (1 - (1 - self.top_k / self.experts) ** tokens)


@dataclass(frozen=True)
class Part:
    """The target, or the draft.

    Args:
        layers: decoder layers.
        dense_params: weights that every pass reads, without embeddings and output head.
        head_params: weights of the output head, its own or the one it shares.
        experts: by kind.
        attention: by kind.
        state_bytes: recurrent states of a sequence.

    """

    layers: int
    dense_params: int
    head_params: int
    experts: tuple[Experts, ...] = ()
    attention: tuple[Attention, ...] = ()
    state_bytes: float = 0

    def weights_seconds(self, tokens: int, gpu: GPU, weight_bits: float) -> float:
        """One pass over `tokens` tokens: reading the weights, or computing with them."""
        params = self.dense_params + sum(e.read(tokens) for e in self.experts)
        bytes_read = params * weight_bits / 8 + self.head_params * HEAD_BITS / 8
        active: float = self.dense_params + self.head_params
        active += sum(e.params * e.top_k / e.experts for e in self.experts)
        reading = bytes_read / (gpu.bandwidth * STREAMING)
        return max(reading, 2 * active * tokens / (gpu.flops * COMPUTING))

    def attention_seconds(self, tokens: int, queries: int, gpu: GPU) -> float:
        """One pass of one sequence, at peak rates."""
        return sum(a.seconds(tokens, queries, gpu) for a in self.attention)


@dataclass(frozen=True)
class Constants:
    """What no data sheet says. The defaults are fitted to three measured ratios at 261K tokens
    (`wmtp_vllm.planner.paper.fit`).

    Args:
        attention_efficiency: share of the peak rates that attention over a long context reaches with
            one sequence.
        layer_seconds: fixed cost of a layer and pass: launches, norms, routing, gaps.

    """

    attention_efficiency: float = 0.118
    layer_seconds: float = 39.2e-6

    def efficiency(self, batch: int) -> float:
        """Sequences are read beside each other until the machine is full."""
        return max(self.attention_efficiency, min(FULL_USE, self.attention_efficiency * batch))


@dataclass(frozen=True)
class Step:
    """Seconds of one step, by what they are spent on."""

    weights: float
    states: float
    target_attention: float
    draft_attention: float
    fixed: float

    @property
    def seconds(self) -> float:
        return (
            self.weights + self.states + self.target_attention + self.draft_attention + self.fixed
        )


@dataclass(frozen=True)
class Workload:
    """What is decoded: `batch` sequences of `context` tokens, `k` of them drafted a step."""

    context: int
    batch: int
    k: int


def step(
    target: Part,
    draft: Part,
    load: Workload,
    draft_reads: int,
    gpu: GPU,
    weight_bits: float,
    constants: Constants,
) -> Step:
    """Predict one step; with k = 0 there is no draft.

    Args:
        target: the model.
        draft: its MTP head.
        load: what is decoded.
        draft_reads: tokens that a draft pass reads a sequence: the context, or sink and window.
        gpu: on which it runs.
        weight_bits: bits a weight.
        constants: see there.

    """
    batch, k = load.batch, load.k
    queries = [k + 1] + [1] * (k - 1) if k else []
    efficiency = constants.efficiency(batch)
    weights = target.weights_seconds(batch * (k + 1), gpu, weight_bits)
    weights += sum(draft.weights_seconds(batch * q, gpu, weight_bits) for q in queries)
    # One state is read, and one written for each token that may turn out to be the last.
    states = batch * target.state_bytes * (k + 2) / (gpu.bandwidth * STREAMING)
    return Step(
        weights,
        states,
        batch * target.attention_seconds(load.context, k + 1, gpu) / efficiency,
        batch * sum(draft.attention_seconds(draft_reads, q, gpu) for q in queries) / efficiency,
        # The draft's embedding, projection, head and sampling count as a layer.
        constants.layer_seconds * (target.layers + k * (draft.layers + 1)),
    )


def acceptance_length(rate: float, k: int) -> float:
    """Tokens a step, if each draft is accepted with probability `rate` once those before it were."""
    return sum(rate**i for i in range(k + 1))


def best_depth(seconds: Iterable[tuple[int, float]], rate: float) -> int:
    """The K, of pairs of it and its step's seconds, at which a token costs least."""
    return min(seconds, key=lambda pair: pair[1] / acceptance_length(rate, pair[0]))[0]
