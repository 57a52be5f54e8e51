"""Small engines in the test's own process, one after another, and what tests ask of them."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm import LLM, SamplingParams

from wmtp_vllm import seams

SMALL = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 8192,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "seed": 0,
}


def windowed(k: int, window: int, sink: int, **keys: Any) -> dict[str, Any]:
    """The speculative config of windowed MTP with K, W and S."""
    return {
        "method": "windowed_mtp",
        "num_speculative_tokens": k,
        "draft_window_size": window,
        "draft_sink_size": sink,
        **keys,
    }


def native(k: int) -> dict[str, Any]:
    """The speculative config of vLLM's own MTP with K."""
    return {"method": "mtp", "num_speculative_tokens": k}


@dataclass
class Engine:
    """An `LLM`, and the acceptance counters at the last look."""

    llm: LLM
    drafts: float = 0
    accepted: float = 0
    cached_tokens: list[int] = field(default_factory=list)

    def generate(
        self, prompts: Sequence[list[int]], max_tokens: int, **sampling: Any
    ) -> list[list[int]]:
        """Token ids generated for each prompt (token ids); greedy and past <eos> by default."""
        params = SamplingParams(
            **{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | sampling
        )
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        self.cached_tokens = [output.num_cached_tokens or 0 for output in outputs]
        return [list(output.outputs[0].token_ids) for output in outputs]

    def acceptance_length(self) -> float:
        """AL = 1 + accepted / drafts since the last call."""
        counters = {m.name: getattr(m, "value", 0) for m in self.llm.get_metrics()}
        drafts = counters["vllm:spec_decode_num_drafts"]
        accepted = counters["vllm:spec_decode_num_accepted_tokens"]
        new_drafts, new_accepted = drafts - self.drafts, accepted - self.accepted
        self.drafts, self.accepted = drafts, accepted
        assert new_drafts > 0, "nothing was drafted since the last call"
        return 1 + new_accepted / new_drafts

    @property
    def worker(self) -> Any:
        return self.core.model_executor.driver_worker.worker

    @property
    def windowed(self) -> bool:
        return self.llm.llm_engine.vllm_config.speculative_config is not None

    @property
    def proposer(self) -> Any:
        """V1's proposer, or V2's speculator."""
        runner = self.worker.model_runner
        return getattr(runner, "speculator", None) or runner.drafter

    @property
    def ring(self) -> Any:
        """The `RingManager`."""
        return seams.ring_of(self.core.scheduler)

    @property
    def core(self) -> Any:
        """vLLM's `EngineCore`, which is in this process."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def kv_cache_manager(self) -> Any:
        return self.core.scheduler.kv_cache_manager


def watch_scheduled(running: Engine, look: Callable[[Any], None]) -> None:
    """Call `look` with each `SchedulerOutput`, before the step runs."""
    scheduler = running.core.scheduler
    schedule = scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        look(output)
        return output

    scheduler.schedule = watched


@contextmanager
def engine(
    model: str, speculative_config: dict[str, Any] | None = None, **arguments: Any
) -> Iterator[Engine]:
    """A small engine that is gone, with all its memory, at the end, also if it fails to start."""
    from vllm.distributed import cleanup_dist_env_and_memory

    # What is alive now (torch, vLLM: 650,000 objects) stays alive. Starting an engine collects
    # garbage several times, and looking through all of it each time is most of a start's time.
    # The clean-up below unfreezes.
    gc.freeze()
    running = None
    try:
        running = Engine(LLM(model, speculative_config=speculative_config, **(SMALL | arguments)))
        yield running
    finally:
        if running is not None:
            running.llm.llm_engine.engine_core.shutdown()
            del running.llm
        cleanup_dist_env_and_memory()
