"""vLLM's real scheduler and KV cache managers, driven without a model, an engine or weights.

A `Simulation` schedules, lets a `ShadowWorker` run the step in name, and hands the scheduler an
output in which a random number of drafts was accepted.
"""

import random
from collections import Counter, deque
from dataclasses import replace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import core
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec, MambaSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.support.shadow_worker import VOCABULARY, ShadowWorker
from wmtp_vllm.config import selected
from wmtp_vllm.kv_manager.manager import RingManager
from wmtp_vllm.kv_manager.spec import RingSpec

SMALL: dict[str, Any] = {
    "block_size": 16,
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "enable_prefix_caching": False,
}


def engine_config(
    model: str, speculative: dict[str, Any] | None, delayed: bool = False, **arguments: Any
) -> VllmConfig:
    """The config of an engine for `model`; with `delayed`, of one that schedules a step ahead."""
    load_general_plugins()
    config = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        speculative_config=speculative,
        **SMALL | arguments,
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    config.scheduler_config.async_scheduling = delayed
    return config


def attention_spec(block_size: int, **fields: Any) -> FullAttentionSpec:
    values = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32} | fields
    return FullAttentionSpec(block_size=block_size, **values)


def ring_spec(config: VllmConfig, native: AttentionSpec, *kernel_sizes: Any) -> RingSpec:
    """What the draft's layer says of its cache where `config` selects windowed MTP."""
    own = selected(config)
    assert own is not None
    return RingSpec.replacing(
        native,
        kernel_sizes,
        config.cache_config.prefix_match_unit,
        window=own.draft_window_size,
        sink=own.draft_sink_size,
        num_speculative_tokens=config.num_speculative_tokens,
        skips_unread=own.draft_prefill == "auto",
        cache_blocks=own.draft_ring_cache_blocks,
    )


def dense_specs(config: VllmConfig, *kernel_sizes: Any) -> dict[str, KVCacheSpec]:
    """Two layers of a target, and the draft's where windowed MTP is selected."""
    native = attention_spec(config.cache_config.block_size)
    specs: dict[str, KVCacheSpec] = {f"model.layers.{i}.attn": native for i in range(2)}
    return specs | _draft_specs(config, native, *kernel_sizes)


def hybrid_specs(config: VllmConfig, *kernel_sizes: Any) -> dict[str, KVCacheSpec]:
    """The same of a hybrid target: of each four layers, three have a Mamba state."""
    native = attention_spec(config.cache_config.block_size)
    mamba = MambaSpec(
        block_size=native.block_size,
        shapes=((8, 64),),
        dtypes=(torch.float32,),
        page_size_padded=native.page_size_bytes,
        mamba_cache_mode=config.cache_config.mamba_cache_mode,
        num_speculative_blocks=config.num_speculative_tokens,
    )
    specs = {f"model.layers.{i}.attn": native if i % 4 == 3 else mamba for i in range(8)}
    return specs | _draft_specs(config, native, *kernel_sizes)


def _draft_specs(
    config: VllmConfig, native: AttentionSpec, *kernel_sizes: Any
) -> dict[str, KVCacheSpec]:
    if selected(config) is None:
        return {}
    return {"mtp.attn": ring_spec(config, native, *kernel_sizes)}


class Simulation:
    """A scheduler and its worker; where the config is delayed, outputs come one step late.

    Args:
        config: from `engine_config`.
        specs: of the KV cache, by layer name.
        target_blocks: blocks of the target's pool, the null block included.
        ring_blocks: blocks of the ring pool, where not as planned.
        seed: of prompts and acceptance.

    """

    def __init__(
        self,
        config: VllmConfig,
        specs: dict[str, KVCacheSpec],
        target_blocks: int,
        ring_blocks: int | None = None,
        seed: int = 0,
    ) -> None:
        self.rng = random.Random(seed)
        self.is_delayed = config.scheduler_config.async_scheduling
        config.cache_config.num_gpu_blocks_override = target_blocks
        plan = generate_scheduler_kv_cache_config(
            core.get_kv_cache_configs(config, [specs], [1 << 40])
        )
        for group in plan.kv_cache_groups:
            if ring_blocks is not None and isinstance(group.kv_cache_spec, RingSpec):
                group.kv_cache_spec = replace(group.kv_cache_spec, pool_blocks=ring_blocks)
        config.cache_config.num_gpu_blocks = plan.num_blocks
        block_size, hash_block_size = resolve_kv_cache_block_sizes(plan, config)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=plan,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_block_size,
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(hash_block_size, sha256)
        self.managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        rings = [m for m in self.managers if isinstance(m, RingManager)]
        self.ring = rings[0] if rings else None
        group = self.managers.index(self.ring) if self.ring else 0
        self.worker = ShadowWorker(config, self.ring, group, self.rng)
        self.pending: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.cached_tokens: dict[str, int] = {}
        self.num_steps = self.num_preemptions = 0

    @property
    def target_pool(self) -> BlockPool:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def ring_pool(self) -> BlockPool:
        assert self.ring is not None
        return self.ring.block_pool

    def free_blocks(self) -> tuple[int, int]:
        """Of the target's pool and of the ring pool."""
        return self.target_pool.get_num_free_blocks(), self.ring_pool.get_num_free_blocks()

    def prompt(self, length: int) -> list[int]:
        return self.rng.choices(range(VOCABULARY), k=length)

    def add(self, name: str, prompt: list[int], max_tokens: int) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(name, prompt, sampling, None, block_hasher=self.hasher)
        self.worker.add(request)
        self.scheduler.add_request(request)
        return request

    def abort(self, *names: str) -> None:
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        """Schedule and run one step, then process the output that is due."""
        output = self.scheduler.schedule()
        self.num_steps += 1
        self.num_preemptions += len(output.preempted_req_ids or ())
        for new in output.scheduled_new_reqs:
            self.cached_tokens[new.req_id] = new.num_computed_tokens
        ran = output.total_num_scheduled_tokens > 0
        if ran:
            self.pending.append((output, self.worker.execute(output)))
        elif not self.pending and self.scheduler.get_num_unfinished_requests():
            raise AssertionError("hang: requests wait and nothing runs")
        if self.pending and (len(self.pending) > self.is_delayed or not ran):
            self._process(*self.pending.popleft())
        return output

    def _process(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        self.scheduler.update_from_output(output, result)
        if not self.is_delayed and self.worker.k:
            drafts = [list(self.worker.states[r].drafts) for r in result.req_ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(result.req_ids, drafts))

    def run(self, max_steps: int = 50_000) -> None:
        """Until every request has finished."""
        while self.scheduler.get_num_unfinished_requests() or self.pending:
            self.step()
            self.check_pools()
            assert self.num_steps < max_steps, "hang: requests do not finish"

    def check_pools(self) -> None:
        """Every block is free or held, a ring block by several only as a prefix that they share, and
        no null block is held."""
        deferred = [block for _, blocks in self.scheduler.deferred_frees for block in blocks]
        for pool in dict.fromkeys(manager.block_pool for manager in self.managers):
            rows = [r for m in self.managers for r in m.req_to_blocks.values()]
            held = [b for row in (*rows, deferred) for b in row if b.pool is pool and not b.is_null]
            ids = {block.block_id for block in held}
            assert 0 not in ids, "the null block was handed out"
            assert len(ids) + pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
            if self.ring is not None and pool is self.ring_pool:
                for block, holders in Counter(map(id, held)).items():
                    found = next(b for b in held if id(b) == block)
                    assert found.ref_cnt == holders
                    assert holders == 1 or found.block_hash, "a ring block is written by two"
