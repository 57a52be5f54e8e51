"""On a GPU: what the draft phase costs, the time between a step's verification and its drafts."""

import functools
import random
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.engine import Engine, engine, native, windowed
from wmtp_vllm.attention_backends.windowed import Compactor

pytestmark = pytest.mark.gpu

EAGER = {"enforce_eager": True, "dtype": "bfloat16", "block_size": 16}
BENCHMARK: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL"},
    "block_size": 16,
    "max_model_len": (256 << 10) + 256,
    "max_num_batched_tokens": 8192,
    "kv_cache_memory_bytes": 8 << 30,
}
CONTEXTS = (8 << 10, 256 << 10)
REQUESTS = 8


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(4, 256), k=length)


def draft_phases(running: Engine, wrapper: Callable[..., Any]) -> Any:
    """A context in which `wrapper(propose, *args, **kwargs)` stands for every draft phase."""
    speculator = running.worker.model_runner.speculator
    return patch.object(speculator, "propose", functools.partial(wrapper, speculator.propose))


def host_synchronisations(running: Engine) -> list[str]:
    """Where the host waits for the GPU while the draft's metadata is made, and in its phases."""
    seen: list[str] = []

    def watch(function, *args, **kwargs):
        outer = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")  # "error" would tell the first only
            try:
                return function(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode(outer)
                waits = [w for w in caught if "called a synchronizing" in str(w.message)]
                seen.extend(f"{wait.filename}:{wait.lineno}" for wait in waits)

    compact = Compactor.compact
    watched_compact = patch.object(Compactor, "compact", lambda *args: watch(compact, *args))
    running.generate([prompt(700)], 8)  # what is compiled or loaded at its first use
    with draft_phases(running, watch), watched_compact:
        running.generate([prompt(n) for n in (3, 700, 3000)], 24)
    return seen


# FlashInfer's own plan waits, with native MTP too.
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_the_draft_phase_never_waits_for_the_gpu(tiny_model, monkeypatch, record_property, backend):
    arguments, waits = EAGER | {"attention_backend": backend}, {}
    for name, config in (("native", native(3)), ("windowed", windowed(3, 256, 64))):
        with engine(tiny_model("dense"), config, **arguments) as running:
            waits[name] = host_synchronisations(running)
    record_property("figure", f"native MTP's own: {len(waits['native'])}")
    assert waits["windowed"] == []

    compact = Compactor.compact

    def compact_and_wait(self, logical):
        logical.seq_lens.max().item()
        return compact(self, logical)

    monkeypatch.setattr(Compactor, "compact", compact_and_wait)
    with engine(tiny_model("dense"), windowed(3, 256, 64), **arguments) as running:
        assert host_synchronisations(running), "negative control: a wait that is there is seen"


def test_the_draft_phase_does_not_grow_with_the_context(tiny_model, record_property):
    """Prints the ratios and asserts none: a machine's load is not the code's."""
    seconds = {}
    for name, config in (("native", native(7)), ("windowed", windowed(7, 4032, 64))):
        with engine(tiny_model("dense", layers=1), config, **BENCHMARK) as running:
            for context in CONTEXTS:
                seconds[name, context] = draft_phase_seconds(running, context)
    for context in CONTEXTS:
        ours, vllms = (1e3 * seconds[name, context] for name in ("windowed", "native"))
        figure = f"{REQUESTS} x {context:,} tokens, K = 7: {ours:.2f} ms, native MTP {vllms:.2f} ms"
        record_property("figure", f"{figure}, ratio {vllms / ours:.2f}")


def draft_phase_seconds(running: Engine, context: int) -> float:
    """The median draft phase of a decode step."""
    times: list[float] = []

    def measure(propose, *args, **kwargs):
        torch.accelerator.synchronize()
        start = time.perf_counter()
        drafts = propose(*args, **kwargs)
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
        return drafts

    with draft_phases(running, measure):
        running.generate([prompt(context)] * REQUESTS, 96)
    return statistics.median(times[-8:])  # the last are decode steps, not prefill
