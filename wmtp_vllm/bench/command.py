"""`wmtp bench`: no speculation, native and windowed MTP over contexts, windows and depths."""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from wmtp_vllm import child
from wmtp_vllm.bench import report, server, workloads
from wmtp_vllm.bench.arms import Arm, Run, run
from wmtp_vllm.config import METHOD
from wmtp_vllm.console import add_model_arguments, say

TINY_MODEL_ARGUMENTS = {
    "dtype": "auto",
    "enforce_eager": True,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 2048,
}
QUICK = {"contexts": [1024, 4096, 16384], "depths": [1, 3, 7], "windows": [128, 512, 1024]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = add_model_arguments(parser)
    model.add_argument(
        "--base-url", metavar="URL", help="measure this running server only, such as http://host/v1"
    )
    parser.add_argument("--tiny-layers", type=int, default=4, help="layers of the tiny dense model")
    parser.add_argument("--contexts", type=int, nargs="+", metavar="N", help="prompt lengths")
    parser.add_argument("--depths", type=int, nargs="+", metavar="K", help="tokens drafted a step")
    parser.add_argument("--windows", type=int, nargs="+", metavar="W", help="draft windows, tokens")
    parser.add_argument("--sink", type=int, default=64, metavar="S", help="sink (default: 64)")
    parser.add_argument(
        "--task",
        choices=tuple(workloads.TASKS),
        help="kind of input (default: niah_multiquery; variable_tracking, which is shorter, for a tiny "
        "model)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens to generate a prompt")
    parser.add_argument("--rounds", type=int, default=3, help="times that every arm is run")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round")
    parser.add_argument("--out", type=Path, default=Path("wmtp-bench"), help="folder for results")


def main(options: argparse.Namespace) -> int:
    """Run all arms, interleaved, and write table, JSON and plots."""
    contexts = sorted(options.contexts or QUICK["contexts"])
    depths = options.depths or QUICK["depths"]
    windows = sorted(options.windows or QUICK["windows"])
    rounds = 1 if options.quick else options.rounds
    max_tokens = min(options.max_tokens, 64) if options.quick else options.max_tokens
    is_tiny = not (options.model or options.base_url)
    options.task = options.task or ("variable_tracking" if is_tiny else "niah_multiquery")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.base_url:
        return _measure_server(options, contexts, rounds, max_tokens)
    with tempfile.TemporaryDirectory(prefix="wmtp-bench-") as scratch:
        arguments = _engine_arguments(options, max(contexts) + max_tokens + 16, Path(scratch))
        prompts = _prompts(options, arguments["model"], contexts)
        middle = contexts[len(contexts) // 2]
        plan = _arms(depths, windows, options.sink)
        results = report.Results()
        for number in range(rounds):
            for position, (arm, is_headline) in enumerate(plan, start=1):
                say(f"round {number + 1}/{rounds}, arm {position}/{len(plan)}: {arm.title}")
                asked = prompts if is_headline else [p for p in prompts if len(p) == middle]
                try:
                    results.add(arm, run(arm, arguments, asked, max_tokens))
                except child.ChildFailed as failed:
                    sys.exit(f"{failed}\nwmtp bench: {arm.title} failed; its log is above.")
    say("")
    print(report.table(results))
    settings = {**vars(options), "engine_arguments": arguments, "contexts": contexts}
    settings |= {"depths": depths, "windows": windows, "rounds": rounds, "max_tokens": max_tokens}
    print(f"\nraw: {report.save(results, settings, options.out)}")
    try:
        for file in report.plot(results, options.out, middle):
            print(f"plot: {file}")
    except ImportError:
        print("no plots: there is no matplotlib. pip install 'wmtp-vllm[bench]'")
    return 0


def _arms(depths: list[int], windows: list[int], sink: int) -> list[tuple[Arm, bool]]:
    """Every arm, and whether it is run at all contexts or at the middle one only.

    The largest depth and window are the headline; the others show how these two matter.
    """
    k, w = max(depths), max(windows)
    arms = [(Arm("none"), True), (Arm("mtp", k), True), (Arm(METHOD, k, w, sink), True)]
    arms += [(Arm("mtp", depth), False) for depth in depths if depth != k]
    arms += [(Arm(METHOD, depth, w, sink), False) for depth in depths if depth != k]
    arms += [(Arm(METHOD, k, window, sink), False) for window in windows if window != w]
    return [*arms, (Arm(METHOD, k, w, sink, "full"), False)]


def _engine_arguments(
    options: argparse.Namespace, max_model_len: int, scratch: Path
) -> dict[str, Any]:
    arguments: dict[str, Any] = {"model": options.model, "max_model_len": max_model_len}
    if options.model is None:
        from wmtp_vllm import tiny_models

        size = {"layers": options.tiny_layers} if options.tiny == "dense" else {}
        model = tiny_models.build(options.tiny, scratch / options.tiny, **size)
        arguments |= TINY_MODEL_ARGUMENTS
        arguments |= {
            "model": str(model),
            # Room for one prompt of the largest size, and a second of half.
            "kv_cache_memory_bytes": (256 << 20) + max_model_len * 8192,
        }
    return arguments | options.engine_arguments


def _measure_server(
    options: argparse.Namespace, contexts: list[int], rounds: int, max_tokens: int
) -> int:
    """One arm, what the server does; a prompt is asked for once a round, so that none is cached."""
    model, max_model_len = server.served_model(options.base_url)
    contexts = [n for n in contexts if n + max_tokens <= max_model_len]
    arm, results = Arm("server"), report.Results()
    for number in range(rounds):
        say(f"round {number + 1}/{rounds}: {options.base_url}")
        options.seed += 1
        prompts = _prompts(options, model, contexts)
        found = server.measure(options.base_url, prompts, max_tokens)
        results.add(arm, Run(found, kv_capacity=0, peak_memory=0, device="server"))
    say("")
    print(report.table(results))
    print(f"\nraw: {report.save(results, vars(options), options.out)}")
    return 0


def _prompts(options: argparse.Namespace, model: str, contexts: list[int]) -> list[list[int]]:
    """Token ids of one prompt of exactly each length."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = []
    for context in contexts:

        def count(text: str) -> int:
            return len(tokenizer.encode(text))

        sample = workloads.make(options.task, context, options.seed, count)
        ids = tokenizer.encode(sample.prompt)
        # To the token, so that arms and rounds of one context are of one length: the front is cheap.
        prompts.append(ids[:1] * (context - len(ids)) + ids)
    return prompts
