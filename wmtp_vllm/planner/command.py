"""`wmtp plan`: what windowed MTP would gain for a model, a GPU and a load, without either."""

import argparse
import json
import sys
from dataclasses import asdict, replace
from typing import Any

from wmtp_vllm import child
from wmtp_vllm.config import METHODS, WindowedMTPConfig
from wmtp_vllm.console import add_engine_arguments, natural, positive, positive_int, share
from wmtp_vllm.planner import models
from wmtp_vllm.planner.anatomy import Question, study
from wmtp_vllm.planner.hardware import GPU, GPUS, RESERVE
from wmtp_vllm.planner.prediction import BATCHES, Plan, advice, predict
from wmtp_vllm.planner.roofline import Constants, Part, Workload

GIB = 2**30
OWN_ARGUMENTS = {
    "model": "it is the first argument",
    "max_model_len": "give --context",
    "max_num_seqs": "give --max-num-seqs",
    "tensor_parallel_size": "give --gpus",
    "kv_cache_dtype": "give --kv-cache-dtype",
    "speculative_config": "give --k, --window and --sink",
    "pipeline_parallel_size": "pipelines are not planned",
    "data_parallel_size": "plan one rank",
    "enable_expert_parallel": "experts are planned as tensor parallel",
}
"""Engine arguments that mean something else here."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = WindowedMTPConfig()
    parser.add_argument(
        "model",
        help=f"a folder, a config.json, a name on the hub, or one of {', '.join(models.presets())}",
    )
    parser.add_argument(
        "--method", choices=METHODS, help="default: windowed_mtp, or what the preset has"
    )
    parser.add_argument(
        "--draft-model", metavar="MODEL", help="of a method whose draft is a checkpoint of its own"
    )
    parser.add_argument("--gpu", choices=tuple(GPUS), default="H200", help="default: H200")
    parser.add_argument(
        "--gpus", type=positive_int, default=1, metavar="N", help="tensor parallel size"
    )
    parser.add_argument("--bandwidth", type=positive, metavar="TB/S", help="in place of the GPU's")
    parser.add_argument("--memory", type=positive, metavar="GIB", help="in place of the GPU's")
    parser.add_argument("--gpu-memory-utilization", type=share, default=0.9, metavar="SHARE")
    parser.add_argument(
        "--reserve",
        type=positive,
        default=RESERVE // GIB,
        metavar="GIB",
        help="for activations and graphs (%(default)s)",
    )
    parser.add_argument(
        "--kv-cache-memory", type=positive, metavar="GIB", help="of each GPU; default: what is left"
    )
    parser.add_argument(
        "--context", type=positive_int, default=131_072, metavar="N", help="tokens (131,072)"
    )
    parser.add_argument(
        "--batch", type=positive_int, default=1, metavar="N", help="sequences at once (1)"
    )
    parser.add_argument(
        "--max-num-seqs",
        type=positive_int,
        metavar="N",
        help="as vLLM's, which sizes the ring pool; default: the batch",
    )
    parser.add_argument("--k", type=positive_int, default=7, help="tokens drafted a step (7)")
    parser.add_argument(
        "--window", type=positive_int, default=default.draft_window_size, metavar="W"
    )
    parser.add_argument("--sink", type=natural, default=default.draft_sink_size, metavar="S")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as vLLM's")
    parser.add_argument(
        "--weight-bits", type=positive, help="bits a weight; default: by the config"
    )
    parser.add_argument(
        "--acceptance",
        type=share,
        default=0.8,
        metavar="RATE",
        help="chance that a draft is accepted once those before it were (0.8), for the best depth",
    )
    constants = Constants()
    parser.add_argument(
        "--attention-efficiency",
        type=share,
        default=constants.attention_efficiency,
        metavar="SHARE",
        help="share of peak rates that attention reaches at batch 1 (%(default)s)",
    )
    parser.add_argument(
        "--layer-us",
        type=positive,
        default=constants.layer_seconds * 1e6,
        metavar="US",
        help="fixed microseconds a layer and pass (%(default)s)",
    )
    add_engine_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, seconds, tokens")


def main(options: argparse.Namespace) -> int:
    """Study the model, predict, and print."""
    gpu = GPUS[options.gpu]
    if options.bandwidth:
        gpu = replace(gpu, bandwidth=options.bandwidth * 1e12)
    if options.memory:
        gpu = replace(gpu, memory=options.memory * GIB)
    if taken := OWN_ARGUMENTS.keys() & options.engine_arguments.keys():
        key = min(taken)
        sys.exit(f"wmtp plan: {key} is not for --engine-arguments: {OWN_ARGUMENTS[key]}.")
    try:
        model = models.find(options.model).with_draft(options.method, options.draft_model)
        weight_bits = options.weight_bits or model.weight_bits
        [anatomy] = study([_question(options, model, gpu, weight_bits)])
    except ValueError as error:
        sys.exit(f"wmtp plan: {error}")
    except child.ChildFailed as failed:
        sys.exit(f"{failed}\nwmtp plan: vLLM failed on this model; its log is above.")
    plan = predict(
        anatomy,
        gpu,
        Workload(options.context, options.batch, options.k),
        sink=options.sink,
        weight_bits=weight_bits,
        acceptance=options.acceptance,
        constants=Constants(options.attention_efficiency, options.layer_us / 1e6),
    )
    if options.json:
        print(json.dumps(_as_json(plan, vars(options), weight_bits), indent=1, default=str))
    else:
        print("\n".join(_report(plan, options, weight_bits)))
    return 0


def _question(
    options: argparse.Namespace, model: models.Model, gpu: GPU, weight_bits: float
) -> Question:
    engine_arguments = {
        "max_model_len": options.context,
        "max_num_seqs": options.max_num_seqs or options.batch,
        "tensor_parallel_size": options.gpus,
        "kv_cache_dtype": options.kv_cache_dtype,
        # As on a GPU, wherever the plan is made.
        "max_num_batched_tokens": 8192,
        "async_scheduling": True,
    }
    kv = options.kv_cache_memory
    return Question(
        model.config,
        engine_arguments | options.engine_arguments,
        {
            "method": model.method,
            "num_speculative_tokens": options.k,
            "draft_window_size": options.window,
            "draft_sink_size": options.sink,
        },
        options.batch,
        weight_bits,
        gpu.memory * options.gpu_memory_utilization - options.reserve * GIB,
        None if kv is None else kv * GIB,
        model.draft,
    )


def _as_json(plan: Plan, options: dict[str, Any], weight_bits: float) -> dict[str, Any]:
    steps = {
        name: asdict(step) | {"seconds": step.seconds}
        for name, step in (
            ("plain", plan.plain),
            ("native", plan.native),
            ("windowed", plan.windowed),
        )
    }
    return {
        "options": {k: v for k, v in options.items() if k not in ("run", "command")},
        "weight_bits": weight_bits,
        "anatomy": asdict(plan.anatomy),
        "draft_kv_tax": plan.anatomy.memory.tax,
        "steps": steps,
        "win": plan.win,
        "wins": plan.wins,
        "best_depth": {"native": plan.best_native, "windowed": plan.best_windowed},
        "best_window": plan.best_window,
        "advice": advice(plan),
    }


def _report(plan: Plan, options: argparse.Namespace, weight_bits: float) -> list[str]:
    anatomy, memory = plan.anatomy, plan.anatomy.memory
    gpus = f"{options.gpus} x {options.gpu}" if options.gpus > 1 else options.gpu
    lines = [
        f"{options.model} ({anatomy.architecture}, {anatomy.params / 1e9:.1f}B weights at "
        f"{weight_bits:g} bits) on {gpus}: {options.batch} x {options.context:,} tokens, "
        f"K={options.k}, W={options.window}, S={options.sink}",
        "",
        f"Memory of one GPU, planned by vLLM: weights {_size(memory.weights)}, "
        f"KV cache {_size(memory.kv)}",
        f"  target's KV      {_size(memory.target):>10}   {_layers(anatomy.target)}",
    ]
    if memory.states:
        lines.append(f"  its states       {_size(memory.states):>10}   recurrent layers")
    lines.append(
        f"  native draft's   {_size(memory.draft):>10}   {_layers(anatomy.draft)}: "
        f"{100 * memory.tax:.1f}% of all attention KV"
    )
    if memory.ring is not None:
        line = f"  windowed draft's {_size(memory.ring):>10}   its rings"
        if memory.ring_pool is not None:
            seqs = options.max_num_seqs or options.batch
            line += f", in a pool of {_size(memory.ring_pool)} for max_num_seqs={seqs}"
        lines.append(line)
    lines.append(f"  room for {_capacity(memory.native_capacity, memory.windowed_capacity)}")
    lines += ["", "A step, predicted (ms)  plain   native  windowed"]
    for name in ("weights", "states", "target_attention", "draft_attention", "fixed", "seconds"):
        costs = [1e3 * getattr(step, name) for step in (plan.plain, plan.native, plan.windowed)]
        title = "all" if name == "seconds" else name.replace("_", " ")
        lines.append(f"  {title:20}" + "".join(f"{cost:9.2f}" for cost in costs))
    lines += ["", "Win (%), where it fits " + "".join(f"{f'batch {b}':>9}" for b in BATCHES)]
    for context, wins in plan.wins.items():
        row = "".join(
            f"{100 * wins[b]:9.1f}" if context * b <= memory.room else f"{'-':>9}" for b in BATCHES
        )
        lines.append(f"  {context:>9,} tokens    {row}")
    lines += ["", *advice(plan)]
    return lines


def _layers(part: Part) -> str:
    kinds = (
        f"{a.layers} {'layer' if a.layers == 1 else 'layers'} of {a.token_bytes:,.0f} bytes a token"
        + (f" within {a.reach:,}" if a.reach else "")
        for a in part.attention
    )
    return " and ".join(kinds)


def _capacity(native: int | None, windowed: int | None) -> str:
    if native is None and windowed is None:
        return "not even one sequence: fewer tokens, more GPUs or smaller weights are needed"
    if native is None:
        return f"not one sequence with native MTP; {windowed:,} tokens windowed"
    if windowed is None:
        return f"{native:,} tokens with native MTP"
    return (
        f"{native:,} tokens with native MTP, {windowed:,} windowed "
        f"({100 * (windowed / native - 1):+.1f}%)"
    )


def _size(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"
