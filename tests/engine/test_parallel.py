"""Several ranks on a CPU: the ring under tensor, data and pipeline parallelism."""

import asyncio
import random
from typing import Any
from unittest.mock import Mock

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.reader import get_metrics_snapshot

from tests.support.engine import SMALL, engine, windowed

SPECULATIVE = windowed(3, 96, 40)
HANG = 60
"""Seconds after which ranks that wait for each other are given up; they need about one."""


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    """Two cores and one NUMA node: each rank's threads are bound by hand."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(4, 256) for _ in range(n)] for n in lengths]


@pytest.mark.engine
def test_tensor_parallel_2_is_lossless_and_accepts_as_one_rank_does(tiny_model):
    texts = prompts(1, 5, 97, 136, 300, 900)
    with engine(tiny_model("dense")) as plain:
        expected = plain.generate(texts, 32)
    acceptance = {}
    for ranks in (1, 2):
        with engine(tiny_model("dense"), SPECULATIVE, tensor_parallel_size=ranks) as running:
            assert running.generate(texts, 32) == expected
            acceptance[ranks] = running.acceptance_length()
    assert acceptance[2] == pytest.approx(acceptance[1], rel=0.1)


@pytest.mark.engine
@pytest.mark.v2
def test_data_parallel_2_with_an_idle_rank_is_lossless_and_accepts_as_one_rank_does(
    tiny_model, monkeypatch
):
    """In lockstep, as vLLM runs the ranks of a mixture of experts: the idle one runs dummy batches.

    vLLM's CPU ranks cannot exchange experts' tokens, so the dense model says that it has some.
    """
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # to send the ranks a function
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "300")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    texts = prompts(300, 900, 5, 136)
    with engine(tiny_model("dense")) as plain:
        expected = plain.generate(texts, 32)
    with engine(tiny_model("dense"), SPECULATIVE) as one_rank:
        assert one_rank.generate(texts, 32) == expected
        acceptance = one_rank.acceptance_length()

    arguments = SMALL | {
        "model": tiny_model("dense"),
        "speculative_config": SPECULATIVE,
        "data_parallel_size": 2,
        "hf_overrides": {"num_experts": 2},
        "distributed_executor_backend": "uni",
    }
    answers, dummy_batches, acceptances = asyncio.run(serve_on_rank_1(arguments, texts))
    assert answers == [expected, [*expected, expected[0]]]
    assert dummy_batches[0] > 10, "rank 0 kept step while it was idle"
    assert dummy_batches[1] - dummy_batches[0] > 0, "and again once its one request had ended"
    assert acceptances == pytest.approx([acceptance, acceptance], rel=0.1)


async def serve_on_rank_1(arguments: dict[str, Any], texts: list[list[int]]) -> Any:
    """Rank 1 answers all, rank 0 nothing; then rank 1 all again, and rank 0 the first.

    Returns the answers and, after each part, rank 0's dummy batches and rank 1's acceptance length.
    """
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def answer(number: int, rank: int) -> list[int]:
        params = SamplingParams(
            temperature=0, max_tokens=32, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
        prompt = {"prompt_token_ids": texts[number]}
        name = f"{number} on {rank}"
        [output] = [o async for o in llm.generate(prompt, params, name, data_parallel_rank=rank)]
        return list(output.outputs[0].token_ids)

    answers, dummy_batches, acceptances = [], [], []
    try:
        await llm.collective_rpc(count_dummy_batches)
        everything = [(number, 1) for number in range(len(texts))]
        for load in (everything, [*everything, (0, 0)]):
            requests = asyncio.gather(*(answer(*where) for where in load))
            answers.append(await asyncio.wait_for(requests, HANG))
            # Of every rank, but vLLM hands on the first one's result.
            dummy_batches += await llm.collective_rpc(count_dummy_batches)
            acceptances.append(acceptance_length(rank=1))
    finally:
        llm.shutdown(timeout=0)
    return answers, dummy_batches, acceptances


def count_dummy_batches(worker: Any) -> int:
    """The dummy batches that a worker has run since this was first called."""
    if not isinstance(worker.execute_dummy_batch, Mock):
        worker.execute_dummy_batch = Mock(wraps=worker.execute_dummy_batch)
    return worker.execute_dummy_batch.call_count


def acceptance_length(rank: int) -> float:
    counters = {
        metric.name: metric.value
        for metric in get_metrics_snapshot()
        if metric.labels.get("engine") == str(rank) and hasattr(metric, "value")
    }
    accepted = counters["vllm:spec_decode_num_accepted_tokens"]
    return 1 + accepted / counters["vllm:spec_decode_num_drafts"]


@pytest.mark.v2
@pytest.mark.parametrize("stages", [1, 2])
def test_asynchronous_scheduling_is_lossless_in_one_and_two_pipeline_stages(
    tiny_model, monkeypatch, stages
):
    """vLLM turns it off on a CPU, where it runs all the same; MTP in a pipeline needs it."""
    check_and_update_config = current_platform.check_and_update_config

    @classmethod
    def keep_asynchronous(cls, config):
        wanted = config.scheduler_config.async_scheduling
        check_and_update_config(config)
        config.scheduler_config.async_scheduling = wanted

    texts = prompts(5, 136, 300)
    with engine(tiny_model("dense")) as plain:
        expected = plain.generate(texts, 12)
    with engine(tiny_model("dense"), SPECULATIVE) as synchronous:
        assert synchronous.generate(texts, 12) == expected
        acceptance = synchronous.acceptance_length()
    monkeypatch.setattr(type(current_platform), "check_and_update_config", keep_asynchronous)
    parallel = {"pipeline_parallel_size": stages} if stages > 1 else {}
    with engine(tiny_model("dense"), SPECULATIVE, async_scheduling=True, **parallel) as running:
        assert type(running.core.scheduler).__name__ == "AsyncScheduler"
        assert running.core.batch_queue_size == stages + 1
        assert running.generate(texts, 12) == expected
        assert running.acceptance_length() == pytest.approx(acceptance, rel=0.1)
