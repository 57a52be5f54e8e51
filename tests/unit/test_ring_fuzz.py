"""vLLM's real scheduler and the ring's manager at random; the shadow checks what the draft reads.

A hypothesis state machine. After every step: no block is lost or owned twice, no null block is handed
out, no request holds more than its budget; and each read of the draft lists exactly what was written for
the positions that it should see. `make fuzz` runs it for 100,000 steps and more. What a seed finds, it
finds again.
"""

import os
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any, ClassVar

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support import shadow_worker
from tests.support.engine import windowed
from tests.support.scheduling import Simulation, dense_specs, engine_config, hybrid_specs
from tests.unit.test_ring_manager import (
    count_refusals,
    free_on_scheduled_tokens,
    resize_window,
    watch_scheduled,
)
from wmtp_vllm.window import Window

pytestmark = pytest.mark.unit

STEPS = int(os.environ.get("WMTP_FUZZ_STEPS", 6_000))
FIRST_SEED = int(os.environ.get("WMTP_FUZZ_SEED", 0))
FOUND_WITHIN = 1_000
"""Steps after which a planted bug must have been found."""
MAX_MODEL_LEN = 1024
KINDS = (
    *("arrival", "abort", "preemption", "hit", "warm", "cold", "reset", "reset of running"),
    *("empty ring", "a step ahead", "hybrid", "tokens not drafted on"),
)

Change = Callable[[Simulation], None]


SIZES = {
    "k": st.sampled_from([1, 3, 7]),
    "window": st.sampled_from([1, 16, 61, 150]),
    "sink": st.sampled_from([0, 5, 32]),
    "ring_block": st.sampled_from([1, 4, 16]),
    "budget": st.sampled_from([32, 128]),
    "num_seqs": st.sampled_from([2, 6]),
    "target_blocks": st.sampled_from([70, 100, 400]),
    "spare": st.sampled_from([0, 10, 200]),
    "caching": st.booleans(),
    "delayed": st.booleans(),
    "is_hybrid": st.booleans(),
    "seed": st.integers(0, 1 << 30),
}
HARD = SIZES | {
    "k": st.just(7),
    "window": st.sampled_from([61, 100]),
    "ring_block": st.sampled_from([1, 4]),
    "budget": st.sampled_from([32, 64]),
    "num_seqs": st.just(6),
    "target_blocks": st.just(400),
    "spare": st.just(0),
    "delayed": st.just(True),
}
"""Much is in flight, and what a ring lets go is soon written to again."""


