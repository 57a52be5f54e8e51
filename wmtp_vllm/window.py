"""Which tokens a windowed draft reads, and how many KV blocks that takes.

Plain integer arithmetic: it imports neither vLLM nor torch, so that property tests can reach
every corner of it. The rule is StreamingLLM's (arXiv 2309.17453) at block granularity, as
Windowed-MTP (arXiv 2607.21535) uses it for the draft: attention *sink* tokens at the front,
then a gap, then the most recent tokens.

A request with ``length`` tokens (this step's included) and ``query_len`` query tokens keeps
blocks ``[0, sink_blocks)`` and ``[first_window_block, ceil(length / block_size))``. Every query
then sees the sink, at least the ``size`` tokens that end at itself, and the earlier tokens of its
own step. The kept blocks, listed in order without the gap, are the *compact table*; attention over
it is exact because RoPE was applied to the keys at their true positions.
"""

from collections.abc import Iterable
from dataclasses import dataclass


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Window:
    """A draft window laid over blocks; all three lengths are in tokens.

    Args:
        size: W, the most recent tokens each query sees, itself included; at least 1.
        sink: S, the first tokens of the request, always seen; 0 for none.
        block_size: b, tokens a KV block.

    """

    size: int
    sink: int
    block_size: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.sink < 0 or self.block_size < 1:
            raise ValueError(f"not a window: {self}")

    @property
    def sink_blocks(self) -> int:
        return ceil_div(self.sink, self.block_size)

    def first_window_block(self, position: int) -> int:
        """Index of the first block after the gap, for a step whose first query is at `position`.

        Also what may be freed once `position` tokens are processed: blocks from `sink_blocks` up to
        (not including) this one are never read again. It never precedes the sink's end.
        """
        return max(self.sink_blocks, (position - self.size + 1) // self.block_size)

    def kept_blocks(self, length: int, query_len: int) -> list[int]:
        """Logical block indices that one attention call reads, in order."""
        end = ceil_div(length, self.block_size)
        first = self.first_window_block(length - query_len)
        return [*range(min(self.sink_blocks, end)), *range(first, end)]

    def num_kept(self, length: int, query_len: int) -> int:
        """Tokens that one attention call reads where nothing of them is missing."""
        sink_end = self.sink_blocks * self.block_size
        first = self.first_window_block(length - query_len) * self.block_size
        return min(sink_end, length) + max(0, length - first)

    def unread_blocks(self, prefill_len: int) -> range:
        """Blocks of a prefill between its sink and the window of its last token.

        The draft's proposals count from the last token on, and none of them reads these: only the
        earlier tokens of the prefill would, whose own proposals nobody asks for.
        """
        return range(self.sink_blocks, self.first_window_block(prefill_len - 1))

    def num_read(self, start: int, end: int, prefill_len: int) -> int:
        """How many tokens at the end of a prefill's chunk [start, end) have KV that is read.

        All of a chunk that begins in the sink: what is run stays one piece.
        """
        unread = self.unread_blocks(prefill_len)
        if start < unread.start * self.block_size:
            return end - start
        return min(end - start, max(0, end - unread.stop * self.block_size))

    def compact_table(
        self, row: list[int], length: int, query_len: int, null_blocks: Iterable[int] = (0,)
    ) -> tuple[list[int], int]:
        """The kept block ids of one request's table `row`, and the tokens that they hold.

        Null blocks stand for KV that the ring does not hold (after a prefix-cache hit, say); they
        are left out, for else the draft would read another request's leavings. This is the naive
        reference for `wmtp_vllm.attention_backends.compact_table`.
        """
        nulls = frozenset(null_blocks)
        held = [i for i in self.kept_blocks(length, query_len) if row[i] not in nulls]
        tokens = len(held) * self.block_size
        if held and held[-1] == (length - 1) // self.block_size:
            tokens -= -length % self.block_size  # the last block is not full
        # Kernels want no fewer keys than queries. Where a request holds less (a dummy run, or a row
        # whose proposal is thrown away), they read the null block.
        return [row[i] for i in held], max(tokens, min(query_len, length))

    def max_kept_blocks(self, query_len: int) -> int:
        """Most blocks that a call with at most `query_len` queries a request can read."""
        return self.sink_blocks + self._max_blocks_across(self.size + query_len - 1)

    def max_compact_length(self, query_len: int) -> int:
        """Most tokens that a call with at most `query_len` queries a request can read."""
        # The first window block can start up to b - 1 tokens before the window does.
        return (self.sink_blocks + 1) * self.block_size + self.size + query_len - 2

    def ring_budget(self, num_speculative_tokens: int, max_model_len: int) -> int:
        """Blocks that a request's ring holds, apart from those of its tokens in flight.

        The window before the first unprocessed token, and the lookahead slots that the scheduler
        allocates for the next drafts, at any alignment to the blocks.
        """
        window_blocks = self._max_blocks_across(self.size + num_speculative_tokens + 1)
        return min(self.sink_blocks + window_blocks, ceil_div(max_model_len, self.block_size))

    def max_held_blocks(
        self, num_speculative_tokens: int, in_flight_tokens: int, max_model_len: int
    ) -> int:
        """Most blocks that a request can hold while `in_flight_tokens` of it are scheduled but not
        processed: its budget, and the blocks of the tokens in flight."""
        return min(
            self.ring_budget(num_speculative_tokens, max_model_len)
            + ceil_div(in_flight_tokens, self.block_size),
            ceil_div(max_model_len, self.block_size),
        )

    def max_pool_blocks(
        self,
        num_requests: int,
        num_speculative_tokens: int,
        in_flight_tokens: int,
        max_model_len: int,
    ) -> int:
        """Most blocks that `num_requests` hold together while `in_flight_tokens` of them all are
        scheduled but not processed, however these are spread and every window is aligned."""
        window_tokens = self.size + num_speculative_tokens + self.block_size - 1
        held = num_requests * (self.sink_blocks + 1)
        held += (num_requests * window_tokens + in_flight_tokens) // self.block_size
        return min(held, num_requests * ceil_div(max_model_len, self.block_size))

    def _max_blocks_across(self, tokens: int) -> int:
        """Most blocks that `tokens` consecutive positions touch, at the worst alignment."""
        return ceil_div(tokens - 1, self.block_size) + 1
