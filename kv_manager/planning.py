"""Memory planning: the target as if it had no draft, in what the ring pool leaves.

A draft that shares vLLM's cache groups is a trap: on hybrid models it changes the group size and can
cost the target a large part of its pool, or it pads every draft block to the width of the widest
group. So the target is planned by vLLM alone, with the memory that the ring pool leaves, and the
ring becomes one more group and one more tensor of the same backing allocation.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
)

from wmtp_vllm.kv_manager.spec import RingSpec
from wmtp_vllm.window import ceil_div

# Below "vllm", so that vLLM's own logging configuration shows it.
logger = init_logger("vllm.wmtp_vllm.planning")

Specs = dict[str, KVCacheSpec]

ALIGNMENT = 256
"""Bytes. The caches of all layers are views of one allocation, and GPU kernels may assume this of
a cache's address."""


class Planner(NamedTuple):
    """vLLM's own planning functions, as they were before any was wrapped."""

    groups: Callable[[VllmConfig, Specs], list[KVCacheGroupSpec]]
    """`get_kv_cache_groups`"""
    config_from_groups: Callable[[VllmConfig, list[KVCacheGroupSpec], int], KVCacheConfig]
    """`get_kv_cache_config_from_groups`; the last argument is memory in bytes"""
    capacity: Callable[[VllmConfig, KVCacheConfig], tuple[int, float]]
    """`get_kv_cache_capacity`: tokens, and requests of the maximum length"""


@dataclass
class RingKVCacheConfig(KVCacheConfig):
    """A KV cache config whose ring tensors have a block count of their own."""

    def num_blocks_of(self, tensor: KVCacheTensor) -> int:
        for group in self.kv_cache_groups:
            if isinstance(group.kv_cache_spec, RingSpec) and tensor.layers[0] in group.layer_names:
                return group.kv_cache_spec.pool_blocks
        return super().num_blocks_of(tensor)


def without_rings(specs: Specs) -> Specs:
    return {name: spec for name, spec in specs.items() if not isinstance(spec, RingSpec)}


def only_rings(specs: Specs) -> dict[str, RingSpec]:
    return {name: spec for name, spec in specs.items() if isinstance(spec, RingSpec)}


def get_kv_cache_configs(
    original: Callable[..., list[KVCacheConfig]],
    planner: Planner,
    vllm_config: VllmConfig,
    kv_cache_specs: list[Specs],
    available_memory: list[int],
    *global_groups: list[KVCacheGroupSpec],
) -> list[KVCacheConfig]:
    """vLLM's function of this name, for specs among which there may be rings.

    Args:
        original: vLLM's own function.
        planner: vLLM's planning functions.
        vllm_config: as for vLLM's.
        kv_cache_specs: one dictionary of specs by layer name for each worker.
        available_memory: bytes for each worker.
        global_groups: the groups of the target, which vLLM 0.33 hands on.

    Raises:
        ValueError: not even one request's ring fits, a prefix hit could end inside one of its
            blocks, or the draft's layers differ.

    """
    rings = [only_rings(specs) for specs in kv_cache_specs]
    if not any(rings):
        return original(vllm_config, kv_cache_specs, available_memory, *global_groups)

    spec = _shared_spec(rings)
    _refuse_hits_inside_ring_blocks(vllm_config, spec)
    _refuse_copies_of_packed_blocks(vllm_config, kv_cache_specs)
    native = _native_plans(planner, vllm_config, kv_cache_specs, available_memory)
    native_blocks = min(plan.num_blocks for plan in native)
    spec = replace(spec, pool_blocks=_pool_blocks(vllm_config, spec, native_blocks))
    num_layers = max(map(len, rings))
    native_bytes = native_blocks * spec.native.page_size_bytes * num_layers
    spec = replace(spec, saved_bytes=native_bytes - pool_bytes(spec, num_layers))
    configs = original(
        vllm_config,
        [without_rings(specs) for specs in kv_cache_specs],
        [
            memory - (pool_bytes(spec, len(ring)) + ALIGNMENT if ring else 0)
            for memory, ring in zip(available_memory, rings, strict=True)
        ],
        *global_groups,
    )
    configs = [
        append_ring(planner, vllm_config, config, list(ring), spec)
        for config, ring in zip(configs, rings, strict=True)
    ]
    _log_plan(planner, vllm_config, spec, num_layers, configs, native)
    return configs


