"""The memory plan: the target's is vLLM's own, the ring's lies before it and costs no more."""

import itertools
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.engine import core
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from tests.support.engine import windowed
from tests.support.scheduling import (
    attention_spec,
    dense_specs,
    engine_config,
    hybrid_specs,
    ring_spec,
)
from wmtp_vllm import seams
from wmtp_vllm.kv_manager.planning import RingKVCacheConfig, without_rings
from wmtp_vllm.kv_manager.spec import RingSpec, ring_block_size
from wmtp_vllm.window import Window, ceil_div

pytestmark = pytest.mark.unit

MIB = 1 << 20
Specs = dict[str, KVCacheSpec]
TARGETS = {"dense": dense_specs, "hybrid": hybrid_specs}
each_target = pytest.mark.parametrize("target", TARGETS)
WINDOWED = windowed(3, 100, 20)
NATIVE = {"method": "mtp", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def configure(tiny_model: Callable[..., str]) -> Callable[..., VllmConfig]:
    def make(speculative: dict[str, Any] | None = WINDOWED, **arguments: Any) -> VllmConfig:
        return engine_config(tiny_model("dense"), speculative, **arguments)

    return make


def plan(config: VllmConfig, specs: Specs, memory: int) -> KVCacheConfig:
    """The plan for one worker, as the engine makes it."""
    return core.get_kv_cache_configs(config, [specs], [memory])[0]


def ring_of(config: KVCacheConfig) -> RingSpec:
    spec = config.kv_cache_groups[-1].kv_cache_spec
    assert isinstance(spec, RingSpec)
    return spec


def ring_bytes(config: KVCacheConfig) -> int:
    spec = ring_of(config)
    return spec.pool_blocks * spec.page_size_bytes * len(config.kv_cache_groups[-1].layer_names)


def places(config: KVCacheConfig, shift: int = 0) -> list[tuple[Any, ...]]:
    """Where each tensor's layers are, counted from `shift` bytes into the allocation."""
    return [
        (t.layers, t.offset - shift, t.layer_stride, t.block_stride)
        for t in config.kv_cache_tensors
    ]


@each_target
@pytest.mark.parametrize("memory", [4 * MIB, 16 * MIB + 12345])
def test_the_target_is_planned_as_vllm_plans_it_alone_with_the_memory_left(
    configure, target, memory
):
    config = configure()
    specs = TARGETS[target](config, 16)
    planned = plan(config, specs, memory)
    left = memory - ring_bytes(planned) - 256
    alone = plan(configure(None), without_rings(specs), left)
    assert planned.num_blocks == alone.num_blocks
    assert planned.kv_cache_groups[:-1] == alone.kv_cache_groups
    shift = min(tensor.offset for tensor in planned.kv_cache_tensors[:-1])
    assert places(planned, shift)[:-1] == places(alone)
    assert all(tensor.size <= memory for tensor in planned.kv_cache_tensors)


@each_target
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_the_ring_lies_before_the_target_and_neither_touches_the_other(configure, target, layout):
    config = configure()
    config.cache_config.kv_cache_layout = layout
    specs = TARGETS[target](config, 16)
    specs["mtp.1.attn"] = specs["mtp.attn"]
    planned = plan(config, specs, 4 * MIB + 100)
    caches = allocate_kv_cache(planned, torch.device("cpu"), KVCacheLayout[layout])
    rings = {name: caches.pop(name) for name in ("mtp.attn", "mtp.1.attn")}
    storage = caches["model.layers.0.attn"].untyped_storage()
    for ring in rings.values():
        assert ring.untyped_storage().data_ptr() == storage.data_ptr()
        assert len(ring) == ring_of(planned).pool_blocks
        assert ring.data_ptr() < min(cache.data_ptr() for cache in caches.values())
    assert min(t.offset for t in planned.kv_cache_tensors[:-1]) % 256 == 0

    for cache in caches.values():
        cache.fill_(1)
    assert not any(ring.any() for ring in rings.values())
    before = {name: cache.clone() for name, cache in caches.items()}
    for value, ring in enumerate(rings.values(), 2):
        ring.fill_(value)
    assert all(torch.equal(cache, before[name]) for name, cache in caches.items())
    assert [ring.unique().tolist() for ring in rings.values()] == [[2.0], [3.0]]


@given(
    memory=st.integers(MIB, 32 * MIB),
    max_num_seqs=st.sampled_from([1, 8, 100]),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 3000), st.integers(0, 200)),
    ring_block=st.sampled_from([4, 16]),
    target=st.sampled_from(list(TARGETS)),
)
@settings(max_examples=50, deadline=None)
def test_the_ring_never_takes_more_than_native_mtp_nor_the_target_less(
    configure, memory, max_num_seqs, sizes, ring_block, target
):
    arguments = {"max_num_seqs": max_num_seqs, "max_model_len": 1024}
    config = configure(windowed(*sizes), **arguments)
    specs = TARGETS[target](config, ring_block)
    native_config = configure(NATIVE | {"num_speculative_tokens": sizes[0]}, **arguments)
    native_spec = specs["mtp.attn"].native
    try:
        native = plan(native_config, {**specs, "mtp.attn": native_spec}, memory)
        planned = plan(config, specs, memory)
    except ValueError:
        reject()  # not one request fits
    assert ring_bytes(planned) <= native.num_blocks * native_spec.page_size_bytes
    assert planned.num_blocks >= native.num_blocks - 1  # the ring is aligned to 256 bytes


