"""The block manager of the rings: pinned sink blocks, rotating window blocks, a pool of its own."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from wmtp_vllm.kv_manager.spec import RingSpec
from wmtp_vllm.window import ceil_div

MORE_THAN_ANY_POOL = 1 << 60
"""Blocks "needed" when the ring pool is empty. The scheduler compares the sum over all managers with
the free blocks of the *target's* pool, so this makes the request wait, or preempts one, exactly as
for any other missing KV block."""


class RingManager(SingleTypeKVCacheManager):
    """Holds each request's draft KV in a ring of blocks from the ring pool.

    A request's row keeps its full logical length: null blocks stand where nothing is held, so that
    slot mappings and KV writes need no change anywhere. Blocks that fell out of the window are freed
    on *processed* tokens, since rejected drafts roll the computed tokens back.
    """

    def __init__(self, kv_cache_spec: RingSpec, block_pool: BlockPool, **kwargs: Any) -> None:
        if kv_cache_spec.pool_blocks < 2:
            raise ValueError(f"the ring pool was never planned: {kv_cache_spec}")
        ring_pool = BlockPool(
            num_gpu_blocks=kv_cache_spec.pool_blocks,
            enable_caching=False,
            hash_block_size=block_pool.hash_block_size,
        )
        # Ring blocks are not zeroed: the worker zeroes by the target's block ids.
        kwargs |= {"enable_caching": False, "needs_kv_cache_zeroing": False}
        super().__init__(kv_cache_spec, ring_pool, **kwargs)
        self.window = kv_cache_spec.draft_window
        self.num_speculative_tokens = kv_cache_spec.num_speculative_tokens

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """0 where the ring pool has the blocks, more than any pool has where not."""
        row_length = len(self.req_to_blocks.get(request_id, ()))
        row_length = max(row_length, total_computed_tokens // self.block_size)
        needed = ceil_div(num_tokens, self.block_size) - row_length
        if apply_admission_cap:
            # The whole request, most of which its ring will have let go of by the time it ends.
            needed = min(
                needed, self.window.max_held_blocks(self.num_speculative_tokens, 0, num_tokens)
            )
        return 0 if needed <= self.block_pool.get_num_free_blocks() else MORE_THAN_ANY_POOL

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """A prefix hit: the target has these tokens, the ring does not, so the draft starts cold."""
        assert num_external_computed_tokens == 0, "KV connectors are refused with a ring"
        row = self.req_to_blocks[request_id]
        row.extend([self._null_block] * (num_local_computed_tokens // self.block_size))
        self.num_cached_block[request_id] = 0

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Free the blocks between the sink and the window of the next token to be processed."""
        row = self.req_to_blocks.get(request_id)
        if row:
            first = self.window.first_window_block(processed_computed_tokens)
            self._remove_blocks_in_range(request_id, self.window.sink_blocks, min(first, len(row)))

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """0: skipped blocks lie between sink and window, which a prefix cannot tell."""
        return 0

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Nothing: ring blocks are not found again."""

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        raise AssertionError("a ring is not prefix-cacheable, so that nobody looks for hits in it")


def register() -> None:
    """Tell vLLM which manager ring specs have. Idempotent."""
    # Makes vLLM register its own specs first: it never does once the registry has any entry.
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})
    KVCacheSpecRegistry.register(RingSpec, RingManager, uniform_type_base_spec=RingSpec)
