"""`wmtp bench`: no speculation, native and windowed MTP over contexts, windows and depths."""

import argparse
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from wmtp_vllm import child
from wmtp_vllm.bench import plots, prompts, report, server, workloads
from wmtp_vllm.bench.arms import Arm, Prompt, Run, run, run_in_turns
from wmtp_vllm.config import METHOD
from wmtp_vllm.console import add_model_arguments, natural, positive_int, progress

ARMS = ("none", "mtp", METHOD, "full-kv")
TINY_MODEL_ARGUMENTS = {
    "dtype": "auto",
    "enforce_eager": True,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 2048,
}
QUICK = {"contexts": [1024, 4096, 16384], "depths": [1, 3, 7], "windows": [128, 512, 1024]}
FULL = {
    "contexts": [4096, 16384, 65536],
    "depths": [1, 3, 5, 7],
    "windows": [512, 1024, 2048, 4032],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = add_model_arguments(parser, tiny=("dense", "hybrid", "trained"))
    model.add_argument(
        "--base-url", metavar="URL", help="measure this running server only, such as http://host/v1"
    )
    parser.add_argument(
        "--tiny-layers", type=positive_int, default=4, help="layers of the tiny dense model"
    )
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--contexts", type=positive_int, nargs="+", metavar="N", help="prompt lengths"
    )
    asked.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help='JSON lines with a key "prompt", or one prompt as text, in place of generated ones',
    )
    asked.add_argument(
        "--dataset",
        type=shlex.split,
        metavar="OPTIONS",
        help="""a dataset of vLLM's own benchmark, by its options: '--dataset-name sharegpt
        --dataset-path FILE --num-prompts 8'""",
    )
    parser.add_argument(
        "--depths", type=positive_int, nargs="+", metavar="K", help="tokens drafted a step"
    )
    parser.add_argument(
        "--windows", type=positive_int, nargs="+", metavar="W", help="draft windows, tokens"
    )
    parser.add_argument(
        "--sinks", type=natural, nargs="+", default=[64], metavar="S", help="default: 64"
    )
    parser.add_argument(
        "--task",
        choices=tuple(workloads.TASKS),
        help="kind of generated input (default: niah_multiquery; variable_tracking, which is shorter, "
        "for a tiny model)",
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=ARMS,
        metavar="ARM",
        help=f"some of {', '.join(ARMS)}; default: all",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=positive_int, help="tokens to generate a prompt (128)")
    parser.add_argument("--rounds", type=positive_int, help="times that every arm is run (3)")
    parser.add_argument(
        "--in-turns",
        action="store_true",
        help="""the engines of the arms that run at all contexts are up at once and answer by turns of
        some steps: for a machine that others use too. Needs the memory of all of them""",
    )
    parser.add_argument(
        "--quick", action="store_true", help="for what is not given, small sizes and one round"
    )
    parser.add_argument("--out", type=Path, default=Path("wmtp-bench"), help="folder for results")


