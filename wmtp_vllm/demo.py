"""`wmtp demo`: the same prompts with no speculation, native MTP and windowed MTP, side by side.

Each arm is an engine in a process of its own, so that none can warm, fill or patch another's.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wmtp_vllm import child
from wmtp_vllm.config import METHOD
from wmtp_vllm.console import add_model_arguments, progress

ARMS = {"none": "no speculation", "mtp": "native MTP", METHOD: "windowed MTP"}
TINY_MODEL_ARGUMENTS = {
    "enforce_eager": True,
    "block_size": 32,
    "kv_cache_memory_bytes": 256 << 20,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
}
MORE = 40
"""Tokens that the next turn of a conversation adds to the answer."""
TEXT = (
    "A river does not hurry, and yet it reaches the sea. The miller counts sacks, the ferryman "
    "counts crossings, and the heron counts nothing at all. When the frost comes the reeds turn "
    "the colour of old rope; in spring they are green again before anyone has noticed. "
)


@dataclass(frozen=True)
class Arm:
    """What one arm is asked to do."""

    title: str
    engine_arguments: dict[str, Any]
    context: list[int]
    """prompt lengths, tokens"""
    max_tokens: int
    turns: int
    """how often each prompt is asked, longer each time by the answer and a little more"""


@dataclass(frozen=True)
class Result:
    """What one arm did."""

    answers: list[list[int]]
    """token ids of each answer"""
    acceptance_length: float | None
    draft_tokens_read: int | None
    """most KV tokens that the draft's attention read for one request in one draft step"""
    draft_kv_bytes: int
    kv_capacity: int
    """tokens that vLLM reports to have room for"""
    cached_tokens: int
    """prompt tokens found in the prefix cache"""
    warm_starts: int
    """of the requests with a prefix hit, those whose draft had all KV that it reads"""
    cold_starts: int
    prompt_tokens_skipped: int
    """prompt tokens that the draft did not run on"""
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--num-speculative-tokens", type=int, default=3, metavar="K")
    parser.add_argument("--draft-window-size", type=int, default=512, metavar="W")
    parser.add_argument("--draft-sink-size", type=int, default=64, metavar="S")
    parser.add_argument(
        "--context",
        type=int,
        nargs="+",
        default=[300, 1500, 6000],
        metavar="N",
        help="prompt lengths in tokens (default: 300 1500 6000)",
    )
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to generate a prompt")
    parser.add_argument(
        "--turns",
        type=int,
        help="turns of each conversation; from the second on they hit the prefix cache (default: 2, "
        "and 1 for the tiny hybrid model, whose prefix caching vLLM cannot run on a CPU)",
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    parser.add_argument("--json", type=Path, help="also write the results to this file")


def main(options: argparse.Namespace) -> int:
    """Run all arms and print the table; returns 0 when all gave the same output."""
    with tempfile.TemporaryDirectory(prefix="wmtp-demo-") as scratch:
        results = {}
        for method in progress(
            list(ARMS), lambda method: f"{ARMS[method]}: vLLM starts, generates"
        ):
            results[method] = _run(_arm(options, method, Path(scratch)))
    print(_table(options, results))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({a: asdict(r) for a, r in results.items()}, indent=1))
    return 0 if all(result.answers == results["none"].answers for result in results.values()) else 1


def _arm(options: argparse.Namespace, method: str, scratch: Path) -> Arm:
    is_tiny_hybrid = options.model is None and options.tiny == "hybrid"
    turns = options.turns or (1 if is_tiny_hybrid else 2)
    arguments: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "tensor_parallel_size": options.tensor_parallel_size,
        "max_model_len": max(options.context) + turns * (options.max_tokens + MORE) + 16,
        "enable_prefix_caching": turns > 1,
        "disable_log_stats": False,
    }
    if options.model is None:
        from wmtp_vllm import tiny_models

        arguments |= TINY_MODEL_ARGUMENTS
        arguments["model"] = str(tiny_models.build(options.tiny, scratch / options.tiny))
    if method != "none":
        arguments["speculative_config"] = {
            "method": method,
            "num_speculative_tokens": options.num_speculative_tokens,
        }
    if method == METHOD:
        arguments["speculative_config"] |= {
            "draft_window_size": options.draft_window_size,
            "draft_sink_size": options.draft_sink_size,
        }
    arguments |= options.engine_arguments
    return Arm(ARMS[method], arguments, options.context, options.max_tokens, turns)


def _run(arm: Arm) -> Result:
    """Run one arm in a process of its own; its log is shown only if it fails."""
    try:
        return Result(**child.call("wmtp_vllm.demo", asdict(arm)))
    except child.ChildFailed as failed:
        sys.exit(f"{failed}\nwmtp demo: {arm.title} failed; its log is above.")