class Life(RuleBasedStateMachine):
    """A scheduler's life. Class attributes are set by the test that runs it."""

    model: str
    sizes: ClassVar = SIZES
    change: Change | None = None
    seen: Counter[str]
    has_failed = False

    @initialize(data=st.data())
    def start(self, data):
        drawn = {name: data.draw(strategy, name) for name, strategy in self.sizes.items()}
        self.begin(**drawn)

    def begin(
        self, k, window, sink, ring_block, budget, num_seqs, target_blocks, spare, caching, delayed,
        is_hybrid, seed,
    ):  # fmt: skip
        shadow_worker.RIGHT_DRAFTS = 0.7
        config = engine_config(
            self.model,
            windowed(k, window, sink),
            delayed,
            enable_prefix_caching=caching,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=budget,
            max_num_seqs=num_seqs,
        )
        if is_hybrid:
            config.cache_config.mamba_cache_mode = "align" if caching else "none"
        specs = (hybrid_specs if is_hybrid else dense_specs)(config, ring_block)
        least = 1 + Window(window, sink, ring_block).max_held_blocks(
            k, config.max_in_flight_tokens, MAX_MODEL_LEN
        )
        target_blocks += 80 * is_hybrid  # its states take blocks too
        self.simulation = Simulation(config, specs, target_blocks, least + spare, seed)
        if self.change:
            self.change(self.simulation)
        self.k, self.free = k, self.simulation.free_blocks()
        self.prefixes = [self.simulation.prompt(300) for _ in range(3)]
        self.num_added = 0
        self.seen["a step ahead"] += delayed
        self.seen["hybrid"] += is_hybrid
        self.refused = count_refusals(self.simulation)
        watch_scheduled(self.simulation, self._check_budgets)

    @property
    def alive(self) -> list[str]:
        return list(self.simulation.scheduler.requests)

    @precondition(lambda self: len(self.alive) < 12)
    @rule(
        prefix=st.integers(0, 2),
        shared=st.one_of(st.just(0), st.integers(0, 300)),
        own=st.integers(1, 60),
        new=st.integers(1, 200),
        count=st.sampled_from([1, 3, 6]),
    )
    def arrive(self, prefix, shared, own, new, count):
        for _ in range(count):
            prompt = self.prefixes[prefix][:shared] + self.simulation.prompt(own)
            self.simulation.add(str(self.num_added), prompt, new)
            self.num_added += 1
            self.seen["arrival"] += 1

    @precondition(lambda self: self.alive)
    @rule(index=st.integers(0, 11))
    def abort(self, index):
        self.simulation.abort(self.alive[index % len(self.alive)])
        self.seen["abort"] += 1

    @rule(chance=st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    def draft_as_well_as(self, chance):
        shadow_worker.RIGHT_DRAFTS = chance

    @rule(running=st.booleans())
    def reset(self, running):
        self.simulation.scheduler.reset_prefix_cache(reset_running_requests=running)
        self.seen["reset of running" if running else "reset"] += 1

    @rule(count=st.sampled_from([1, 5, 25]))
    def step(self, count):
        for _ in range(count):
            if not (self.alive or self.simulation.pending):
                return
            self.seen["step"] += 1
            try:
                self.simulation.step()
                self.simulation.check_pools()
            except AssertionError:
                self.has_failed = True
                self.seen.setdefault("found at", self.seen["step"])
                raise

    def _check_budgets(self, output) -> None:
        """Of requests that are about to run: what they had processed by then they have let go of."""
        simulation, window = self.simulation, self.simulation.ring.window
        for name in output.num_scheduled_tokens:
            row = simulation.ring.req_to_blocks[name]
            held = sum(not block.is_null for block in row)
            in_flight = simulation.scheduler.requests[name].num_in_flight_tokens
            assert held <= window.max_held_blocks(self.k, in_flight, MAX_MODEL_LEN)

    def teardown(self):
        if not hasattr(self, "free") or self.has_failed:
            return  # what would fail now hides why
        while self.alive or self.simulation.pending:
            self.step(40)
        assert self.simulation.free_blocks() == self.free, "blocks are lost"
        ring = self.simulation.ring
        self.seen["empty ring"] += len(self.refused)
        self.seen["preemption"] += self.simulation.num_preemptions
        self.seen["hit"] += sum(tokens > 0 for tokens in self.simulation.cached_tokens.values())
        self.seen["warm"] += ring.num_warm_starts
        self.seen["cold"] += ring.num_cold_starts
        self.seen["tokens not drafted on"] += self.simulation.worker.num_skipped


def live(
    model: str, seen: Counter[str], seed: int, change: Change | None = None, **attributes: Any
) -> None:
    """Lives one after another, each of up to 50 rules; counts in `seen` what happens in them."""
    attributes |= {"model": model, "seen": seen, "change": change and staticmethod(change)}
    rate = shadow_worker.RIGHT_DRAFTS
    try:
        run_state_machine_as_test(
            hypothesis.seed(seed)(type("Life", (Life,), attributes)),
            settings=settings(
                max_examples=30,
                stateful_step_count=50,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
                database=None,
                print_blob=True,
            ),
        )
    finally:
        shadow_worker.RIGHT_DRAFTS = rate


def test_no_read_is_wrong_no_block_is_lost_or_shared_and_no_budget_is_passed(tiny_model):
    seen = Counter[str]()
    for seed in count(FIRST_SEED):
        live(tiny_model("dense"), seen, seed)
        if seen["step"] >= STEPS:
            break
    print(f"seeds {FIRST_SEED} to {seed}: {dict(seen)}", end=" ")
    assert all(seen[kind] for kind in KINDS), seen


def shorten_ring(simulation: Simulation) -> None:
    if simulation.ring.window.size > simulation.ring.window.block_size:
        resize_window(simulation.ring, -1)


BUGS: dict[str, Change] = {
    "blocks are freed on scheduled tokens": free_on_scheduled_tokens,
    "the ring is one block short": shorten_ring,
    "null blocks are attended": lambda s: setattr(s.worker, "null_blocks", ()),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_within_a_thousand_steps(tiny_model, bug):
    model, seen = tiny_model("dense"), Counter[str]()
    with pytest.raises(AssertionError):  # a `Mismatch` mostly
        live(model, seen, 0, change=BUGS[bug], sizes=HARD)
    print(f"found at step {seen['found at']}", end=" ")
    assert seen["found at"] <= FOUND_WITHIN
