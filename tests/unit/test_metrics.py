"""The ring's numbers reach vLLM's metrics and its log, and leave vLLM's own statistics as they were."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats

from tests.support.engine import windowed
from tests.support.scheduling import Simulation, dense_specs, engine_config
from wmtp_vllm.config import METHOD
from wmtp_vllm.metrics import COUNTERS, GAUGES, PREFIX, SETTINGS, WindowedMTPStats

pytestmark = pytest.mark.unit


def value(name: str, engine: str = "0") -> float | None:
    labels = {"engine": engine, "model_name": "tiny"}
    return REGISTRY.get_sample_value(PREFIX + name, labels)


@pytest.fixture
def config(tiny_model):
    return engine_config(tiny_model("dense"), windowed(3, 100, 20), served_model_name="tiny")


def stats_of(simulation: Simulation) -> SchedulerStats:
    scheduler = simulation.scheduler
    scheduler.log_stats = scheduler.kv_cache_manager.log_stats = True
    scheduler.kv_cache_manager.prefix_cache_stats = PrefixCacheStats()
    stats = scheduler.make_stats()
    scheduler.log_stats = scheduler.kv_cache_manager.log_stats = False  # steps make none
    assert stats is not None
    return stats


def test_what_the_scheduler_counts_arrives(config):
    simulation = Simulation(config, dense_specs(config, 16), 400)
    manager = StatLoggerManager(config, [0], enable_default_loggers=False)
    simulation.add("a", simulation.prompt(900), 60)
    for _ in range(10):
        simulation.step()
    stats = stats_of(simulation)
    manager.record(stats, None)
    assert stats.kv_connector_stats is None, "vLLM's own loggers would take it for a connector's"
    held = simulation.ring.window.kept_blocks(920, 4)
    assert value("draft_window_tokens") == 100
    assert value("draft_sink_tokens") == 20
    assert len(held) - 1 <= value("ring_blocks_held") <= len(held) + 1
    assert value("ring_pool_blocks") == simulation.ring_pool.num_gpu_blocks - 1
    assert value("kv_bytes_saved") == simulation.ring.kv_cache_spec.saved_bytes != 0
    reads = value("draft_reads_total")
    assert 0 < reads < 10
    assert 100 < value("draft_kept_tokens_total") / reads < 160
    assert value("draft_context_tokens_total") / reads > 900
    # Four chunks of 256 tokens: the first begins in the sink, and of the others the last window is read.
    skipped = value("draft_prefill_tokens_skipped_total")
    assert skipped == 900 - 256 - (900 - simulation.ring.window.unread_blocks(900).stop * 16)


def test_several_api_servers_that_share_an_engine_count_nothing_twice(config):
    """vLLM gives the statistics of a step to one of them."""
    simulation = Simulation(config, dense_specs(config, 16), 400)
    simulation.add("a", simulation.prompt(300), 60)
    logger, reads = WindowedMTPStats(config, [0]), 0
    for step in range(12):
        simulation.step()
        stats = stats_of(simulation)
        if step % 2:
            logger.record(stats, None)
        else:
            reads += stats.kv_connector_stats[METHOD]["draft_reads"]
    assert 0 < reads < simulation.ring.num_reads
    assert value("draft_reads_total") == simulation.ring.num_reads - reads


def test_each_data_parallel_rank_has_its_own(config):
    logger = WindowedMTPStats(config, [0, 1])
    numbers = dict.fromkeys([*GAUGES, *COUNTERS], 5)
    for engine in (0, 1, 1):
        logger.record(
            SchedulerStats(kv_connector_stats={METHOD: dict(numbers)}), None, None, engine
        )
    for name in COUNTERS:
        assert value(f"{name}_total", "0") == 5
        assert value(f"{name}_total", "1") == 10


def test_what_is_not_ours_is_left_alone(config):
    logger = WindowedMTPStats(config, [0])
    stats = SchedulerStats(kv_connector_stats={"bytes": 7})
    logger.record(stats, None)
    logger.record(None, None)
    assert stats.kv_connector_stats == {"bytes": 7}


def test_the_log_has_a_line_for_an_interval_with_drafts_and_none_for_an_idle_one(config, caplog):
    logger = WindowedMTPStats(config, [0])
    numbers = dict.fromkeys([*GAUGES, *COUNTERS], 0) | {
        "ring_pool_blocks": 40,
        "ring_blocks_held": 9,
        "draft_reads": 10,
        "draft_kept_tokens": 1200,
        "draft_context_tokens": 12_000,
    }
    with caplog.at_level("INFO", "vllm.wmtp_vllm.metrics"):
        logger.log()
        logger.record(SchedulerStats(kv_connector_stats={METHOD: numbers}), None)
        logger.log()
        logger.log()
    [line] = [record.getMessage() for record in caplog.records]
    assert "the draft read 120 tokens a step (10.0% of the context)" in line
    assert "ring blocks held: 9 of 40" in line


def test_an_engine_without_windowed_mtp_has_no_such_metrics(tiny_model):
    config = engine_config(tiny_model("dense"), None)
    manager = StatLoggerManager(config, [0], enable_default_loggers=False)
    assert not any(isinstance(logger, WindowedMTPStats) for logger in manager.stat_loggers)


def test_full_kv_has_the_window_but_no_ring(tiny_model):
    keys = windowed(3, 100, 20, draft_kv_cache="full")
    config = engine_config(tiny_model("dense"), keys, served_model_name="tiny")
    WindowedMTPStats(config, [0])
    assert value("draft_window_tokens") == 100
    for name in (*GAUGES, *(f"{counter}_total" for counter in COUNTERS)):
        assert value(name) is None
    assert len(SETTINGS) == 2


def test_the_dashboard_and_the_docs_name_every_metric_and_no_other():
    root = Path(__file__).parents[2]
    counters = {f"{PREFIX}{name}_total" for name in COUNTERS}
    known = counters | {f"{PREFIX}{name}" for name in (*GAUGES, *SETTINGS)}
    dashboard = json.loads((root / "examples" / "monitoring" / "windowed_mtp.json").read_text())
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", [])]
    assert set(re.findall(r"wmtp:\w+", " ".join(expressions))) == known
    documented = (root / "docs" / "monitoring.md").read_text()
    assert set(re.findall(r"`(wmtp:\w+)`", documented)) == known
