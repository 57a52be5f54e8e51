"""`wmtp doctor`: what will happen and what is wrong, with the figure and the fix.

Of a model and its options before they are served, or of a server that is running, by its metrics.
"""

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from wmtp_vllm import child, seams
from wmtp_vllm.config import METHOD, METHODS, WindowedMTPConfig
from wmtp_vllm.console import add_engine_arguments, json_object
from wmtp_vllm.planner import models
from wmtp_vllm.planner.anatomy import Anatomy, Question, study
from wmtp_vllm.planner.hardware import GPUS, RESERVE
from wmtp_vllm.planner.prediction import Plan, advice, predict
from wmtp_vllm.planner.roofline import Workload, acceptance_length

LEAST = 200
"""Drafts, reads or tokens below which a share of them says nothing yet."""
COLLAPSED = 0.4
"""Share of first drafts accepted below which something is wrong: MTP heads reach 0.6 to 0.9 on text."""


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis; a problem says its fix."""

    kind: Literal["ok", "note", "PROBLEM"]
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.kind:9}{self.text}" + (f"\n{'':9}-> {self.fix}" if self.fix else "")


Findings = Iterator[Finding]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a folder, a config.json, or a name on the hub")
    parser.add_argument(
        "--speculative-config",
        type=json_object,
        default={"method": METHOD, "num_speculative_tokens": 3},
        metavar="JSON",
        help="as vLLM's; default: windowed MTP with K = 3",
    )
    parser.add_argument(
        "--gpu", choices=tuple(GPUS), help="also predict memory and speed on this one"
    )
    add_engine_arguments(parser)
    parser.add_argument("--base-url", metavar="URL", help="a server that is running, instead")
    parser.add_argument(
        "--compare-url",
        metavar="URL",
        help="a second server, of native MTP or no speculation, to compare it with",
    )


def main(options: argparse.Namespace) -> int:
    """Print what was found; returns 0 where nothing is wrong."""
    if bool(options.model) == bool(options.base_url):
        sys.exit("wmtp doctor: give a model, or the --base-url of a server.")
    if options.base_url:
        findings = of_server(options.base_url, options.compare_url)
    else:
        findings = of_model(
            options.model, options.speculative_config, options.engine_arguments, options.gpu
        )
    is_well = True
    for finding in findings:
        print(finding, flush=True)
        is_well &= finding.kind != "PROBLEM"
    return 0 if is_well else 1


def of_model(
    model: str, speculative: dict[str, Any], arguments: dict[str, Any], gpu: str | None
) -> Findings:
    """Diagnose a model with its options; no weights are loaded."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        seams.apply()
    except seams.UnsupportedVLLM as error:
        yield Finding("PROBLEM", str(error))
        return
    yield Finding("ok", f"vLLM {seams.vllm_version()} is supported")
    if speculative.get("method") not in METHODS:
        yield Finding(
            "PROBLEM",
            f"the method is {speculative.get('method')!r}, so the draft reads the whole context",
            f'set "method" to one of {", ".join(METHODS)}',
        )
        return
    warnings = _Warnings()
    try:
        config = warnings.of(_engine_config, model, speculative, arguments)
    except (OSError, ValueError) as error:
        yield Finding("PROBLEM", f"vLLM would refuse to start: {error}")
        return
    yield Finding("ok", f"vLLM would start {', '.join(config.model_config.architectures)}")
    for text in warnings.texts:
        yield Finding("PROBLEM", text)
    yield from _of_length(config)
    if gpu:
        yield from _of_prediction(model, config, speculative, arguments, gpu)


def _engine_config(model: str, speculative: dict[str, Any], arguments: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=model, speculative_config=speculative, **arguments
    ).create_engine_config()


