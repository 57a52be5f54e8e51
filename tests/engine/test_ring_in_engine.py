"""The ring at work in real engines: what the kernel is told to read, and what requests hold."""

import random

import pytest

from tests.support.engine import Engine, engine, windowed
from wmtp_vllm import seams

pytestmark = [pytest.mark.engine, pytest.mark.v2]

K, W, S, BLOCK = 3, 256, 64, 32


def prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(4, 256) for _ in range(length)]


def watch_draft_steps(running: Engine) -> list[int]:
    """Collects the tokens a request that the metadata of each draft step tells the kernel to read."""
    [draft] = running.llm.collective_rpc(seams.draft_of)
    read: list[int] = []
    for builder in draft.metadata_builders:
        build = builder.build

        def build_and_note(*args, build=build, **kwargs):
            metadata = build(*args, **kwargs)
            if metadata.max_query_len == 1:
                read.append(int(metadata.seq_lens.max()))
                assert metadata.max_seq_len >= read[-1]
            return metadata

        builder.build = build_and_note
    return read


def test_a_draft_step_reads_sink_and_window_whatever_the_context(tiny_model, runner):
    contexts = [1_000, 10_000] + ([100_000] if runner == "V1" else [])
    with engine(
        tiny_model("dense", layers=1),
        windowed(K, W, S),
        dtype="bfloat16",
        max_model_len=101_000,
        max_num_batched_tokens=8192,
        max_num_seqs=2,
        kv_cache_memory_bytes=256 << 20,
    ) as running:
        read = watch_draft_steps(running)
        for context in contexts:
            read.clear()
            running.generate([prompt(context)], 8)
            assert read, "draft steps were seen"
            assert S + W <= max(read) <= S + W + K + 2 * BLOCK, (context, read)


def test_the_pool_is_whole_again_after_finish_abort_and_preemption(tiny_model):
    # Room for about 1,200 tokens of the target, and five requests of up to 500.
    with engine(
        tiny_model("dense"),
        windowed(K, 96, 40),
        max_model_len=512,
        kv_cache_memory_bytes=4 << 20,
        max_num_seqs=5,
    ) as running:
        manager = running.kv_cache_manager.coordinator.single_type_managers[-1]
        pools = [running.kv_cache_manager.block_pool, manager.block_pool]
        assert pools[0] is not pools[1]
        free = [pool.get_num_free_blocks() for pool in pools]
        scheduler = running.core.scheduler
        held_before_step = scheduler.schedule
        budget = manager.window.max_held_blocks

        def schedule(*args, **kwargs):
            output = held_before_step(*args, **kwargs)
            for request in scheduler.running:
                row = manager.req_to_blocks[request.request_id]
                held = sum(not block.is_null for block in row)
                assert held <= budget(K, request.num_in_flight_tokens, 512)
            return output

        scheduler.schedule = schedule
        prompts = [prompt(400 + i) for i in range(5)]
        answers = running.generate(prompts, 60)
        preemptions = {m.name: m for m in running.llm.get_metrics()}["vllm:num_preemptions"].value
        assert preemptions > 0, "the pool is small enough to preempt"
        assert [pool.get_num_free_blocks() for pool in pools] == free

        llm_engine = running.llm.llm_engine
        add_and_abort(running, llm_engine, prompts)
        assert [pool.get_num_free_blocks() for pool in pools] == free
        assert running.generate(prompts, 60) == answers

    with engine(tiny_model("dense"), max_model_len=512) as plain:
        assert plain.generate(prompts, 60) == answers


def add_and_abort(running: Engine, llm_engine, prompts: list[list[int]]) -> None:
    """Abort requests in the waiting queue, in prefill and in decode."""
    from vllm import SamplingParams

    for steps in (0, 1, 3):
        ids = []
        for i, tokens in enumerate(prompts):
            name = f"abort-{steps}-{i}"
            params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
            ids.append(llm_engine.add_request(name, {"prompt_token_ids": tokens}, params) or name)
        for _ in range(steps):
            llm_engine.step()
        llm_engine.abort_request(ids)
        while llm_engine.has_unfinished_requests():
            llm_engine.step()
        running.core.step()
