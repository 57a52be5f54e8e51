"""The ring's block manager under vLLM's real scheduler: what is held, read, returned and shared.

Every step of every test here is checked by the shadow of `tests.support.shadow_worker`: what the
compact table lists is exactly what was written for the positions that the draft should see.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.output import SchedulerOutput

from tests.support.engine import windowed
from tests.support.scheduling import Simulation, dense_specs, engine_config, hybrid_specs
from tests.support.shadow_worker import Mismatch
from wmtp_vllm.window import Window

pytestmark = pytest.mark.unit

both_paces = pytest.mark.parametrize("delayed", [False, True], ids=["in step", "a step ahead"])


@pytest.fixture(scope="module")
def simulate(tiny_model: Callable[..., str]) -> Callable[..., Simulation]:
    def make(
        k: int = 3,
        window: int = 100,
        sink: int = 20,
        *,
        ring_block: int = 16,
        target_blocks: int = 400,
        ring_blocks: int | None = None,
        seed: int = 0,
        **arguments: Any,
    ) -> Simulation:
        config = engine_config(tiny_model("dense"), windowed(k, window, sink), **arguments)
        specs = dense_specs(config, ring_block)
        return Simulation(config, specs, target_blocks, ring_blocks, seed)

    return make


def watch_scheduled(simulation: Simulation, look: Callable[[SchedulerOutput], Any]) -> None:
    """Call `look` with each step that is scheduled, before it runs."""
    execute = simulation.worker.execute

    def watched(output: SchedulerOutput) -> Any:
        look(output)
        return execute(output)

    simulation.worker.execute = watched  # type: ignore[method-assign]


def count_refusals(simulation: Simulation) -> list[str]:
    """The requests for which the ring pool had no blocks, as they come."""
    refused: list[str] = []
    ring = simulation.ring
    ask = ring.get_num_blocks_to_allocate

    def asked(request_id: str, *args: Any, **kwargs: Any) -> int:
        needed = ask(request_id, *args, **kwargs)
        refused.extend([request_id] if needed else [])
        return needed

    ring.get_num_blocks_to_allocate = asked
    return refused


@both_paces
def test_a_request_of_100_000_tokens_holds_no_more_than_its_budget(simulate, delayed):
    k, length = 3, 100_000
    sizes = {"target_blocks": 6400, "max_model_len": length + 16, "max_num_batched_tokens": 2048}
    simulation = simulate(k, window=250, sink=32, delayed=delayed, **sizes)
    before = simulation.free_blocks()
    request = simulation.add("long", simulation.prompt(length - 16_000), 16_000)
    window = simulation.ring.window
    held_in_decode = []

    def look(_: SchedulerOutput) -> None:
        held = before[1] - simulation.ring_pool.get_num_free_blocks()
        in_flight = request.num_in_flight_tokens
        assert held <= window.max_held_blocks(k, in_flight, length + 16)
        if in_flight <= 2 * (k + 1):
            held_in_decode.append(held)

    watch_scheduled(simulation, look)
    while simulation.scheduler.get_num_unfinished_requests() or simulation.pending:
        simulation.step()
    assert request.num_tokens == length
    assert max(held_in_decode) >= window.ring_budget(k, length) - 1, "the budget is not so loose"
    assert simulation.worker.num_reads >= 3 * len(held_in_decode) > 10_000
    assert simulation.free_blocks() == before


@both_paces
@pytest.mark.parametrize("abort_after", [2, 30], ids=["in prefill", "in decode"])
def test_all_blocks_return_when_requests_are_aborted(simulate, delayed, abort_after):
    simulation = simulate(delayed=delayed)
    before = simulation.free_blocks()
    requests = [simulation.add(name, simulation.prompt(900), 200) for name in ("a", "b")]
    for _ in range(abort_after):
        simulation.step()
    assert (requests[0].num_output_tokens > 0) == (abort_after > 2)
    assert simulation.free_blocks()[1] < before[1]
    simulation.abort("a", "b")
    simulation.run()
    assert simulation.free_blocks() == before


@both_paces
def test_all_blocks_return_when_the_target_runs_out_and_requests_are_preempted(simulate, delayed):
    simulation = simulate(delayed=delayed, target_blocks=100, max_model_len=1024)
    before = simulation.free_blocks()
    requests = [simulation.add(name, simulation.prompt(500), 500) for name in ("a", "b", "c")]
    simulation.run()
    assert simulation.num_preemptions > 0
    assert all(request.num_output_tokens == 500 for request in requests)
    assert simulation.free_blocks() == before


@st.composite
def batches(draw):
    """A ring's sizes, a scheduler's, and requests as (prompt length, new tokens, steps before)."""
    length = st.integers(1, 700)
    return {
        "sizes": (
            draw(st.sampled_from([1, 3, 7])),
            draw(st.sampled_from([1, 16, 61, 300])),
            draw(st.sampled_from([0, 5, 32])),
        ),
        "ring_block": draw(st.sampled_from([1, 8, 16])),
        "delayed": draw(st.booleans()),
        "enable_prefix_caching": draw(st.booleans()),
        "max_num_batched_tokens": draw(st.sampled_from([32, 256])),
        "max_num_seqs": draw(st.sampled_from([2, 6])),
        "target_blocks": draw(st.sampled_from([65, 120, 500])),
        "is_ring_capped": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
        "requests": draw(
            st.lists(st.tuples(length, st.integers(1, 120), st.integers(0, 5)), max_size=8)
        ),
    }


@given(batches())
@settings(max_examples=40, deadline=None)
def test_any_batch_finishes_and_no_block_is_shared_or_lost(simulate, batch):
    requests, sizes = batch.pop("requests"), batch.pop("sizes")
    if batch.pop("is_ring_capped"):
        window = Window(*sizes[1:], batch["ring_block"])
        in_flight = (1 + batch["delayed"]) * batch["max_num_batched_tokens"]
        batch["ring_blocks"] = 1 + window.max_held_blocks(sizes[0], in_flight, 1024)
    simulation = simulate(*sizes, max_model_len=1024, **batch)
    before, shared = simulation.free_blocks(), simulation.prompt(700)
    added = []
    for i, (length, new_tokens, steps) in enumerate(requests):
        prompt = shared[: length // 2] + simulation.prompt(length - length // 2)
        added.append(simulation.add(str(i), prompt, new_tokens))
        for _ in range(steps):
            simulation.step()
            simulation.check_pools()
    simulation.run()
    assert [r.num_output_tokens for r in added] == [new for _, new, _ in requests]
    assert simulation.free_blocks() == before


@both_paces
@pytest.mark.parametrize("sink", [5, 20])
@pytest.mark.parametrize("first", range(1, 33))
def test_a_chunk_that_begins_in_the_sink_is_read_whole_wherever_the_one_before_it_ended(
    simulate, delayed, first, sink
):
    # The first request leaves of the budget what the second's first chunk gets. Of the blocks that this
    # one's lookahead reaches, those are needed that the rest of the prompt begins in.
    simulation = simulate(7, 1, sink, max_num_batched_tokens=128, delayed=delayed)
    for name, length in ("a", 128 - first), ("b", 60):
        simulation.add(name, simulation.prompt(length), 3)
    simulation.run()
    assert simulation.worker.num_reads > 0


@both_paces
def test_requests_wait_or_are_preempted_while_the_ring_pool_is_empty(simulate, delayed):
    k, in_flight = 3, 512 if delayed else 256
    least = 1 + Window(300, 20, 16).max_held_blocks(k, in_flight, 2048)
    simulation = simulate(k, 300, delayed=delayed, ring_blocks=least)
    refused = count_refusals(simulation)
    requests = [simulation.add(str(i), simulation.prompt(300), 200) for i in range(6)]
    running, free = [], []
    watch_scheduled(simulation, lambda _: running.append(len(simulation.scheduler.running)))
    watch_scheduled(simulation, lambda _: free.append(simulation.free_blocks()[0]))
    simulation.run()
    assert refused
    assert 1 < max(running) < 4
    assert min(free) > 2048 // 16, "the target's pool had blocks for another"
    assert all(request.num_output_tokens == 200 for request in requests)


@both_paces
def test_a_ring_pool_as_planned_is_never_empty_though_all_windows_are_aligned_alike(
    simulate, delayed
):
    k, n = 3, 8
    simulation = simulate(
        k, 10 * 16 - k, delayed=delayed, max_num_seqs=n, max_num_batched_tokens=n * (k + 1)
    )
    simulation.worker.rng = SimpleNamespace(random=lambda: 0.0)  # every draft is right
    refused = count_refusals(simulation)
    for i in range(n):
        simulation.add(str(i), [1, 2, 3], 400)
    simulation.run()
    assert not refused


@both_paces
@pytest.mark.parametrize("target", ["dense", "hybrid", "hybrid, hits inside blocks"])
def test_a_prefix_hit_is_as_long_as_without_speculation_and_the_draft_starts_warm(
    tiny_model, target, delayed
):
    hits = {}
    for speculative in (windowed(3, 100, 20), None):
        config = engine_config(
            tiny_model("dense"), speculative, delayed, block_size=64, enable_prefix_caching=True
        )
        if target != "dense":
            config.cache_config.mamba_cache_mode = "align"
        if target == "hybrid, hits inside blocks":
            config.cache_config.prefix_match_unit = 16
        specs = (dense_specs if target == "dense" else hybrid_specs)(config, 16, 32)
        simulation = Simulation(config, specs, 300)
        base, rng = [7] * 20 + list(range(280)), random.Random(0)
        simulation.add("first", base, 40)
        simulation.run()
        simulation.add("repeated", list(base), 40)
        simulation.add("extended", base + rng.choices(range(900), k=100), 40)
        simulation.add("forked", base[:200] + rng.choices(range(900), k=100), 40)
        simulation.run()
        hits[speculative is None] = simulation.cached_tokens
        if speculative is not None:
            ring = simulation.ring
            num_hits = sum(tokens > 0 for tokens in simulation.cached_tokens.values())
            assert (ring.num_warm_starts, ring.num_cold_starts) == (num_hits, 0)
    assert hits[False] == hits[True]
    assert hits[True]["repeated"] == (288 if "inside" in target else 256)


def free_on_scheduled_tokens(simulation: Simulation) -> None:
    remove = simulation.ring.remove_skipped_blocks

    def too_early(request_id: str, processed: int, num_prompt_tokens: int | None = None) -> None:
        in_flight = simulation.scheduler.requests[request_id].num_in_flight_tokens
        remove(request_id, processed + in_flight, num_prompt_tokens)

    simulation.ring.remove_skipped_blocks = too_early


def resize_window(owner: Any, blocks: int) -> None:
    size = owner.window.size + blocks * owner.window.block_size
    owner.window = replace(owner.window, size=size)


CONTROLS: dict[str, tuple[bool, Callable[[Simulation], None]]] = {
    "blocks are freed on scheduled tokens": (True, free_on_scheduled_tokens),
    "the ring lets go one block early": (False, lambda s: resize_window(s.ring, -1)),
    "the kept window begins one block late": (True, lambda s: resize_window(s.worker, -1)),
    "the kept window begins one block early": (True, lambda s: resize_window(s.worker, +1)),
    "null blocks are attended": (True, lambda s: setattr(s.worker, "null_blocks", ())),
}
"""Whether a step is scheduled ahead, and what is changed; it would make the draft read wrong KV."""


@pytest.mark.parametrize("name", ["nothing is changed", *CONTROLS])
def test_the_shadow_catches_wrong_reads(simulate, name):
    delayed, change = CONTROLS.get(name, (True, None))
    # A ring pool so small that what is let go is written to again at once.
    simulation = simulate(
        7,
        ring_block=4,
        delayed=delayed,
        enable_prefix_caching=True,
        max_num_batched_tokens=64,
        ring_blocks=1 + Window(100, 20, 4).max_held_blocks(7, 128, 2048) + 8,
    )
    prompt = simulation.prompt(400)
    simulation.add("long", prompt, 300)
    for _ in range(20):
        simulation.step()
    # Their prefill writes at once to what was let go too early, and begins with a prefix hit.
    for i in range(40):
        simulation.add(str(i), prompt[:80] + simulation.prompt(40), 2)
    if change is None:
        simulation.run()
        return
    change(simulation)
    with pytest.raises(Mismatch):
        simulation.run()


def test_blocks_whose_free_is_deferred_return_to_the_pool_that_they_came_from(simulate):
    simulation = simulate(delayed=True)
    simulation.scheduler.defer_block_free = True
    before = simulation.free_blocks()
    simulation.add("a", simulation.prompt(900), 100)
    for _ in range(12):
        simulation.step()
    held = simulation.free_blocks()
    simulation.abort("a")
    assert simulation.scheduler.deferred_frees
    assert simulation.free_blocks() == held, "the step in flight may still write them"
    simulation.run()
    assert not simulation.scheduler.deferred_frees
    assert simulation.free_blocks() == before
    for pool in (simulation.target_pool, simulation.ring_pool):
        assert all(b.pool is pool for b in pool.free_block_queue.get_all_free_blocks())