class _Warnings(logging.Handler):
    """What the plugin warns of while a function runs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def of(self, function: Any, *arguments: Any) -> Any:
        logger = logging.getLogger("vllm.wmtp_vllm")
        level, propagate = logger.level, logger.propagate
        logger.addHandler(self)
        logger.setLevel(logging.WARNING)
        logger.propagate = False
        try:
            return function(*arguments)
        finally:
            logger.removeHandler(self)
            logger.setLevel(level)
            logger.propagate = propagate


def _of_length(config: Any) -> Findings:
    """Past the positions that the draft was made for, acceptance falls to nothing, silently."""
    draft = config.speculative_config.draft_model_config
    native = getattr(draft.hf_text_config, "max_position_embeddings", None)
    longest = config.model_config.max_model_len
    if native is None or native >= longest:
        yield Finding("ok", f"the draft's positions reach max_model_len ({longest:,})")
        return
    yield Finding(
        "PROBLEM",
        f"the draft has positions for {native:,} tokens, but max_model_len is {longest:,}: beyond, "
        "its proposals are worth nothing",
        f"lower max_model_len to {native:,}, or stretch both by hf_overrides with rope_parameters and "
        "max_position_embeddings (a dictionary reaches the draft too)",
    )


def _of_prediction(
    model: str, config: Any, speculative: dict[str, Any], arguments: dict[str, Any], gpu: str
) -> Findings:
    own = {k: v for k, v in arguments.items() if k != "kv_cache_memory_bytes"}
    settings = WindowedMTPConfig().model_dump() | speculative
    found = models.find(model)
    length, seqs = config.model_config.max_model_len, config.scheduler_config.max_num_seqs
    utilization = config.cache_config.gpu_memory_utilization
    draft = speculative.get("model")
    try:
        [anatomy] = study(
            [
                Question(
                    found.config,
                    own | {"max_model_len": length, "max_num_seqs": seqs},
                    settings,
                    seqs,
                    found.weight_bits,
                    GPUS[gpu].memory * utilization - RESERVE,
                    config.cache_config.kv_cache_memory_bytes,
                    models.find(draft).config if draft else None,
                )
            ]
        )
    except (ValueError, child.ChildFailed) as error:
        yield Finding("PROBLEM", f"its memory cannot be planned: {error}")
        return
    yield from _of_ring(anatomy, seqs)
    plan = predict(
        anatomy,
        GPUS[gpu],
        Workload(length, 1, settings["num_speculative_tokens"]),
        sink=settings["draft_sink_size"],
        weight_bits=found.weight_bits,
    )
    yield from _of_speed(plan)


def _of_ring(anatomy: Anatomy, seqs: int) -> Findings:
    memory = anatomy.memory
    if memory.ring is None:
        return
    if memory.ring_pool is None:
        yield Finding(
            "PROBLEM",
            "the KV cache has no room for one request of the maximum length",
            "lower max_model_len, or take more or larger GPUs",
        )
        return
    gained = (memory.windowed_capacity or 0) / (memory.native_capacity or 1) - 1
    figures = (
        f"ring pool of {memory.ring_pool / 2**20:,.0f} MiB for max_num_seqs={seqs}; KV cache of "
        f"{memory.windowed_capacity:,} tokens, {gained:+.1%} over native MTP"
    )
    if memory.ring_pool < memory.ring:
        yield Finding(
            "PROBLEM",
            f"the ring pool is capped: {figures}, while the rings of all of them take "
            f"{memory.ring / 2**20:,.0f} MiB",
            f"lower max_num_seqs to what you serve at once ({seqs * memory.ring_pool / memory.ring:.0f} "
            "fit), or draft_window_size",
        )
    else:
        yield Finding("ok", figures)


def _of_speed(plan: Plan) -> Findings:
    length = acceptance_length(plan.acceptance, plan.load.k)
    speedup = plan.plain.seconds * length / plan.windowed.seconds
    figures = (
        f"at {plan.load.context:,} tokens and {length:.2f} tokens a step, {speedup:.2f} times the speed "
        "of no speculation (predicted)"
    )
    if speedup < 1:
        fix = (
            f"use K={plan.best_windowed}"
            if plan.best_windowed < plan.load.k
            else "do not speculate"
        )
        yield Finding("PROBLEM", f"speculation would be slower than none: {figures}", fix)
    else:
        yield Finding("ok", figures)
    for line in advice(plan):
        yield Finding("note", line)


def of_server(base_url: str, compare_url: str | None = None) -> Findings:
    """Diagnose a server by what it has counted since it started."""
    from wmtp_vllm.bench.server import metrics

    try:
        values = metrics(base_url, label="position")
        other = metrics(compare_url) if compare_url else None
    except OSError as error:
        yield Finding("PROBLEM", f"no metrics at {base_url}: {error}", "is it a vLLM server?")
        return
    is_windowed = "wmtp:draft_window_tokens" in values
    if not is_windowed and "vllm:spec_decode_num_drafts_total" not in values:
        yield Finding("PROBLEM", "the server does not speculate", f'set "method": "{METHOD}"')
        return
    if not is_windowed:
        yield Finding(
            "PROBLEM",
            "the server speculates, but its draft reads the whole context",
            f'set "method": "{METHOD}" (installed beside vLLM, and not left out by VLLM_PLUGINS?)',
        )
    yield from of_acceptance(values)
    if is_windowed:
        yield from of_window(values)
    yield from of_prefixes(values)
    if other is not None:
        yield from of_comparison(values, other)


def of_acceptance(values: dict[str, float]) -> Findings:
    """Whether drafts are accepted."""
    drafts = values.get("vllm:spec_decode_num_drafts_total", 0)
    if drafts < LEAST:
        yield Finding("note", f"only {drafts:.0f} drafts yet, too few to tell acceptance")
        return
    accepted = values["vllm:spec_decode_num_accepted_tokens_total"]
    first = values.get("vllm:spec_decode_num_accepted_tokens_per_pos_total[0]", 0) / drafts
    k = values["vllm:spec_decode_num_draft_tokens_total"] / drafts
    figures = f"{1 + accepted / drafts:.2f} tokens a step at K={k:.0f}; {first:.0%} of first drafts"
    if first < COLLAPSED:
        yield Finding(
            "PROBLEM",
            f"acceptance has collapsed: {figures}",
            "compare with method mtp on the same requests: if that is as low, the head does not fit the "
            "model or its positions end (wmtp doctor MODEL); if not, draft_window_size is too small",
        )
    else:
        yield Finding("ok", f"acceptance: {figures}")


def of_window(values: dict[str, float]) -> Findings:
    """Whether the window acts, and the ring pool is large enough."""
    window, sink = (values[f"wmtp:draft_{name}_tokens"] for name in ("window", "sink"))
    reads = values.get("wmtp:draft_reads_total", 0)
    if reads < LEAST:
        yield Finding("note", f"only {reads:.0f} reads of the draft yet, too few to tell")
        return
    kept, context = (values[f"wmtp:draft_{n}_tokens_total"] for n in ("kept", "context"))
    figures = f"the draft read {kept / reads:,.0f} of {context / reads:,.0f} tokens a step"
    if kept == context:
        yield Finding(
            "PROBLEM",
            f"the window never acts: {figures}, all within W + S = {window + sink:,.0f}",
            'lower draft_window_size, or use method "mtp": nothing is gained',
        )
    else:
        yield Finding("ok", figures)
    waits = values["wmtp:ring_waits_total"]
    pool = values["wmtp:ring_pool_blocks"]
    if waits:
        yield Finding(
            "PROBLEM",
            f"{waits:,.0f} times a request had no block of the ring pool ({pool:,.0f} blocks)",
            "the pool is capped at what native MTP would take: lower max_num_seqs or draft_window_size",
        )
    else:
        yield Finding("ok", f"the ring pool ({pool:,.0f} blocks) was never empty")


def of_prefixes(values: dict[str, float]) -> Findings:
    """Whether prefixes are found, and what the draft has of them."""
    asked = values.get("vllm:prefix_cache_queries_total", 0)
    hits = values.get("vllm:prefix_cache_hits_total", 0)
    if asked < LEAST:
        return
    if not hits:
        yield Finding(
            "PROBLEM",
            f"no prefix hit in {asked:,.0f} tokens that were looked up",
            "if your requests share prefixes: a hit needs the very same tokens, of whole blocks "
            "(hundreds of tokens in hybrid models)",
        )
        return
    yield Finding("ok", f"prefix hits: {hits / asked:.0%} of tokens")
    warm, cold = (values.get(f"wmtp:{kind}_starts_total", 0) for kind in ("warm", "cold"))
    if cold > warm:
        yield Finding(
            "PROBLEM",
            f"after prefix hits the draft started cold {cold:,.0f} of {warm + cold:,.0f} times",
            "raise draft_ring_cache_blocks, so that rings outlive the pause between turns",
        )


def of_comparison(values: dict[str, float], other: dict[str, float]) -> Findings:
    """Time a token against a server that does not speculate, or natively."""
    own_time, other_time = (
        v.get("vllm:request_time_per_output_token_seconds_sum", 0)
        / max(1, v.get("vllm:request_time_per_output_token_seconds_count", 0))
        for v in (values, other)
    )
    if not own_time or not other_time:
        yield Finding("note", "one of the two servers has generated nothing yet")
        return
    ratio = other_time / own_time
    what = "native MTP" if "vllm:spec_decode_num_drafts_total" in other else "no speculation"
    figures = (
        f"{1e3 * own_time:.2f} ms a token, {1e3 * other_time:.2f} ms with {what} ({ratio:.2f}x)"
    )
    if ratio < 1:
        yield Finding(
            "PROBLEM",
            f"windowed MTP is slower than {what}: {figures}",
            "if both had the same requests: lower num_speculative_tokens, or see "
            "docs/when-not-to-use-it.md",
        )
    else:
        yield Finding("ok", figures)
