"""A worker without a model: it runs steps in name only, and checks what the draft would read.

It knows what a real worker knows, no more: its own copy of each request's row of the ring, whole at
admission and then grown by the new block ids. It keeps a shadow of the ring's memory, and at every
call of the draft's attention compares what the compact table lists with what was written for the
positions that the draft should see.
"""

import itertools
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from wmtp_vllm.kv_manager.manager import RingManager
from wmtp_vllm.window import Window

VOCABULARY = 1000
PRIME = (1 << 61) - 1
RIGHT_DRAFTS = 0.7
"""Chance that a draft is right, if all before it are."""


class Mismatch(AssertionError):
    """The draft would read something else than what was written for what it should see."""


def truth_of(tokens: np.ndarray) -> np.ndarray:
    """[max_model_len]: what a slot of the shadow holds where the KV of each position is right.

    A number for all that the KV of an MTP head depends on: the tokens up to that position's, and the
    one after it.
    """
    truth, chain = [], 1
    for token, successor in itertools.pairwise([*tokens.tolist(), 0]):
        chain = (chain * 1_000_003 + token + 1) % PRIME
        truth.append((chain * 1_000_033 + successor + 1) % PRIME)
    return np.array(truth)


@dataclass
class State:
    """What the worker knows of a request."""

    request: Request
    tokens: np.ndarray  # [max_model_len], of the prompt, and those that the target will sample
    truth: np.ndarray  # [max_model_len]
    written: np.ndarray  # [max_model_len], what was last written for each position; 0: nothing held
    row: list[int] = field(default_factory=list)
    hit: int = 0  # tokens of the prefix hit
    prefill_len: int = 0  # tokens at admission
    start: int = 0  # first position of the last step
    rows: int = 0  # of the last step's tokens, those that the draft ran on
    computed: int = 0
    length: int = 0  # tokens that exist: the prompt's and the sampled ones
    drafts: list[int] = field(default_factory=list)


