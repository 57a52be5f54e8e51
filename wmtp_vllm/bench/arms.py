"""One arm of a benchmark: an engine in a process of its own, asked one prompt at a time."""

import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from wmtp_vllm import child, seams
from wmtp_vllm.bench import turns
from wmtp_vllm.config import METHOD

MODULE = "wmtp_vllm.bench.arms"

STEPS_A_TURN = 16
"""Few enough that all arms have a turn within a second or two, enough that the first, whose data others
have driven out of the processor's caches, does not count."""


@dataclass(frozen=True)
class Arm:
    """What speculates, and how.

    Args:
        method: "none", "mtp" (native) or "windowed_mtp"; "server" for what a running server does.
        k: tokens drafted a step; 0 without speculation.
        window: W in tokens; 0 where there is no window.
        sink: S in tokens.
        kv: where the windowed draft's KV lives, "ring" or "full".

    """

    method: str
    k: int = 0
    window: int = 0
    sink: int = 0
    kv: str = "ring"

    @property
    def title(self) -> str:
        if self.method in ("none", "server"):
            return {"none": "no speculation", "server": "server"}[self.method]
        if self.method == "mtp":
            return f"native MTP, K={self.k}"
        full = ", full KV" if self.kv == "full" else ""
        return f"windowed, K={self.k}, W={self.window}, S={self.sink}{full}"

    @property
    def speculative_config(self) -> dict[str, Any] | None:
        if self.method == "none":
            return None
        config: dict[str, Any] = {"method": self.method, "num_speculative_tokens": self.k}
        if self.method == METHOD:
            config |= {
                "draft_window_size": self.window,
                "draft_sink_size": self.sink,
                "draft_kv_cache": self.kv,
            }
        return config


