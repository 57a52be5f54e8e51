"""The block manager of the rings: pinned sink blocks, rotating window blocks, a pool of its own."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashList,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from wmtp_vllm.kv_manager.spec import RingSpec
from wmtp_vllm.pace import Pace
from wmtp_vllm.window import ceil_div

logger = init_logger("vllm.wmtp_vllm.manager")

MORE_THAN_ANY_POOL = 1 << 60
"""Blocks "needed" when the ring pool is empty. The scheduler compares the sum over all managers with
the free blocks of the *target's* pool, so this makes the request wait, or preempts one, exactly as
for any other missing KV block."""


@dataclass
class Progress:
    """Of a request that is running."""

    prefill_len: int = 0
    """Tokens of the prompt, and after a preemption also those that were sampled before."""
    is_admitted: bool = False
    start: int = 0
    end: int = 0
    """Tokens [start, end) are those of its last allocation, without drafts to come."""
    run_until: int = 0
    """End of its last chunk that began in the sink: the draft ran on all of it."""
    freed_until: int = 0
    """Index of the block up to which everything behind the sink has been let go."""


class RingManager(SingleTypeKVCacheManager):
    """Holds each request's draft KV in a ring of blocks from the ring pool.

    A request's row keeps its full logical length: null blocks stand where nothing is held, so that
    slot mappings and KV writes need no change anywhere. Blocks that fell out of the window are freed
    on *processed* tokens, since rejected drafts roll the computed tokens back.

    With prefix caching, blocks that were let go stay findable in the pool, by the hashes of the target's
    prefix, until they are used again. A request that hits the target's prefix gets those of its sink
    and window that are still there, and never waits for them: it starts warm, or cold.
    """

    def __init__(self, kv_cache_spec: RingSpec, block_pool: BlockPool, **kwargs: Any) -> None:
        if kv_cache_spec.pool_blocks < 2:
            raise ValueError(f"the ring pool was never planned: {kv_cache_spec}")
        ring_pool = BlockPool(
            num_gpu_blocks=kv_cache_spec.pool_blocks,
            enable_caching=kwargs["enable_caching"],
            hash_block_size=block_pool.hash_block_size,
        )
        super().__init__(
            kv_cache_spec,
            ring_pool,
            # `cache_blocks` is called in every step, also where there is no prefix caching, and ring
            # blocks are not zeroed: the worker zeroes by the target's block ids.
            **kwargs | {"enable_caching": True, "needs_kv_cache_zeroing": False},
        )
        self.window = kv_cache_spec.draft_window
        self.num_speculative_tokens = kv_cache_spec.num_speculative_tokens
        self.skips_unread = kv_cache_spec.skips_unread
        self.progress: defaultdict[str, Progress] = defaultdict(Progress)
        self.num_warm_starts = 0
        self.num_cold_starts = 0
        self.num_waits = 0
        self.num_tokens_skipped = 0
        self.num_reads = 0
        self.num_tokens_kept = 0
        self.num_tokens_of_context = 0
        self._told: dict[str, int] = {}
        self._pace = Pace()

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
        chunk = total_computed_tokens, num_tokens_main_model
        needed = len(self._blocks_to_hold(request_id, row_length, num_tokens, chunk))
        if apply_admission_cap:
            # The whole request, most of which its ring will have let go of by the time it ends.
            needed = min(
                needed, self.window.max_held_blocks(self.num_speculative_tokens, 0, num_tokens)
            )
        if needed <= self.block_pool.get_num_free_blocks():
            return 0
        self.num_waits += 1
        return MORE_THAN_ANY_POOL

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Lengthen the row to `num_tokens`, by null blocks where nothing will be read."""
        row = self.req_to_blocks[request_id]
        progress = self.progress[request_id]
        progress.start = progress.end or len(row) * self.block_size  # all of a prefix hit
        progress.end = num_tokens_main_model
        chunk = progress.start, progress.end
        held = self._blocks_to_hold(request_id, len(row), num_tokens, chunk)
        blocks = dict(zip(held, self.block_pool.get_new_blocks(len(held)), strict=True))
        end = ceil_div(num_tokens, self.block_size)
        new = [blocks.get(index, self._null_block) for index in range(len(row), end)]
        row.extend(new)
        return new

    def _blocks_to_hold(
        self, request_id: str, row_length: int, num_tokens: int, chunk: tuple[int, int]
    ) -> list[int]:
        """Of the blocks from `row_length` to the end of `num_tokens`, those that get one of the pool."""
        unread = self._unread_blocks(request_id)
        end = ceil_div(num_tokens, self.block_size)
        sink_end = self.window.sink_blocks * self.block_size
        if chunk[0] < sink_end:
            # The draft runs on all of a chunk that begins in the sink. Where this one ends there too,
            # the next is another such, and what is behind this one's end, for drafts, is of the next.
            run = end if chunk[1] < sink_end else ceil_div(chunk[1], self.block_size)
            unread = unread[max(0, run - unread.start) :]
        return [index for index in range(row_length, end) if index not in unread]

    def _unread_blocks(self, request_id: str) -> range:
        if not self.skips_unread or request_id not in self.progress:
            return range(0)
        return self.window.unread_blocks(self.progress[request_id].prefill_len)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """A prefix hit of the target's; `cache_blocks` then puts in what the pool still has of it."""
        assert num_external_computed_tokens == 0, "KV connectors are refused with a ring"
        row = self.req_to_blocks[request_id]
        row.extend([self._null_block] * (num_local_computed_tokens // self.block_size))
        self.num_cached_block[request_id] = len(row)

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Free the blocks between the sink and the window of the next token to be processed."""
        progress = self.progress[request_id]
        progress.prefill_len = max(progress.prefill_len, num_prompt_tokens or 0)
        row = self.req_to_blocks.get(request_id)
        if not row:
            return
        start = max(progress.freed_until, self.window.sink_blocks)
        end = min(self.window.first_window_block(processed_computed_tokens), len(row))
        if start < end:
            freed = [block for block in row[start:end] if not block.is_null]
            row[start:end] = [self._null_block] * (end - start)
            progress.freed_until = end
            self.block_pool.free_blocks(freed)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """0: skipped blocks lie between sink and window, which a prefix cannot tell."""
        return 0

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self.progress.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Make the full blocks findable, and where the request was just admitted, start it warm."""
        row = self.req_to_blocks[request.request_id]
        progress = self.progress[request.request_id]
        num_cached = self.num_cached_block.get(request.request_id, 0)
        if not progress.is_admitted:
            progress.is_admitted = True
            progress.prefill_len = request.num_tokens
            if progress.start >= self.window.sink_blocks * self.block_size:
                self._let_go_of_unread(request.request_id, row)
            if num_cached:
                self._start_warm(request, row, num_cached)
        if progress.start < self.window.sink_blocks * self.block_size:
            progress.run_until = num_tokens
        self._count(progress)
        unread = self._unread_blocks(request.request_id)
        for index in range(num_cached, num_tokens // self.block_size):
            if not self._is_known(request, index):
                break
            self.num_cached_block[request.request_id] = index + 1
            block_hash, block = self._block_hash(request, index), row[index]
            was_run = index not in unread or (index + 1) * self.block_size <= progress.run_until
            if block_hash and was_run and not block.is_null and block.block_hash is None:
                self.block_pool._insert_block_hash(
                    make_block_hash_with_group_id(block_hash, self.kv_cache_group_id),
                    block,
                    num_tokens=(index + 1) * self.block_size,
                )

    def _count(self, progress: Progress) -> None:
        start, end, prefill_len = progress.start, progress.end, progress.prefill_len
        if self.skips_unread and start < prefill_len:
            num_read = self.window.num_read(start, min(end, prefill_len), prefill_len)
            self.num_tokens_skipped += min(end, prefill_len) - start - num_read
        if end >= prefill_len:  # else the proposal is thrown away
            self.num_reads += 1
            self.num_tokens_kept += self.window.num_kept(end, query_len=1)
            self.num_tokens_of_context += end

    def new_stats(self) -> dict[str, int]:
        """What is held now, and was counted since the last call, by the names of `wmtp_vllm.metrics`."""
        num_blocks = self.block_pool.num_gpu_blocks - 1  # without the null block
        counts = {
            "ring_waits": self.num_waits,
            "warm_starts": self.num_warm_starts,
            "cold_starts": self.num_cold_starts,
            "draft_prefill_tokens_skipped": self.num_tokens_skipped,
            "draft_reads": self.num_reads,
            "draft_kept_tokens": self.num_tokens_kept,
            "draft_context_tokens": self.num_tokens_of_context,
        }
        new = {name: count - self._told.get(name, 0) for name, count in counts.items()}
        self._told = counts
        return new | {
            "ring_pool_blocks": num_blocks,
            "ring_blocks_held": num_blocks - self.block_pool.get_num_free_blocks(),
            "kv_bytes_saved": self.kv_cache_spec.saved_bytes,
        }

    def _let_go_of_unread(self, request_id: str, row: list[KVCacheBlock]) -> None:
        """After a preemption more is unread than the prompt's length told when the row was made."""
        for index in self._unread_blocks(request_id):
            if index < len(row) and not row[index].is_null:
                self.block_pool.free_blocks([row[index]])
                row[index] = self._null_block

    def _start_warm(self, request: Request, row: list[KVCacheBlock], num_hit: int) -> None:
        """Put into the row, `num_hit` null blocks yet, what the pool has of its sink and window."""
        first_query = request.num_tokens - 1 if self.skips_unread else num_hit * self.block_size
        first = self.window.first_window_block(first_query)
        wanted = [*range(min(self.window.sink_blocks, num_hit)), *range(first, num_hit)]
        num_found = 0
        for index in wanted:
            block_hash = self._block_hash(request, index)
            found = block_hash and self.block_pool.get_cached_block(
                block_hash, [self.kv_cache_group_id]
            )
            if found:
                self.block_pool.touch(found)
                row[index] = found[0]
                num_found += 1
        if num_found == len(wanted):
            self.num_warm_starts += 1
        else:
            self.num_cold_starts += 1
        if self._pace.is_due():
            logger.info(
                "windowed_mtp: after prefix hits, %d requests started with the draft's whole KV (warm) "
                "and %d without some of it (cold)",
                self.num_warm_starts,
                self.num_cold_starts,
            )

    def _is_known(self, request: Request, index: int) -> bool:
        """Whether all is known yet that the KV of the request's block `index` depends on."""
        end = (index + 1) * self.block_size
        num_hashed = len(request.block_hashes) * self.block_pool.hash_block_size
        return end < request.num_tokens and end <= num_hashed

    def _block_hash(self, request: Request, index: int) -> BlockHash | None:
        """What the KV of the request's block `index` depends on; None where no hash says that.

        An MTP head computes the KV of a position from its token's successor, so a block depends on one
        token more than it has. The prefix's hash covers that one too, unless both end together.
        """
        end = (index + 1) * self.block_size
        hash_size = self.block_pool.hash_block_size
        covering = (end - 1) // hash_size
        if not self._is_known(request, index):
            return None
        if end % hash_size == 0 and (request.mm_features or request.prompt_embeds is not None):
            return None  # a token's id does not say what its embedding is
        suffix = b"".join(n.to_bytes(8, "little") for n in (index, request.all_token_ids[end]))
        return BlockHash(request.block_hashes[covering] + suffix)

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
