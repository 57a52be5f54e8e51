"""On a GPU: V2 with CUDA graphs and asynchronous scheduling, as vLLM runs by default there.

float32, so that greedy output is exact; Triton attention, since FlashAttention takes 16-bit floats
only. None of this has run yet where no GPU was at hand: the summary of a test run says so.
"""

import random

import pytest

from tests.support.engine import engine, native, windowed

pytestmark = pytest.mark.gpu

ON_GPU = {
    "attention_backend": "TRITON_ATTN",
    "enforce_eager": False,
    "block_size": 16,
    "kv_cache_memory_bytes": 1 << 30,
    "max_model_len": 32_768,
    "max_num_batched_tokens": 2048,
}


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(4, 256) for _ in range(n)] for n in (1, 15, 95, 96, 97, 136, 700, 9000)]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_output_is_plain_decodings_and_acceptance_is_native_mtps(tiny_model, graphs):
    arguments = ON_GPU | {"enforce_eager": not graphs}
    with engine(tiny_model("dense"), **arguments) as plain:
        expected = plain.generate(prompts(), 64)
    with engine(tiny_model("dense"), native(3), **arguments) as running:
        running.generate(prompts(), 64)
        native_acceptance = running.acceptance_length()
    with engine(tiny_model("dense"), windowed(3, 256, 64), **arguments) as running:
        assert running.generate(prompts(), 64) == expected
        assert running.acceptance_length() == pytest.approx(native_acceptance, rel=0.1)


@pytest.mark.parametrize("window", [(256, 0), (256, 128)], ids=str)
def test_the_draft_sees_its_window_and_sink_and_nothing_else(tiny_model, window):
    size, sink = window
    rng = random.Random(1)
    seen = {}
    with engine(tiny_model("induction"), windowed(7, size, sink), **ON_GPU) as running:
        for distance in (200, 1000):
            text = [rng.randrange(4, 256) for _ in range(distance)]
            running.generate([text + text[:16]], 33)
            seen[distance] = running.acceptance_length()
    assert seen[200] == 8.0
    assert seen[1000] == 8.0 if sink else seen[1000] <= 1.1


def test_the_ring_takes_no_more_memory_than_native_mtp(tiny_model):
    capacity = {}
    for name, config in (("native", native(3)), ("windowed", windowed(3, 512, 64))):
        with engine(tiny_model("dense"), config, **ON_GPU) as running:
            capacity[name] = running.core.vllm_config.cache_config.kv_cache_size_tokens
    assert capacity["windowed"] > capacity["native"]
