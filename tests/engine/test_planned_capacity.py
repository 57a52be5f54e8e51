"""`wmtp plan` says what the engine then reports."""

import json
from pathlib import Path

import pytest

from tests.support.engine import SMALL, engine, native, windowed
from wmtp_vllm.planner.anatomy import Question, study

pytestmark = pytest.mark.engine

HYBRID = {"dtype": "bfloat16", "block_size": None, "max_num_batched_tokens": 1024}
METHODS = {"native_capacity": native(3), "windowed_capacity": windowed(3, 512, 64)}


@pytest.mark.parametrize(("kind", "arguments"), [("dense", {}), ("hybrid", HYBRID)])
def test_planned_capacity_is_the_engines(tiny_model, kind, arguments):
    model = tiny_model(kind)
    config = json.loads(Path(model, "config.json").read_text())
    asked = Question(
        config,
        SMALL | arguments,
        METHODS["windowed_capacity"],
        batch=1,
        weight_bits=16,
        gpu_bytes=0,
        kv_bytes=SMALL["kv_cache_memory_bytes"],
    )
    [studied] = study([asked])
    for name, speculative in METHODS.items():
        with engine(model, speculative, **arguments) as running:
            reported = running.core.vllm_config.cache_config.kv_cache_size_tokens
        assert getattr(studied.memory, name) == pytest.approx(reported, rel=0.01), name
    assert studied.memory.windowed_capacity > 1.1 * studied.memory.native_capacity
