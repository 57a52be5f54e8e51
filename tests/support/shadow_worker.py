"""A worker without a model: it runs steps in name only, and checks what the draft would read.

It knows what a real worker knows, no more: its own copy of each request's row of the ring, whole at
admission and then grown by the new block ids. It keeps a shadow of the ring's memory, and at every
call of the draft's attention compares what the compact table lists with what was written for the
positions that the draft should see.
"""

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
TOKEN_BITS = 21
POSITION_BITS = 21
RIGHT_DRAFTS = 0.7
"""Chance that a draft is right, if all before it are."""


class Mismatch(AssertionError):
    """The draft would read something else than what was written for what it should see."""


def codes(number: int, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """What a slot of the shadow holds: whose, which position's and which token's KV it is."""
    return (number << POSITION_BITS | positions) << TOKEN_BITS | (tokens + 2)  # from -1, padding


@dataclass
class State:
    """What the worker knows of a request."""

    request: Request
    number: int
    tokens: np.ndarray  # [max_model_len], of the prompt, and those that the target will sample
    written: np.ndarray  # [max_model_len], the code last written for each position; 0: none yet
    row: list[int] = field(default_factory=list)
    cold: int = 0  # tokens of the prefix hit, whose draft KV is not in the ring
    start: int = 0  # first position of the last step
    computed: int = 0
    length: int = 0  # tokens that exist: the prompt's and the sampled ones
    drafts: list[int] = field(default_factory=list)

    def truth(self, positions: np.ndarray) -> np.ndarray:
        return codes(self.number, positions, self.tokens[positions])


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
        self.null_blocks: Sequence[int] = (0,)
        self.window: Window | None = None
        if ring is not None:
            self.window = self.definition = ring.kv_cache_spec.draft_window
            shape = ring.kv_cache_spec.pool_blocks, self.window.block_size
            self.kv = np.zeros(shape, dtype=np.int64)

    def add(self, request: Request) -> None:
        positions = np.arange(self.max_model_len)
        tokens = (positions * 7919 + zlib.crc32(request.request_id.encode())) % VOCABULARY
        tokens[: request.num_prompt_tokens] = request.prompt_token_ids
        number = len(self.states) + 1
        self.states[request.request_id] = State(request, number, tokens, np.zeros_like(tokens))

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
            self._read(state, state.start + num_tokens, num_tokens)
        for i in range(self.k - 1):
            drafting = [s for s in states if s.computed + i < self.max_model_len]
            for state in drafting:
                self._write(state, state.computed + i, [state.drafts[i]])
            for state in drafting:
                self._read(state, state.computed + i + 1, 1)
        index = {req_id: i for i, (req_id, _) in enumerate(steps)}
        return ModelRunnerOutput(list(index), index, sampled)

    def _admit(self, req_id: str, ids: tuple[list[int], ...], computed: int) -> None:
        state = self.states[req_id]
        state.row, state.drafts = list(ids[self.group]), []
        state.computed = state.cold = computed
        state.length = state.request.num_tokens
        state.written[:] = 0

    def _verify(self, state: State, num_tokens: int, drafts: Sequence[int]) -> list[int]:
        """Verify `drafts` behind the tokens that exist, and draft anew; returns what is sampled."""
        start, end = state.computed, state.computed + num_tokens
        tail = end - len(drafts)
        assert tail <= state.length, "tokens are scheduled that nobody has sampled"
        self._write(state, start, [*state.tokens[start:tail], *drafts])

        sampled: list[int] = []
        if tail == state.length:
            right = self._next_tokens(state, tail, len(drafts) + 1)
            wrong = [i for i, draft in enumerate(drafts) if draft != right[i]]
            accepted = wrong[0] if wrong else len(drafts)
            sampled = right[: accepted + 1]
            state.length += len(sampled)
            end = tail + accepted
        state.start, state.computed = start, end

        state.drafts = self._next_tokens(state, end + 1, self.k)
        num_right = next((i for i in range(self.k) if self.rng.random() > RIGHT_DRAFTS), self.k)
        for i in range(num_right, self.k):
            state.drafts[i] = (state.drafts[i] + 1) % VOCABULARY
        return sampled

    def _next_tokens(self, state: State, position: int, count: int) -> list[int]:
        """What the target will sample from `position` on; of no matter past the maximum length."""
        tokens = state.tokens[position : position + count].tolist()
        return tokens + [0] * (count - len(tokens))

    def _write(self, state: State, start: int, tokens: list[int]) -> None:
        if self.window is None:
            return
        b = self.window.block_size
        positions = np.arange(start, start + len(tokens))
        blocks = np.array(state.row[start // b : (start + len(tokens) - 1) // b + 1])
        slots = blocks[positions // b - start // b]
        if not slots.all():
            raise Mismatch(f"KV of {state.request.request_id} goes to the null block")
        state.written[positions] = codes(state.number, positions, np.array(tokens))
        self.kv[slots, positions % b] = state.written[positions]

    def _read(self, state: State, length: int, query_len: int) -> None:
        """One call of the draft's attention: by the definition, and by the compact table."""
        if self.window is None:
            return
        b, first = self.definition.block_size, length - query_len
        sink_end = min(-(-self.definition.sink // b) * b, length)
        window_start = max(sink_end, (first - self.definition.size + 1) // b * b)
        seen = np.r_[0:sink_end, window_start:length]
        seen = seen[seen >= state.cold]

        ids, held = self.window.compact_table(state.row, length, query_len, self.null_blocks)
        if not np.array_equal(self.kv[ids].ravel()[:held], state.written[seen]):
            raise Mismatch(f"{state.request.request_id} reads other KV at length {length}")
        past = seen[seen < state.start]
        if not np.array_equal(state.written[past], state.truth(past)):
            raise Mismatch(f"{state.request.request_id} reads rejected KV at length {length}")
        self.num_reads += 1