def append_ring(
    planner: Planner,
    vllm_config: VllmConfig,
    target: KVCacheConfig,
    layer_names: list[str],
    spec: RingSpec,
) -> RingKVCacheConfig:
    """The plan `target` with the ring's group added, and its tensors in front of the target's bytes.

    In front: vLLM's warm-up and dummy runs take block ids for all groups from the target's range,
    beyond the ring pool. Such an id then means bytes of the target, which nothing uses yet, and not
    bytes behind the allocation.
    """
    group = KVCacheGroupSpec(layer_names, spec)
    tensors = list(target.kv_cache_tensors)
    if layer_names:
        ring = planner.config_from_groups(
            _without_block_override(vllm_config), [group], pool_bytes(spec, len(layer_names))
        )
        assert ring.num_blocks == spec.pool_blocks, (ring.num_blocks, spec)
        ring_size = ceil_div(ring.kv_cache_tensors[0].size, ALIGNMENT) * ALIGNMENT
        size = ring_size + max((t.size for t in tensors), default=0)
        tensors = [replace(t, size=size, offset=ring_size + t.offset) for t in tensors] + [
            replace(t, size=size) for t in ring.kv_cache_tensors
        ]
    values = {field.name: getattr(target, field.name) for field in fields(target)}
    values |= {
        "kv_cache_tensors": tensors,
        "kv_cache_groups": [*target.kv_cache_groups, group],
    }
    return RingKVCacheConfig(**values)


def get_kv_cache_groups(
    planner: Planner, vllm_config: VllmConfig, specs: Specs
) -> list[KVCacheGroupSpec]:
    """vLLM's function of this name; a profiling run calls it with one worker's specs."""
    rings = only_rings(specs)
    if not rings:
        return planner.groups(vllm_config, specs)
    groups = planner.groups(vllm_config, without_rings(specs))
    return [*groups, KVCacheGroupSpec(list(rings), _shared_spec([rings]))]


def get_kv_cache_config_from_groups(
    planner: Planner,
    vllm_config: VllmConfig,
    kv_cache_groups: list[KVCacheGroupSpec],
    available_memory: int,
) -> KVCacheConfig:
    """vLLM's function of this name; a profiling run asks for the smallest possible cache."""
    rings = [g for g in kv_cache_groups if isinstance(g.kv_cache_spec, RingSpec)]
    if not rings:
        return planner.config_from_groups(vllm_config, kv_cache_groups, available_memory)
    target_groups = [g for g in kv_cache_groups if g not in rings]
    config = planner.config_from_groups(vllm_config, target_groups, available_memory)
    for ring in rings:
        spec = replace(ring.kv_cache_spec, pool_blocks=max(2, config.num_blocks))
        config = append_ring(planner, vllm_config, config, ring.layer_names, spec)
    return config


def _shared_spec(rings: Sequence[dict[str, RingSpec]]) -> RingSpec:
    """The spec of all draft layers: they are one group, so they share block ids."""
    specs = {name: spec for ring in rings for name, spec in ring.items()}
    first = next(iter(specs.values()))
    for name, spec in specs.items():
        if spec != first:
            raise ValueError(
                f"windowed_mtp does not handle drafts whose layers have different KV caches; that "
                f'of {name} is {spec}, another\'s is {first}. Use method "mtp".'
            )
    return first


def _native_plans(
    planner: Planner,
    vllm_config: VllmConfig,
    kv_cache_specs: list[Specs],
    available_memory: list[int],
) -> list[KVCacheConfig]:
    """What vLLM would plan for native MTP, worker by worker."""
    plans = []
    for specs, memory in zip(kv_cache_specs, available_memory, strict=True):
        native = {n: s.native if isinstance(s, RingSpec) else s for n, s in specs.items()}
        groups = planner.groups(vllm_config, native)
        plans.append(planner.config_from_groups(vllm_config, groups, memory))
    return plans


def _refuse_hits_inside_ring_blocks(vllm_config: VllmConfig, spec: RingSpec) -> None:
    """The ring has no KV of a hit, and a block is left out of the compact table whole or not."""
    unit = vllm_config.cache_config.prefix_match_unit
    block_size = spec.block_size
    if unit and vllm_config.cache_config.enable_prefix_caching and unit % block_size:
        raise ValueError(
            f"windowed_mtp: with prefix_match_unit={unit} a prefix hit could end inside a block of "
            f"the draft's ring, which has {block_size} tokens. Set prefix_match_unit to a multiple "
            f"of {block_size}, or leave it out."
        )