def main(options: argparse.Namespace) -> int:
    """Run all arms, interleaved, and write table, JSON and plots."""
    sizes = QUICK if options.quick else FULL
    options.contexts = sorted(options.contexts or sizes["contexts"])
    depths = options.depths or sizes["depths"]
    windows = sorted(options.windows or sizes["windows"])
    rounds = options.rounds or (1 if options.quick else 3)
    max_tokens = options.max_tokens or (64 if options.quick else 128)
    if max_tokens < 2:
        sys.exit("wmtp bench: --max-tokens must be at least 2, for a time between tokens")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.base_url:
        return _measure_server(options, rounds, max_tokens)
    with tempfile.TemporaryDirectory(prefix="wmtp-bench-") as scratch:
        model = options.model or _tiny_model(options, Path(scratch))
        wanted = _prompts(options, model)
        arguments = _engine_arguments(options, model, wanted, max_tokens)
        contexts = sorted({prompt.context for prompt in wanted})
        middle = contexts[len(contexts) // 2]
        plan = _arms(depths, windows, options.sinks)
        plan = [(arm, is_wide) for arm, is_wide in plan if _kind(arm) in (options.arms or ARMS)]
        results = report.Results()
        settings = {**vars(options), "engine_arguments": arguments, "contexts": contexts}
        settings |= {"depths": depths, "windows": windows}
        settings |= {"rounds": rounds, "max_tokens": max_tokens}
        runs = [
            (number, together, is_headline)
            for number in range(rounds)
            for together, is_headline in _at_once(plan, options.in_turns)
        ]
        bar = progress(
            runs, lambda run: f"round {run[0] + 1}/{rounds}, {' | '.join(a.title for a in run[1])}"
        )
        for _, together, is_headline in bar:
            asked = wanted if is_headline else [p for p in wanted if p.context == middle]
            try:
                if len(together) > 1:
                    found = run_in_turns(together, arguments, asked, max_tokens)
                else:
                    found = [run(together[0], arguments, asked, max_tokens)]
            except child.ChildFailed as failed:
                titles = ", ".join(arm.title for arm in together)
                sys.exit(f"{failed}\nwmtp bench: {titles} failed; the log is above.")
            for arm, one in zip(together, found, strict=True):
                results.add(arm, one)
            # After each: a failure in the last hour does not cost the hours before it.
            saved = report.save(results, settings, options.out)
    print(f"{report.table(results)}\n\nraw: {saved}")
    try:
        for file in plots.draw_all(results, options.out, middle):
            print(f"plot: {file}")
    except ImportError:
        print("no plots: there is no matplotlib. pip install 'wmtp-vllm[bench]'")
    return 0


def _arms(depths: list[int], windows: list[int], sinks: list[int]) -> list[tuple[Arm, bool]]:
    """Every arm, and whether it is run at all contexts or at the middle one only.

    The largest depth, window and sink are the headline; the others show how these matter.
    """
    k, w, s = max(depths), max(windows), max(sinks)
    arms = [(Arm("none"), True), (Arm("mtp", k), True), (Arm(METHOD, k, w, s), True)]
    arms += [(Arm("mtp", depth), False) for depth in depths if depth != k]
    arms += [(Arm(METHOD, depth, w, s), False) for depth in depths if depth != k]
    arms += [
        (Arm(METHOD, k, window, sink), False)
        for sink in sinks
        for window in windows
        if (window, sink) != (w, s)
    ]
    return [*arms, (Arm(METHOD, k, w, s, "full"), False)]


def _at_once(plan: list[tuple[Arm, bool]], in_turns: bool) -> list[tuple[list[Arm], bool]]:
    """The arms whose engines are up at once: each by itself, but the headline's if they take turns."""
    headline = [arm for arm, is_headline in plan if is_headline]
    if not (in_turns and headline):
        return [([arm], is_headline) for arm, is_headline in plan]
    return [(headline, True), *(([arm], False) for arm, is_headline in plan if not is_headline)]


def _kind(arm: Arm) -> str:
    return "full-kv" if arm.kv == "full" else arm.method


def _tiny_model(options: argparse.Namespace, scratch: Path) -> str:
    from wmtp_vllm import tiny_models

    size = {"layers": options.tiny_layers} if options.tiny == "dense" else {}
    return str(tiny_models.build(options.tiny, scratch / options.tiny, **size))


def _engine_arguments(
    options: argparse.Namespace, model: str, asked: list[Prompt], max_tokens: int
) -> dict[str, Any]:
    max_model_len = max(len(prompt.token_ids) for prompt in asked) + max_tokens + 16
    arguments: dict[str, Any] = {"model": model, "max_model_len": max_model_len}
    if options.model is None:
        # Room for one prompt of the largest size, and a second of half.
        room = (256 << 20) + max_model_len * 8192
        arguments |= TINY_MODEL_ARGUMENTS | {"kv_cache_memory_bytes": room}
    return arguments | options.engine_arguments


def _prompts(
    options: argparse.Namespace, model: str, most: int = sys.maxsize, seed: int = 0
) -> list[Prompt]:
    """What the options ask for, as far as it has at most `most` tokens.

    Args:
        options: of the command.
        model: whose tokenizer counts.
        most: tokens.
        seed: added to the user's.

    """
    try:
        if options.prompt_file:
            found = prompts.from_file(model, options.prompt_file)
        elif options.dataset:
            found = prompts.of_dataset(model, [*options.dataset, "--seed", str(options.seed)])
        else:
            is_tiny = not (options.model or options.base_url)
            task = options.task or ("variable_tracking" if is_tiny else "niah_multiquery")
            contexts = [n for n in options.contexts if n <= most]
            found = prompts.generated(model, task, contexts, options.seed + seed)
    except (OSError, ValueError) as error:
        sys.exit(f"wmtp bench: {error}")
    found = [prompt for prompt in found if len(prompt.token_ids) <= most]
    if not found:
        sys.exit(f"wmtp bench: no prompt has at most the {most} tokens that the model takes.")
    return found


def _measure_server(options: argparse.Namespace, rounds: int, max_tokens: int) -> int:
    """One arm, what the server does."""
    from openai import OpenAIError

    fixed = ("depths", "windows", "arms", "engine_arguments", "in_turns")
    if given := [name for name in fixed if getattr(options, name)]:
        sys.exit(
            f"wmtp bench: --base-url measures the server as it is; --{given[0].replace('_', '-')} "
            "is for engines that are started here."
        )
    try:
        model, max_model_len = server.served_model(options.base_url)
    except OpenAIError as error:
        sys.exit(f"wmtp bench: no server answers at {options.base_url}: {error}")
    arm, results = Arm("server"), report.Results()
    for number in progress(range(rounds), lambda number: f"round {number + 1}/{rounds}"):
        asked = _prompts(options, model, max_model_len - max_tokens, seed=number)
        found = server.measure(options.base_url, asked, max_tokens)
        results.add(arm, Run(found, kv_capacity=0, peak_memory=0, device="server"))
    saved = report.save(results, vars(options), options.out)
    print(f"{report.table(results)}\n\nraw: {saved}")
    return 0
