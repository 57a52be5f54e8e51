"""The KV cache spec of a windowed draft layer: a ring of blocks instead of one slot a token."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec, replace_as

from wmtp_vllm.window import Window

PREFERRED_BLOCK_SIZE = 64
"""Tokens a ring block at most, where the backend allows: a larger block rounds the window up
further, and hybrid models have blocks of hundreds of tokens, set by the Mamba page."""


@dataclass(frozen=True, kw_only=True)
class RingSpec(AttentionSpec):
    """Draft attention layer whose KV is kept in a fixed-size ring of blocks for each request.

    A subclass of `AttentionSpec`, so that the worker lays it out and views it like any attention
    cache, but not of `SlidingWindowSpec`: what vLLM does for those (retention, extra retained
    tokens, admission caps, sharing of groups and pools) must not happen to a ring.
    """

    window: int
    sink: int
    num_speculative_tokens: int
    native: AttentionSpec
    """What vLLM would have used for this layer: the budget is compared with it."""
    skips_unread: bool = False
    """Whether the draft leaves out the prompt tokens whose KV nobody reads, which then have none."""
    cache_blocks: int | None = None
    """Blocks of the pool beyond the rings', for the rings of requests that have ended; None for a
    modest number."""
    pool_blocks: int = 0
    """Blocks of the ring pool, its null block included; 0 until planned."""
    saved_bytes: int = field(default=0, compare=False)
    """What native MTP would spend on the draft's KV on a worker, less the ring pool; 0 until planned."""

    @classmethod
    def replacing(
        cls,
        native: AttentionSpec,
        kernel_block_sizes: Iterable[int | MultipleOf],
        prefix_match_unit: int | None = None,
        **ring: Any,
    ) -> "RingSpec":
        """The ring that takes the place of the spec `native`; `ring` has the fields of its own."""
        native_only = native.__dataclass_fields__.keys() - AttentionSpec.__dataclass_fields__.keys()
        fields: dict[str, Any] = {
            "block_size": ring_block_size(native.block_size, kernel_block_sizes, prefix_match_unit),
            "page_size_padded": None,
            "native": native,
        }
        return replace_as(native, cls, drop=native_only, **fields, **ring)

    @property
    def draft_window(self) -> Window:
        return Window(self.window, self.sink, self.block_size)

    @property
    def prefix_cacheable(self) -> bool:
        # Out of the hit lookup: what the ring holds must never shorten the target's hit.
        return False

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        # Asked for what a request takes from the *target's* pool: nothing.
        return 0


def ring_block_size(
    native_block_size: int,
    kernel_block_sizes: Iterable[int | MultipleOf],
    prefix_match_unit: int | None = None,
) -> int:
    """Tokens a ring block: a divisor of the target's block that the kernels take unsplit.

    A divisor, because vLLM schedules in units of the least common multiple of all block sizes. And
    one of vLLM's `prefix_match_unit` where possible, so that no prefix hit ends inside a ring block.
    """
    sizes = list(kernel_block_sizes)

    def kernels_take(block: int) -> bool:
        return not sizes or any(
            block % size.base == 0 if isinstance(size, MultipleOf) else block == size
            for size in sizes
        )

    divisors = [b for b in range(1, native_block_size + 1) if native_block_size % b == 0]
    usable = [b for b in divisors if kernels_take(b)]
    usable = [b for b in usable if (prefix_match_unit or 0) % b == 0] or usable
    small = [b for b in usable if b <= PREFERRED_BLOCK_SIZE]
    if small:
        return small[-1]
    return usable[0] if usable else native_block_size