def _refuse_copies_of_packed_blocks(vllm_config: VllmConfig, kv_cache_specs: list[Specs]) -> None:
    """vLLM copies a packed block whole only where blocks are all that the allocation holds."""
    cache_config = vllm_config.cache_config
    layout = cache_config.get_resolved_kv_cache_layout()
    is_hybrid = any(isinstance(s, MambaSpec) for specs in kv_cache_specs for s in specs.values())
    if layout.is_block_outermost and is_hybrid and cache_config.enable_prefix_caching:
        raise ValueError(
            f"windowed_mtp: with a ring, prefix caching of a hybrid model needs a KV cache layout "
            f"whose outermost dimension is the layer; found {layout.name}. Set "
            'VLLM_KV_CACHE_LAYOUT=LBNHC, turn prefix caching off, or set "draft_kv_cache": "full".'
        )


def _pool_blocks(vllm_config: VllmConfig, spec: RingSpec, native_num_blocks: int) -> int:
    """Blocks of the ring pool: enough for every sequence and the cache of those that have ended, but
    no more bytes than native MTP."""
    window, k = spec.draft_window, spec.num_speculative_tokens
    max_model_len = vllm_config.model_config.max_model_len
    in_flight = vllm_config.max_in_flight_tokens
    num_seqs = vllm_config.scheduler_config.max_num_seqs
    # One more for the null block.
    wanted = 1 + window.max_pool_blocks(num_seqs, k, in_flight, max_model_len)
    cache = spec.cache_blocks
    if not vllm_config.cache_config.enable_prefix_caching:
        cache = 0
    elif cache is None:
        cache = ceil_div(num_seqs, 8) * window.ring_budget(k, max_model_len)
    native_bytes = native_num_blocks * spec.native.page_size_bytes
    affordable = native_bytes // spec.page_size_bytes
    least = 1 + window.max_held_blocks(k, in_flight, max_model_len)
    if affordable < least:
        raise ValueError(
            f"windowed_mtp: the draft's ring needs at least {least} blocks of {window.block_size} "
            f"tokens for one request, but native MTP would have had room for {affordable} only. "
            "Give the KV cache more memory, or lower max_model_len, draft_window_size or "
            "max_num_batched_tokens."
        )
    if affordable < wanted:
        logger.warning(
            "windowed_mtp: the ring pool is capped at %d blocks, what native MTP would have spent "
            "on the draft; %d would let max_num_seqs=%d requests run at once. Requests beyond that "
            "wait, or preempt one. Lower max_num_seqs or draft_window_size if that is not wanted.",
            affordable,
            wanted,
            num_seqs,
        )
    return min(wanted + cache, affordable)


def pool_bytes(spec: RingSpec, num_layers: int) -> int:
    """What the ring pool takes, for all draft layers of a worker."""
    return spec.pool_blocks * spec.page_size_bytes * num_layers


def _without_block_override(vllm_config: VllmConfig) -> VllmConfig:
    """`num_gpu_blocks_override` is a number of the target's blocks, not of the ring's."""
    config = copy.copy(vllm_config)
    config.cache_config = copy.copy(vllm_config.cache_config)
    config.cache_config.num_gpu_blocks_override = None
    return config


def _log_plan(
    planner: Planner,
    vllm_config: VllmConfig,
    spec: RingSpec,
    num_layers: int,
    configs: Sequence[KVCacheConfig],
    native: Sequence[KVCacheConfig],
) -> None:
    tokens, _ = planner.capacity(vllm_config, _scheduler_view(configs))
    native_tokens, _ = planner.capacity(vllm_config, _scheduler_view(native))
    logger.info(
        "windowed_mtp: window %d + sink %d tokens; ring of %d blocks of %d tokens a request; "
        "ring pool %d blocks = %.1f MiB (native MTP: %.1f MiB for the draft); "
        "KV cache %s tokens (native MTP: %s, %+.1f%%)",
        spec.window,
        spec.sink,
        spec.draft_window.ring_budget(
            spec.num_speculative_tokens, vllm_config.model_config.max_model_len
        ),
        spec.block_size,
        spec.pool_blocks,
        pool_bytes(spec, num_layers) / 2**20,
        (pool_bytes(spec, num_layers) + spec.saved_bytes) / 2**20,
        f"{tokens:,}",
        f"{native_tokens:,}",
        100 * (tokens / native_tokens - 1),
    )


def _scheduler_view(configs: Sequence[KVCacheConfig]) -> Any:
    """The plan with the fewest blocks: the one that all workers are held to."""
    return min(configs, key=lambda config: config.num_blocks)