windows = st.builds(
    Window, st.integers(1, 200), st.integers(0, 70), st.sampled_from([1, 3, 16, 32])
)


@given(windows, st.integers(1, 9), st.lists(st.tuples(st.integers(0, 999), st.integers(0, 40))))
def test_the_pool_suffices_however_requests_are_aligned_and_tokens_in_flight_are_spread(
    window, k, requests
):
    held = 0
    for processed, in_flight in requests:
        end = ceil_div(processed + in_flight + k, window.block_size)
        first = window.first_window_block(processed)
        held += min(window.sink_blocks, end) + max(0, end - first)
    in_flight = sum(tokens for _, tokens in requests)
    assert held <= window.max_pool_blocks(len(requests), k, in_flight, max_model_len=10_000)


def test_a_plan_that_cannot_hold_one_request_is_refused_in_words(configure):
    config = configure(max_num_batched_tokens=2048)
    with pytest.raises(
        ValueError, match=r"the draft's ring needs at least \d+ blocks of 16 tokens"
    ):
        plan(config, dense_specs(config, 16), MIB)
    config = configure(windowed(3, 16, 0), max_num_batched_tokens=16)
    with pytest.raises(ValueError, match="To serve at least one request with the model's max seq"):
        plan(config, dense_specs(config, 16), MIB)


def test_hits_that_could_end_inside_a_ring_block_are_refused_in_words(configure):
    config = configure(block_size=64, enable_prefix_caching=True)
    specs = hybrid_specs(config, 32)
    config.cache_config.prefix_match_unit = 16
    with pytest.raises(ValueError, match="prefix_match_unit to a multiple of 32"):
        plan(config, specs, 16 * MIB)
    assert ring_of(plan(config, hybrid_specs(config, 16, 32), 16 * MIB)).block_size == 16


def test_draft_layers_with_different_caches_are_refused_in_words(configure):
    config = configure()
    specs = dense_specs(config, 16)
    specs["mtp.1.attn"] = ring_spec(config, attention_spec(16, head_size=64), 16)
    with pytest.raises(ValueError, match="layers have different KV caches"):
        plan(config, specs, 16 * MIB)


@each_target
def test_every_block_id_of_the_target_is_within_the_allocation_for_the_ring_too(configure, target):
    """vLLM's warm-up takes ids for all groups from the target's range, beyond a small ring pool."""
    config = configure(max_num_seqs=1)
    planned = plan(config, TARGETS[target](config, 16), 64 * MIB)
    assert planned.num_blocks > ring_of(planned).pool_blocks
    for tensor in planned.kv_cache_tensors:
        last = tensor.offset + (planned.num_blocks - 1) * tensor.block_stride
        last += (len(tensor.layers) - 1) * tensor.layer_stride
        assert last + ring_of(planned).page_size_bytes <= tensor.size


def test_packed_blocks_of_a_hybrid_model_with_prefix_caching_are_refused(configure):
    config = configure(enable_prefix_caching=True)
    config.cache_config.kv_cache_layout = "BLHNC"
    with pytest.raises(ValueError, match=r"found BLHNC.*VLLM_KV_CACHE_LAYOUT=LBNHC"):
        plan(config, hybrid_specs(config, 16), 16 * MIB)


def test_the_block_override_concerns_the_target_only(configure):
    config = configure()
    planned = plan(config, dense_specs(config, 16), 16 * MIB)
    config.cache_config.num_gpu_blocks_override = 200
    overridden = plan(config, dense_specs(config, 16), 16 * MIB)
    assert overridden.num_blocks == 200 != planned.num_blocks
    assert ring_of(overridden) == ring_of(planned)
    assert overridden.kv_cache_tensors[-1].offset == 0


