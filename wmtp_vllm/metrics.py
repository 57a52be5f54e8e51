"""What windowed MTP does, on vLLM's own `/metrics` and in its periodic log.

The ring's manager counts in the scheduler's process. Its numbers travel to the process that serves with
vLLM's scheduler statistics, in the field of KV connectors, which a ring refuses, and are taken out there
before vLLM's own loggers look. So they are there exactly when vLLM's are, for each data-parallel rank.
"""

import collections
from typing import Any, ClassVar

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from wmtp_vllm.config import METHOD, selected

logger = init_logger("vllm.wmtp_vllm.metrics")

PREFIX = "wmtp:"
LABELS = ("model_name", "engine")

SETTINGS = {
    "draft_window_tokens": "Most recent tokens that the draft attends to (W).",
    "draft_sink_tokens": "First tokens that the draft attends to (S).",
}
GAUGES = {
    "ring_pool_blocks": "Blocks of the ring pool.",
    "ring_blocks_held": "Blocks of the ring pool that requests hold.",
    "kv_bytes_saved": "Bytes of a worker: native MTP's for the draft's KV, less the ring pool's.",
}
COUNTERS = {
    "ring_waits": "Times that a request had no block of the ring pool: it waits, or one is preempted.",
    "warm_starts": "Requests with a prefix hit that found the draft's whole KV.",
    "cold_starts": "Requests with a prefix hit that found the draft's KV not or in part.",
    "draft_prefill_tokens_skipped": "Prompt tokens that the draft needed no run on.",
    "draft_reads": "Reads of a request's draft KV, one a step of the engine.",
    "draft_kept_tokens": "Tokens that the draft could read in these, of the window and the sink.",
    "draft_context_tokens": "Tokens that native MTP would have read.",
}


def to_scheduler_stats(stats: Any, ring: Any) -> None:
    """Put the numbers of a `RingManager` into vLLM's `SchedulerStats`."""
    stats.kv_connector_stats = {METHOD: ring.new_stats()}


def from_scheduler_stats(stats: Any) -> dict[str, int] | None:
    """Take them out again; None where there are none."""
    if stats is None or METHOD not in (stats.kv_connector_stats or {}):
        return None
    numbers: dict[str, int] = stats.kv_connector_stats[METHOD]
    stats.kv_connector_stats = None
    return numbers


class WindowedMTPStats(AggregateStatLoggerBase):
    """One of vLLM's stat loggers; stands before vLLM's own."""

    _metrics: ClassVar[list[Gauge | Counter]] = []
    """Those of this process's last engine: it may make several, one after another."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        config = selected(vllm_config)
        assert config is not None
        self.method = config.method
        while self._metrics:
            REGISTRY.unregister(self._metrics.pop())
        model = vllm_config.model_config.served_model_name
        self.labels = {index: (model, str(index)) for index in engine_indexes}
        # As for vLLM's own gauges: of several API servers, the one that set it last is right.
        newest = {"multiprocess_mode": "mostrecent"}
        settings = self._made(Gauge, SETTINGS, **newest)
        for labels in self.labels.values():
            settings["draft_window_tokens"].labels(*labels).set(config.draft_window_size)
            settings["draft_sink_tokens"].labels(*labels).set(config.draft_sink_size)
        has_ring = config.draft_kv_cache == "ring"
        self.gauges = self._made(Gauge, GAUGES if has_ring else {}, **newest)
        self.counters = self._made(Counter, COUNTERS if has_ring else {})
        self.latest: dict[int, dict[str, int]] = {}
        self.since_line = {index: collections.Counter[str]() for index in engine_indexes}

    def _made(self, kind: Any, texts: dict[str, str], **options: Any) -> dict[str, Any]:
        made = {n: kind(PREFIX + n, t, LABELS, **options) for n, t in texts.items()}
        self._metrics.extend(made.values())
        return made

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        numbers = from_scheduler_stats(scheduler_stats)
        if numbers is None:
            return
        labels = self.labels[engine_idx]
        for name, gauge in self.gauges.items():
            gauge.labels(*labels).set(numbers[name])
        for name, counter in self.counters.items():
            counter.labels(*labels).inc(numbers[name])
            self.since_line[engine_idx][name] += numbers[name]
        self.latest[engine_idx] = numbers

    def log(self) -> None:
        for index, since in self.since_line.items():
            if since["draft_reads"]:
                line = _line(self.latest[index], since)
                logger.info("Engine %03d: %s: %s", index, self.method, line)
            since.clear()

    def log_engine_initialized(self) -> None: ...


def _line(latest: dict[str, int], since: collections.Counter[str]) -> str:
    kept, context = since["draft_kept_tokens"], since["draft_context_tokens"]
    return (
        f"the draft read {kept / since['draft_reads']:,.0f} tokens a step "
        f"({kept / context:.1%} of the context), "
        f"ring blocks held: {latest['ring_blocks_held']} of {latest['ring_pool_blocks']}, "
        f"waits for one: {since['ring_waits']}, "
        f"warm starts: {since['warm_starts']}, cold: {since['cold_starts']}, "
        f"prompt tokens without draft work: {since['draft_prefill_tokens_skipped']:,}"
    )
