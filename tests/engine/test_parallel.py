"""Several processes on a CPU: the ring under tensor parallelism."""

import random

import pytest

from tests.support.engine import engine, windowed

pytestmark = pytest.mark.engine


def test_tensor_parallel_2_is_lossless_and_accepts_as_one_rank_does(tiny_model, monkeypatch):
    # Two cores and one NUMA node: each rank's threads are bound by hand.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    rng = random.Random(0)
    prompts = [[rng.randrange(4, 256) for _ in range(n)] for n in (1, 5, 97, 136, 300, 900)]
    with engine(tiny_model("dense")) as plain:
        expected = plain.generate(prompts, 32)
    acceptance = {}
    for ranks in (1, 2):
        with engine(
            tiny_model("dense"), windowed(3, 96, 40), tensor_parallel_size=ranks
        ) as running:
            assert running.generate(prompts, 32) == expected
            acceptance[ranks] = running.acceptance_length()
    assert acceptance[2] == pytest.approx(acceptance[1], rel=0.1)