@each_target
@pytest.mark.parametrize("cuts", [[4], [3, 4]], ids=["two stages", "three stages"])
def test_pipeline_stages_agree_on_groups_and_blocks_and_only_the_last_has_the_ring(
    configure, target, cuts
):
    config = configure()
    layers = list(TARGETS[target](config, 16).items())
    if target == "dense":  # more layers than stages
        layers[:1] = [(f"model.layers.0.{i}.attn", attention_spec(16)) for i in range(4)]
    stages = [dict(layers[start:end]) for start, end in itertools.pairwise([0, *cuts, None])]
    memory = [(24 - 4 * i) * MIB for i in range(len(stages))]
    plans = core.get_kv_cache_configs(config, stages, memory)
    assert len({p.num_blocks for p in plans}) == 1
    kinds = [[group.kv_cache_spec for group in p.kv_cache_groups] for p in plans]
    assert all(kind == kinds[0] for kind in kinds)
    rings = [p.kv_cache_groups[-1].layer_names for p in plans]
    assert rings == [*([[]] * len(cuts)), ["mtp.attn"]]
    for planned, specs, limit in zip(plans, stages, memory, strict=True):
        held = [name for group in planned.kv_cache_groups for name in group.layer_names]
        assert sorted(held) == sorted(specs)
        assert allocate_kv_cache(planned, torch.device("cpu"), KVCacheLayout.LBHNC).keys() == (
            specs.keys()
        )
        assert planned.kv_cache_tensors[0].size <= limit
    assert generate_scheduler_kv_cache_config(plans).num_blocks == plans[-1].num_blocks


@each_target
def test_what_a_profiling_run_asks_accepts_rings_and_is_vllms_own_without(configure, target):
    config = configure()
    specs = TARGETS[target](config, 16)
    groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    small = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, MIB)
    assert groups[-1].layer_names == ["mtp.attn"]
    assert allocate_kv_cache(small, torch.device("cpu"), KVCacheLayout.LBHNC).keys() == specs.keys()

    target_specs = without_rings(specs)
    own = seams.original("get_kv_cache_groups")(config, target_specs)
    assert kv_cache_utils.get_kv_cache_groups(config, target_specs) == own == groups[:-1]
    assert kv_cache_utils.get_kv_cache_config_from_groups(config, own, MIB) == seams.original(
        "get_kv_cache_config_from_groups"
    )(config, own, MIB)


@each_target
def test_the_plan_survives_the_way_to_the_workers_and_to_the_scheduler(configure, target):
    config = configure()
    planned = plan(config, TARGETS[target](config, 16), 16 * MIB)
    for arrived in (
        pickle.loads(pickle.dumps(planned)),
        generate_scheduler_kv_cache_config([planned, planned]),
    ):
        assert isinstance(arrived, RingKVCacheConfig)
        assert arrived.kv_cache_tensors == planned.kv_cache_tensors
        assert ring_of(arrived) == ring_of(planned)
        *targets, ring = arrived.kv_cache_tensors
        assert arrived.num_blocks_of(ring) == ring_of(planned).pool_blocks
        assert {arrived.num_blocks_of(t) for t in targets} == {planned.num_blocks}


@pytest.mark.parametrize(
    ("native", "kernels", "unit", "expected"),
    [
        (16, [MultipleOf(16)], None, 16),
        (128, [MultipleOf(16)], None, 64),  # no larger than need be
        (528, [MultipleOf(16)], None, 48),  # a hybrid model's, set by the Mamba page
        (528, [16, 32, 64], None, 16),
        (256, [128], None, 128),  # larger, where kernels take no less
        (96, [MultipleOf(32)], None, 32),
        (80, [MultipleOf(32)], None, 80),  # split by the kernels, as natively
        (128, [MultipleOf(16), 8], 24, 8),
        (128, [MultipleOf(32)], 16, 64),  # no divisor of both: the plan refuses
        (48, [], None, 48),  # kernels that take any
    ],
)
def test_a_ring_block_divides_the_targets_and_is_one_that_kernels_take(
    native, kernels, unit, expected
):
    assert ring_block_size(native, kernels, unit) == expected


def test_a_ring_spec_keeps_the_form_of_the_cache_that_it_replaces(configure):
    native = attention_spec(528, head_size_v=64, page_size_padded=1 << 20)
    ring = ring_spec(configure(), native, MultipleOf(16))
    assert ring.block_size == 48
    assert ring.page_size_bytes == 48 * 2 * (32 + 64) * 4
    assert ring.native == native
    assert not ring.prefix_cacheable
    assert replace(ring, pool_blocks=9) != ring


def test_a_ring_of_latents_takes_what_latents_take():
    latents = MLAAttentionSpec(block_size=128, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    ring = RingSpec.replacing(
        latents, [MultipleOf(1)], window=100, sink=10, num_speculative_tokens=3
    )
    assert ring.block_size == 64
    assert ring.page_size_bytes == 64 * 576 * 2 == latents.page_size_bytes // 2