def _generate(arm: Arm) -> Result:
    """Generate with one engine, in this process."""
    from vllm import LLM, SamplingParams

    from wmtp_vllm import seams

    llm = LLM(**arm.engine_arguments)
    has_draft = "speculative_config" in arm.engine_arguments
    read: list[int] = []
    drafts: list[seams.Draft] = []
    if has_draft:
        (*drafts,) = llm.collective_rpc(seams.draft_of)
        for builder in drafts[0].metadata_builders:
            _watch(builder, read)

    tokenizer = llm.get_tokenizer()
    prompts = [_prompt(tokenizer, length) for length in arm.context]
    sampling = SamplingParams(temperature=0, max_tokens=arm.max_tokens, ignore_eos=True)
    answers: list[list[int]] = []
    cached_tokens, seconds = 0, 0.0
    for _ in range(arm.turns):
        started = time.perf_counter()
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
        )
        seconds += time.perf_counter() - started
        answers += (new := [list(output.outputs[0].token_ids) for output in outputs])
        cached_tokens += sum(output.num_cached_tokens or 0 for output in outputs)
        prompts = [p + a + p[:MORE] for p, a in zip(prompts, new, strict=True)]

    counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    num_drafts = counters.get("vllm:spec_decode_num_drafts") or 0
    accepted = counters.get("vllm:spec_decode_num_accepted_tokens") or 0
    scheduler = seams.scheduler_of(llm)
    ring = scheduler and seams.ring_of(scheduler)
    if has_draft:
        (*drafts,) = llm.collective_rpc(seams.draft_of)
    return Result(
        answers=answers,
        acceptance_length=1 + accepted / num_drafts if num_drafts else None,
        draft_tokens_read=max(read, default=None),
        draft_kv_bytes=sum(_kv_bytes(draft) for draft in drafts),
        kv_capacity=llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens,
        cached_tokens=cached_tokens,
        warm_starts=ring.num_warm_starts if ring else 0,
        cold_starts=ring.num_cold_starts if ring else 0,
        prompt_tokens_skipped=max((draft.num_rows_skipped for draft in drafts), default=0),
        seconds=seconds,
    )


def _watch(builder: Any, read: list[int]) -> None:
    """Note the tokens that each metadata of a draft step (one query a request) makes a kernel read."""
    build = builder.build

    def build_and_note(*args: Any, **kwargs: Any) -> Any:
        metadata = build(*args, **kwargs)
        if metadata.max_query_len == 1:
            read.append(int(metadata.seq_lens.max()))
        return metadata

    builder.build = build_and_note


def _kv_bytes(draft: Any) -> int:
    """Bytes of KV cache that the draft's layers have on one worker."""
    config = draft.kv_cache_config
    total = 0
    for group in config.kv_cache_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for tensor in config.kv_cache_tensors:
            for name in {*tensor.layers} & {*group.layer_names} & {*draft.layer_names}:
                spec = specs.get(name, group.kv_cache_spec)
                total += spec.page_size_bytes * config.num_blocks_of(tensor)
    return total


def _prompt(tokenizer: Any, length: int) -> list[int]:
    """Token ids of a text of exactly `length` tokens, no two paragraphs of which are the same."""
    text, ids = "", list[int]()
    while len(ids) < length:
        text += "".join(f"{len(text) + i}. {TEXT}\n" for i in range(max(1, length // 400)))
        ids = tokenizer.encode(text)
    return ids[:length]


def _table(options: argparse.Namespace, results: dict[str, Result]) -> str:
    reference = results["none"]
    rows = [
        ["", "output", "AL", "draft reads a step", "draft KV", "KV capacity", "cache hits", "time"]
    ]
    for method, result in results.items():
        identical = "yes" if result.answers == reference.answers else "no"
        al, read = result.acceptance_length, result.draft_tokens_read
        rows.append(
            [
                ARMS[method],
                f"identical: {identical}",
                "-" if al is None else f"{al:.2f}",
                "-" if read is None else f"{read:,} tokens",
                f"{result.draft_kv_bytes / 2**20:.1f} MiB" if result.draft_kv_bytes else "-",
                f"{result.kv_capacity:,} tokens",
                f"{result.cached_tokens:,} tokens",
                f"{result.seconds:.1f} s",
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    aligned = "  ".join(
        f"{{:{'<' if column < 2 else '>'}{width}}}" for column, width in enumerate(widths)
    )
    lines = [aligned.format(*row) for row in rows]
    windowed = results[METHOD]
    lines += [
        "",
        f"The windowed draft did not run on {windowed.prompt_tokens_skipped:,} prompt tokens whose KV "
        f"it would never read; after a cache hit it had all KV that it reads {windowed.warm_starts} "
        f"times (warm start), and {windowed.cold_starts} times not (cold start).",
        f"Prompts of {', '.join(f'{n:,}' for n in options.context)} tokens, "
        f"{options.max_tokens} generated each turn, greedy; K = {options.num_speculative_tokens}, "
        f"W = {options.draft_window_size}, S = {options.draft_sink_size}.",
        "AL: tokens per step. Draft reads: KV of one request, at most. The time is of one run, and "
        "no measurement of speed.",
    ]
    if any(result.answers != reference.answers for result in results.values()):
        lines += [
            "Outputs differ. In 16-bit floats any change of batch shape can flip near ties, with "
            "native MTP as well; --dtype float32 shows whether that is all."
        ]
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    child.answer(lambda request: asdict(_generate(Arm(**request))))
