"""On a GPU, as vLLM runs there by default: Model Runner V2, CUDA graphs, asynchronous scheduling.

float32 where output is compared token for token, and then Triton's attention: the others take
16-bit floats only, and are held to the argmax of a teacher-forced run instead.
"""

import random
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.engine import test_hybrid, test_lossless_dense
from tests.support.engine import Engine, engine, native, windowed
from wmtp_vllm import seams
from wmtp_vllm.kv_manager.spec import RingSpec

pytestmark = pytest.mark.gpu

ON_GPU = {
    "attention_backend": "TRITON_ATTN",
    "enforce_eager": False,
    "block_size": 16,
    "kv_cache_memory_bytes": 1 << 30,
    "max_model_len": 32_768,
    "max_num_batched_tokens": 2048,
}
FULL_GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}}
GRAPHS = {"eager": {"enforce_eager": True}, "full": FULL_GRAPHS, "by default": {}}
WINDOWED = windowed(3, 256, 64)
MAX_TOKENS = 64


@pytest.fixture(scope="module", autouse=True)
def exact_float32() -> Iterator[None]:
    """Triton multiplies float32 as TF32 by default: too coarse for batches of different shapes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_F32_DEFAULT", "ieee")
        yield


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(4, 256) for _ in range(n)] for n in (1, 15, 95, 96, 97, 136, 700, 9000)]


@pytest.fixture(scope="module")
def plain(tiny_model) -> list[list[int]]:
    with engine(tiny_model("dense"), **ON_GPU) as running:
        return running.generate(prompts(), MAX_TOKENS)


@pytest.fixture(scope="module")
def native_acceptance(tiny_model) -> float:
    with engine(tiny_model("dense"), native(3), **ON_GPU) as running:
        running.generate(prompts(), MAX_TOKENS)
        return running.acceptance_length()


@pytest.mark.parametrize("graphs", GRAPHS)
def test_output_is_plain_decodings_and_acceptance_is_native_mtps(
    tiny_model, plain, native_acceptance, graphs, record_property
):
    with engine(tiny_model("dense"), WINDOWED, **ON_GPU | GRAPHS[graphs]) as running:
        config = running.core.vllm_config
        assert config.use_v2_model_runner
        assert config.scheduler_config.async_scheduling
        replays = count_replays_of_draft_graphs(running)
        assert running.generate(prompts(), MAX_TOKENS) == plain
        acceptance = running.acceptance_length()
    record_property("figure", f"AL {acceptance:.3f}, native MTP's {native_acceptance:.3f}")
    assert acceptance == pytest.approx(native_acceptance, rel=0.1)
    assert (replays.call_count > 0) == (graphs != "eager")


def count_replays_of_draft_graphs(running: Engine) -> Mock:
    manager = running.worker.model_runner.speculator.decode_cudagraph_manager
    manager.run_fullgraph = Mock(wraps=manager.run_fullgraph)
    return manager.run_fullgraph


def test_corrupted_drafts_leave_output_equal_and_fail_the_comparison_of_acceptance(
    tiny_model, plain, native_acceptance, monkeypatch
):
    with engine(tiny_model("dense"), WINDOWED, **ON_GPU | FULL_GRAPHS) as running:
        test_lossless_dense.corrupt_drafts(monkeypatch, running)
        assert running.generate(prompts(), MAX_TOKENS) == plain
        acceptance = running.acceptance_length()
    assert acceptance < 1.05
    assert acceptance != pytest.approx(native_acceptance, rel=0.1)


@pytest.mark.parametrize("window", [(256, 0), (256, 128)], ids=str)
def test_the_draft_sees_its_window_and_sink_and_nothing_else(tiny_model, window):
    size, sink = window
    rng = random.Random(1)
    seen = {}
    with engine(
        tiny_model("induction"), windowed(7, size, sink), **ON_GPU | FULL_GRAPHS
    ) as running:
        for distance in (200, 1000):
            text = [rng.randrange(4, 256) for _ in range(distance)]
            running.generate([text + text[:16]], 33)
            seen[distance] = running.acceptance_length()
    assert seen[200] == 8.0
    assert seen[1000] == 8.0 if sink else seen[1000] <= 1.1


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"])
def test_each_backend_emits_the_targets_argmax_and_accepts_as_native_mtp(
    tiny_model, backend, record_property
):
    try:
        AttentionBackendEnum[backend].get_class()
    except ImportError as error:
        pytest.skip(f"{backend} cannot be imported: {error}")
    arguments = ON_GPU | FULL_GRAPHS | {"attention_backend": backend, "dtype": "bfloat16"}
    answers, acceptance = {}, {}
    for name, config in (("native", native(3)), ("windowed", WINDOWED)):
        with engine(tiny_model("dense"), config, **arguments) as running:
            assert backends_of_draft(running) == {backend}
            answers[name] = running.generate(test_hybrid.prompts(), MAX_TOKENS)
            acceptance[name] = running.acceptance_length()
    with engine(tiny_model("dense"), **arguments) as plain:
        regret = {name: test_hybrid.largest_regret(plain, answers[name]) for name in answers}
        garbage = test_hybrid.largest_regret(plain, [[5] * MAX_TOKENS for _ in answers["native"]])
    record_property("figure", f"AL {acceptance}, largest logit regret {regret}")
    allowed = max(2 * regret["native"], test_hybrid.NOISE)
    assert regret["windowed"] <= allowed < garbage / 10
    assert acceptance["windowed"] == pytest.approx(acceptance["native"], rel=0.1)


def backends_of_draft(running: Engine) -> set[str]:
    layers = running.core.vllm_config.compilation_config.static_forward_context
    return {
        layers[name].attn_backend.get_name()
        for draft in running.llm.collective_rpc(seams.draft_of)
        for name in draft.layer_names
    }


def test_sleep_at_level_1_and_2_frees_memory_and_changes_no_output(tiny_model, record_property):
    # At level 2 vLLM forgets all weights, and reads again only the target's.
    sleepy = {"enable_sleep_mode": True, "sleep_preserve_parameter_names": ["draft.*"]}
    with engine(tiny_model("dense"), WINDOWED, **ON_GPU | FULL_GRAPHS | sleepy) as running:
        expected = running.generate(prompts(), MAX_TOKENS)
        acceptance = running.acceptance_length()
        for level in (1, 2):
            awake = torch.cuda.mem_get_info()[0]
            running.llm.sleep(level)
            freed = torch.cuda.mem_get_info()[0] - awake
            record_property("figure", f"level {level} frees {freed / 2**20:.0f} MiB")
            assert freed >= 0.9 * ON_GPU["kv_cache_memory_bytes"]
            running.llm.wake_up()
            if level == 2:
                running.llm.collective_rpc("reload_weights")
            assert running.generate(prompts(), MAX_TOKENS) == expected
            assert running.acceptance_length() == pytest.approx(acceptance, rel=0.01)


def test_ring_and_target_fill_the_plan_and_nothing_else_of_size_is_allocated(
    tiny_model, record_property
):
    capacity, beyond_the_plan = {}, {}
    for name, config in (("native", native(3)), ("windowed", WINDOWED)):
        before = torch.cuda.memory_allocated()
        with engine(tiny_model("dense"), config, **ON_GPU | {"enforce_eager": True}) as running:
            allocated = torch.cuda.memory_allocated() - before
            capacity[name] = running.core.vllm_config.cache_config.kv_cache_size_tokens
            planned, in_use = kv_cache_bytes(running)
            [draft] = running.llm.collective_rpc(seams.draft_of)
            tables = [b.compactor.table for b in draft.metadata_builders if name == "windowed"]
        assert in_use <= planned <= ON_GPU["kv_cache_memory_bytes"]
        assert planned - in_use < 1 << 20, "but for a block that does not fit, and alignment"
        beyond_the_plan[name] = allocated - planned
    extra = beyond_the_plan["windowed"] - beyond_the_plan["native"]
    record_property("figure", f"KV {capacity} tokens; beyond its plan {extra:,} bytes more")
    assert capacity["windowed"] > capacity["native"]
    # The draft's group has a builder for either model, with a compact table and the kernel's
    # scratch, and a block table.
    assert extra <= 2 * sum(table.nbytes for table in tables) + (4 << 20)


def kv_cache_bytes(running: Engine) -> tuple[int, int]:
    """Bytes of the KV cache's allocations, and of those that target and ring use."""
    layers = running.core.vllm_config.compilation_config.static_forward_context.values()
    caches = [layer.kv_cache for layer in layers]
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in caches}
    config = running.worker.model_runner.kv_cache_config
    in_use = 0
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        blocks = spec.pool_blocks if isinstance(spec, RingSpec) else config.num_blocks
        in_use += blocks * spec.page_size_bytes * len(group.layer_names)
    return sum(storage.nbytes() for storage in storages.values()), in_use