@dataclass(frozen=True)
class Measurement:
    """One answer of one arm."""

    context: int
    """prompt tokens; of a set of prompts their mean"""
    generated: int
    ttft: float
    """seconds to the first token"""
    tpot: float
    """seconds a token after the first"""
    drafts: int
    accepted: int
    accepted_per_position: list[int]
    draft_phase: float = 0.0
    """seconds that a step spends drafting, the median; 0 where nothing drafts or it was not seen"""

    @property
    def acceptance_length(self) -> float:
        """Tokens a step: 1 + accepted / drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def step_cost(self) -> float:
        """Seconds a step: TPOT x the tokens that a step brought.

        The paper's TPOT x AL, but for the last step, whose tokens past `max_tokens` are counted as
        accepted and never given out: in a short answer that alone is a tenth.
        """
        return self.tpot * (self.generated - 1) / self.drafts if self.drafts else self.tpot


@dataclass(frozen=True)
class Run:
    """What one process measured."""

    measurements: list[Measurement]
    kv_capacity: int
    """tokens that vLLM reports to have room for"""
    peak_memory: int
    """bytes: of the device where there is one, else of the process; 0 where workers are processes of
    their own"""
    device: str


@dataclass(frozen=True)
class Prompt:
    """What is asked: token ids, and the context that its measurement counts for, in tokens."""

    context: int
    token_ids: list[int]


def run(arm: Arm, engine_arguments: dict[str, Any], prompts: list[Prompt], max_tokens: int) -> Run:
    """Start the arm in a process of its own and measure each prompt.

    Raises:
        ChildFailed: vLLM ended with an error.

    """
    return _run_of(child.call(MODULE, _request(arm, engine_arguments, prompts, max_tokens)))


def run_in_turns(
    arms: list[Arm], engine_arguments: dict[str, Any], prompts: list[Prompt], max_tokens: int
) -> list[Run]:
    """`run` for several arms whose engines are all up at once and answer a prompt in turn.

    Raises:
        ChildFailed: vLLM ended with an error.

    """
    requests = [_request(arm, engine_arguments, prompts, max_tokens) for arm in arms]
    return [_run_of(result) for result in turns.play(MODULE, requests)]


def _request(
    arm: Arm, engine_arguments: dict[str, Any], prompts: list[Prompt], max_tokens: int
) -> dict[str, Any]:
    return {
        "arm": asdict(arm),
        "engine_arguments": engine_arguments,
        "prompts": [asdict(prompt) for prompt in prompts],
        "max_tokens": max_tokens,
    }


def _run_of(result: dict[str, Any]) -> Run:
    return Run(**result | {"measurements": [Measurement(**m) for m in result["measurements"]]})


def _measure_all(request: dict[str, Any]) -> dict[str, Any]:
    mine = turns.Turns(*request.get("turns", ()))
    import torch
    from vllm import LLM

    arguments = {"disable_log_stats": False, "enable_prefix_caching": False}
    speculative_config = Arm(**request["arm"]).speculative_config
    arguments |= request["engine_arguments"] | {"speculative_config": speculative_config}
    llm = LLM(**arguments)
    prompts = [Prompt(**prompt) for prompt in request["prompts"]]
    max_tokens = request["max_tokens"]
    laps: list[Lap] = []
    # Several workers are processes of their own, into which nothing can be hung from here.
    is_here = llm.llm_engine.vllm_config.parallel_config.world_size == 1
    if request["arm"]["k"] and is_here:
        [laps] = llm.collective_rpc(_time_drafting)
    # Warm-up: what is compiled, captured or allocated on first use, and nothing of a prompt's length.
    shortest = min(prompts, key=lambda p: len(p.token_ids))
    _measure(llm, shortest, min(16, max_tokens), laps, turns.Turns())
    measurements = []
    for prompt in prompts:
        mine.pass_on(within_an_answer=False)
        measurements.append(asdict(_measure(llm, prompt, max_tokens, laps, mine)))
    on_gpu = torch.cuda.is_available()
    return {
        "measurements": measurements,
        "kv_capacity": llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens,
        "peak_memory": _peak_memory() if is_here else 0,
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
    }


def _peak_memory() -> int:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # In KiB but on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


Lap = Callable[[], float]
"""Gives the seconds of one call."""


def _time_drafting(worker: Any) -> list[Lap]:
    """Time each call that drafts in a worker of this process; the list grows with them."""
    import torch

    owner, name = seams.proposing(worker)
    propose = getattr(owner, name)
    laps: list[Lap] = []

    def timed(*args: Any, **kwargs: Any) -> Any:
        if not torch.cuda.is_available():
            started = time.perf_counter()
            drafts = propose(*args, **kwargs)
            seconds = time.perf_counter() - started
            laps.append(lambda: seconds)
            return drafts
        # By events on the stream: nothing waits for them until the answer is there.
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        drafts = propose(*args, **kwargs)
        end.record()

        def lap() -> float:
            end.synchronize()  # the answer can be there before the last call has run
            return float(start.elapsed_time(end)) / 1000

        laps.append(lap)
        return drafts

    setattr(owner, name, timed)
    return laps


def _measure(
    llm: Any, prompt: Prompt, max_tokens: int, laps: list[Lap], mine: turns.Turns
) -> Measurement:
    """Ask the prompt; others may work after it, and after every few steps of the answer."""
    import torch
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    before = _counters(llm)
    laps.clear()
    sampling = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    engine = llm.llm_engine
    started = time.perf_counter()
    engine.add_request("asked", {"prompt_token_ids": prompt.token_ids}, sampling)
    generated = 0
    while not generated and engine.has_unfinished_requests():
        generated = _tokens(engine.step())
    ttft = time.perf_counter() - started
    decoding = 0.0
    while engine.has_unfinished_requests():
        mine.pass_on(within_an_answer=True)
        started = time.perf_counter()
        for _ in range(STEPS_A_TURN):
            if engine.has_unfinished_requests():
                generated += _tokens(engine.step())
        if mine.are_taken and torch.cuda.is_available():
            torch.cuda.synchronize()  # what is still under way is of this turn
        decoding += time.perf_counter() - started
    after = _counters(llm)
    drafts = after[0] - before[0]
    # The calls before these ran with chunks of the prompt.
    seconds = [lap() for lap in laps[-drafts:]] if drafts else []
    return Measurement(
        context=prompt.context,
        generated=generated,
        ttft=ttft,
        tpot=decoding / max(1, generated - 1),
        drafts=drafts,
        accepted=after[1] - before[1],
        accepted_per_position=[a - b for a, b in zip(after[2], before[2], strict=True)],
        draft_phase=statistics.median(seconds) if seconds else 0.0,
    )


def _tokens(outputs: Any) -> int:
    return sum(len(one.token_ids) for output in outputs for one in output.outputs)


def _counters(llm: Any) -> tuple[int, int, list[int]]:
    """Drafts, accepted tokens, and these by position, so far."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    drafts = found.get("vllm:spec_decode_num_drafts")
    if drafts is None:
        return 0, 0, []
    return (
        int(drafts.value),
        int(found["vllm:spec_decode_num_accepted_tokens"].value),
        [int(v) for v in found["vllm:spec_decode_num_accepted_tokens_per_pos"].values],
    )


if __name__ == "__main__":
    child.answer(_measure_all)