class ShadowWorker:
    """Runs steps in name; `window` and `null_blocks` are what it reads by."""

    def __init__(
        self, config: VllmConfig, ring: RingManager | None, group: int, rng: random.Random
    ) -> None:
        self.k = config.num_speculative_tokens
        self.max_model_len = config.model_config.max_model_len
        self.is_delayed = config.scheduler_config.async_scheduling
        self.group, self.rng = group, rng
        self.states: dict[str, State] = {}
        self.num_reads = 0
        self.num_skipped = 0  # prompt tokens that the draft did not run on
        self.num_wrong = 0
        self.null_blocks: Sequence[int] = (0,)
        self.window: Window | None = None
        if ring is not None:
            self.window = self.definition = ring.kv_cache_spec.draft_window
            self.skips_unread = ring.kv_cache_spec.skips_unread
            shape = ring.kv_cache_spec.pool_blocks, self.window.block_size
            self.kv = np.zeros(shape, dtype=np.int64)

    def add(self, request: Request) -> None:
        positions = np.arange(self.max_model_len)
        tokens = (positions * 7919 + zlib.crc32(request.request_id.encode())) % VOCABULARY
        tokens[: request.num_prompt_tokens] = request.prompt_token_ids
        self.states[request.request_id] = State(
            request, tokens, truth_of(tokens), np.zeros_like(tokens)
        )

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for new in output.scheduled_new_reqs:
            self._admit(new.req_id, new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for req_id, ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if req_id in cached.resumed_req_ids:
                self._admit(req_id, ids, computed)
                continue
            assert self.is_delayed or self.states[req_id].computed == computed
            if ids is not None:
                self.states[req_id].row.extend(ids[self.group])

        # As on a device: each of the draft's forward passes writes for all requests, then reads.
        steps = list(output.num_scheduled_tokens.items())
        states = [self.states[req_id] for req_id, _ in steps]
        sampled = []
        for state, (req_id, num_tokens) in zip(states, steps, strict=True):
            drafts = output.scheduled_spec_decode_tokens.get(req_id, [])
            if self.is_delayed and state.drafts:  # the scheduler has placeholders only
                drafts = state.drafts[: len(drafts)]
            sampled.append(self._verify(state, num_tokens, drafts))
        for state, (_, num_tokens) in zip(states, steps, strict=True):
            if state.rows:
                self._read(state, state.start + num_tokens, state.rows)
        for i in range(self.k - 1):
            drafting = [s for s in states if s.rows and s.computed + i < self.max_model_len]
            for state in drafting:
                self._write(state, state.computed + i, state.computed + i + 1, 0)
            for state in drafting:
                self._read(state, state.computed + i + 1, 1)
        index = {req_id: i for i, (req_id, _) in enumerate(steps)}
        return ModelRunnerOutput(list(index), index, sampled)

    def _admit(self, req_id: str, ids: tuple[list[int], ...], computed: int) -> None:
        state = self.states[req_id]
        state.row, state.drafts = list(ids[self.group]), []
        state.computed = state.hit = computed
        state.length = state.request.num_tokens
        state.prefill_len = state.length
        state.written[:] = 0
        if self.window is not None:
            held = np.repeat(np.array(state.row) > 0, self.window.block_size)[:computed]
            state.written[:computed][held] = state.truth[:computed][held]

    def _verify(self, state: State, num_tokens: int, drafts: Sequence[int]) -> list[int]:
        """Verify `drafts` behind the tokens that exist, and draft anew; returns what is sampled."""
        start, end = state.computed, state.computed + num_tokens
        tail = end - len(drafts)
        assert tail <= state.length, "tokens are scheduled that nobody has sampled"

        sampled: list[int] = []
        if tail == state.length:
            right = self._next_tokens(state, tail, len(drafts) + 1)
            wrong = [i for i, draft in enumerate(drafts) if draft != right[i]]
            accepted = wrong[0] if wrong else len(drafts)
            sampled = right[: accepted + 1]
            state.length += len(sampled)
            end = tail + accepted
        state.start, state.computed = start, end
        state.rows = self._rows(state, num_tokens)
        self._write(state, start + num_tokens - state.rows, start + num_tokens, end)

        state.drafts = self._next_tokens(state, end + 1, self.k)
        num_right = next((i for i in range(self.k) if self.rng.random() > RIGHT_DRAFTS), self.k)
        for i in range(num_right, self.k):
            state.drafts[i] = (state.drafts[i] + 1) % VOCABULARY
        return sampled

    def _rows(self, state: State, num_tokens: int) -> int:
        """How many of the step's last tokens the draft runs on."""
        if self.window is None or not self.skips_unread:
            return num_tokens
        if state.start >= state.prefill_len:
            return num_tokens
        end = state.start + num_tokens
        rows = self.definition.num_read(state.start, end, state.prefill_len)
        # A batch that needs none is skipped; in others such a request keeps its last row.
        rows = rows or self.rng.choice([0, 1])
        self.num_skipped += num_tokens - rows
        return rows

    def _next_tokens(self, state: State, position: int, count: int) -> list[int]:
        """What the target will sample from `position` on; of no matter past the maximum length."""
        tokens = state.tokens[position : position + count].tolist()
        return tokens + [0] * (count - len(tokens))

    def _write(self, state: State, start: int, end: int, right_until: int) -> None:
        """The draft's KV of [start, end), which is right before `right_until`."""
        if self.window is None:
            return
        b = self.window.block_size
        positions = np.arange(start, end)
        slots = np.array(state.row[start // b : -(-end // b)], dtype=int)[
            positions // b - start // b
        ]
        unread = self.definition.unread_blocks(state.prefill_len) if self.skips_unread else []
        if not np.isin(positions[slots == 0] // b, unread).all():
            raise Mismatch(f"KV of {state.request.request_id} goes to the null block")
        positions, slots = positions[slots > 0], slots[slots > 0]
        self.num_wrong += len(positions)
        wrong = -self.num_wrong - np.arange(len(positions))  # like nothing else
        state.written[positions] = np.where(positions < right_until, state.truth[positions], wrong)
        self.kv[slots, positions % b] = state.written[positions]

    def _read(self, state: State, length: int, query_len: int) -> None:
        """One call of the draft's attention: by the definition, and by the compact table."""
        if self.window is None:
            return
        b, first = self.definition.block_size, length - query_len
        sink_end = min(-(-self.definition.sink // b) * b, length)
        window_start = max(sink_end, (first - self.definition.size + 1) // b * b)
        seen = self._counting(state, np.r_[0:sink_end, window_start:length])
        is_held = state.written[seen] != 0
        if length >= state.prefill_len and state.hit == 0 and not is_held.all():
            raise Mismatch(f"{state.request.request_id} lacks KV at length {length}")
        seen = seen[is_held]

        ids, num_held = self.window.compact_table(state.row, length, query_len, self.null_blocks)
        kept = [
            i
            for i in self.window.kept_blocks(length, query_len)
            if state.row[i] not in self.null_blocks
        ]
        listed = np.array([i * b + j for i in kept for j in range(b)], dtype=int)[:num_held]
        is_filled_up = len(listed) < num_held or (listed[-1:] >= length).any()
        if is_filled_up and self.skips_unread and length < state.prefill_len:
            # Filled up to as many keys as queries, for the kernels: unread blocks are among those of
            # the step. Its proposal is thrown away, and the KV of such a head is not from what it reads.
            return
        if len(listed) < query_len and query_len > 1:
            raise Mismatch(f"{state.request.request_id} has fewer keys than queries at {length}")
        counts = np.isin(listed, self._counting(state, listed))
        kv = self.kv[ids].ravel()[:num_held][counts]
        if not np.array_equal(kv, state.written[seen]):
            raise Mismatch(f"{state.request.request_id} reads other KV at length {length}")
        past = seen[seen < state.start]
        if not np.array_equal(state.written[past], state.truth[past]):
            raise Mismatch(f"{state.request.request_id} reads rejected KV at length {length}")
        self.num_reads += 1

    def _counting(self, state: State, positions: np.ndarray) -> np.ndarray:
        """Without those that nothing reads that counts: what is drafted there is thrown away."""
        if not self.skips_unread:
            return positions
        unread = self.definition.unread_blocks(state.prefill_len)
        return positions[~np.isin(positions // self.definition.block_size, unread)]
