"""Ten thousand random events of vLLM's real scheduler, a step ahead of its outputs."""

from collections import Counter

import pytest

from tests.support.engine import windowed
from tests.support.scheduling import Simulation, dense_specs, engine_config
from tests.support.shadow_worker import Mismatch
from tests.unit.test_ring_manager import free_on_scheduled_tokens
from wmtp_vllm.window import Window

pytestmark = pytest.mark.unit

EVENTS = 10_000
KINDS = ("arrival", "abort", "preemption", "hit", "warm", "cold", "tokens not drafted on")


def drive(model: str, change=None) -> Counter[str]:
    """Arrivals, aborts and steps at random; the shadow checks every read, and the pools every step."""
    config = engine_config(
        model,
        windowed(7, 60, 10),
        True,
        enable_prefix_caching=True,
        max_model_len=1024,
        max_num_batched_tokens=128,
        max_num_seqs=6,
    )
    # A target pool small enough to preempt, and to hit what earlier prompts left in it; and a ring
    # pool so small that what is let go is soon written to again.
    ring_blocks = 2 * Window(60, 10, 4).max_held_blocks(7, 128, 1024)
    simulation = Simulation(config, dense_specs(config, 4), 70, ring_blocks, seed=1)
    if change:
        change(simulation)
    before, rng, events = simulation.free_blocks(), simulation.rng, Counter[str]()
    prefixes = [simulation.prompt(300) for _ in range(3)]
    while events.total() < EVENTS:  # before the kinds below are counted
        alive = list(simulation.scheduler.requests)
        chance = rng.random()
        if chance < 0.07 and len(alive) < 12:
            prompt = rng.choice(prefixes)[: rng.randrange(1, 300)] + simulation.prompt(40)
            simulation.add(f"request {events.total()}", prompt, rng.randrange(1, 120))
            events["arrival"] += 1
        elif chance < 0.08 and alive:
            simulation.abort(rng.choice(alive))
            events["abort"] += 1
        elif alive or simulation.pending:
            simulation.step()
            simulation.check_pools()
            events["step"] += 1
    simulation.run()
    assert simulation.free_blocks() == before
    events["preemption"] = simulation.num_preemptions
    events["hit"] = sum(tokens > 0 for tokens in simulation.cached_tokens.values())
    events["warm"], events["cold"] = (
        simulation.ring.num_warm_starts,
        simulation.ring.num_cold_starts,
    )
    events["tokens not drafted on"] = simulation.worker.num_skipped
    return events


def test_no_block_that_a_step_in_flight_reads_or_writes_is_given_away(tiny_model):
    events = drive(tiny_model("dense"))
    print(dict(events), end=" ")
    assert min(events[kind] for kind in KINDS) > 20


def test_freeing_on_scheduled_tokens_is_caught(tiny_model):
    """Negative control."""
    with pytest.raises(Mismatch):
        drive(tiny_model("dense"), free_on_scheduled_tokens)
