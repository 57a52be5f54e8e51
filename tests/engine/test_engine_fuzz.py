"""The real engine, random requests and pools: in float32 every answer is plain decoding's.

A life is an engine with sizes drawn at random; a run in it is a batch of requests that arrive a few
steps apart, some aborted on the way. `make fuzz` runs more than 300; here it is a handful.
"""

import os
import random
from collections import Counter
from typing import Any

import pytest
from vllm import SamplingParams

from tests.conftest import RUNNER
from tests.support.engine import Engine, engine, watch_scheduled, windowed

pytestmark = [pytest.mark.engine, pytest.mark.v2]

ENOUGH = 12
"""Runs in which all kinds of events must have happened."""
# Triton's interpreter is slow.
RUNS = int(os.environ.get("WMTP_FUZZ_RUNS", ENOUGH if RUNNER == "V1" else 2))
RUNS_A_LIFE = 6
SEED = int(os.environ.get("WMTP_FUZZ_SEED", 0))
MAX_MODEL_LEN = 768
PREFIXES = [[random.Random(i).randrange(4, 256) for _ in range(500)] for i in range(3)]


def requests(rng: random.Random) -> list[dict[str, Any]]:
    """What to ask: prompt, tokens to generate, steps before the next one, steps until an abort."""
    made = []
    for _ in range(rng.randrange(2, 12)):
        shared = PREFIXES[rng.randrange(3)][: rng.choice([0, 31, 32, 64, 200, 300])]
        own = [rng.randrange(4, 256) for _ in range(rng.choice([1, 2, 33, 64, 150]))]
        made.append(
            {
                "prompt": shared + own,
                "max_tokens": rng.choice([1, 5, 30, 200, 250]),
                "pause": rng.choice([0, 0, 1, 3, 10]),
                "abort": rng.choice([None, None, None, 1, 4, 12]),
            }
        )
    return made


def sizes(rng: random.Random, life: int) -> dict[str, Any]:
    """Of an engine: pools so small that they preempt, the first one's too, and such as never do."""
    return {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": rng.choice([40, 64, 256]),
        "max_num_seqs": rng.choice([5, 8]),
        "num_gpu_blocks_override": [26, 400, 32][life % 3],
        "enable_prefix_caching": life % 4 < 3,
    }


def play(running: Engine, asked: list[dict[str, Any]], label: str) -> dict[int, list[int]]:
    """Token ids of each request that was not aborted."""
    llm_engine = running.llm.llm_engine
    answers: dict[int, list[int]] = {}
    waiting, aborts, step = list(enumerate(asked)), {}, 0
    due = 0
    while waiting or llm_engine.has_unfinished_requests():
        while waiting and due <= step:
            i, request = waiting.pop(0)
            params = SamplingParams(
                temperature=0, max_tokens=request["max_tokens"], ignore_eos=True
            )
            llm_engine.add_request(f"{label}-{i}", {"prompt_token_ids": request["prompt"]}, params)
            due = step + request["pause"]
            if request["abort"]:
                aborts[i] = step + request["abort"]
        for output in llm_engine.step():
            if output.finished:
                answers[int(output.request_id.split("-")[1])] = list(output.outputs[0].token_ids)
        step += 1
        for i in [i for i, at in aborts.items() if at == step and i not in answers]:
            llm_engine.abort_request([f"{label}-{i}"])
    return answers


def count_preemptions(running: Engine, seen: Counter[str]) -> None:
    def count(output: Any) -> None:
        seen["preemptions"] += len(output.preempted_req_ids or ())

    watch_scheduled(running, count)


def plain_answers(model: str, runs: list[list[dict[str, Any]]]) -> list[dict[int, list[int]]]:
    arguments = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 2048}
    with engine(model, **arguments) as running:
        found = []
        for run in runs:
            # An abort changes no other answer, so plain decoding answers all.
            prompts = [request["prompt"] for request in run]
            answers = running.generate(prompts, max(request["max_tokens"] for request in run))
            found.append({i: a[: run[i]["max_tokens"]] for i, a in enumerate(answers)})
    return found


def test_any_mix_of_requests_in_any_pool_is_answered_as_by_plain_decoding(tiny_model):
    rng, model = random.Random(SEED), tiny_model("dense")
    runs = [requests(rng) for _ in range(RUNS)]
    expected = plain_answers(model, runs)
    seen = Counter[str]()
    for first in range(0, RUNS, RUNS_A_LIFE):
        k, window, sink = rng.choice([1, 3, 7]), rng.choice([1, 40, 96, 300]), rng.choice([0, 40])
        arguments = sizes(rng, first // RUNS_A_LIFE)
        with engine(model, windowed(k, window, sink), **arguments) as running:
            before = running.ring.block_pool.get_num_free_blocks()
            count_preemptions(running, seen)
            for i in range(first, min(first + RUNS_A_LIFE, RUNS)):
                answers = play(running, runs[i], str(i))
                for j, answer in answers.items():
                    assert answer == expected[i][j], (SEED, i, j, k, window, sink, arguments)
                seen += Counter(runs=1, answers=len(answers), aborted=len(runs[i]) - len(answers))
                assert running.ring.block_pool.get_num_free_blocks() == before, "blocks are lost"
            counters = {m.name: getattr(m, "value", 0) for m in running.llm.get_metrics()}
            seen["hit tokens"] += int(counters.get("vllm:prefix_cache_hits", 0))
            seen["warm"] += running.ring.num_warm_starts
            seen["cold"] += running.ring.num_cold_starts
            seen["accepted"] += int(counters["vllm:spec_decode_num_accepted_tokens"])
    print(dict(seen), end=" ")
    assert seen["runs"] == RUNS
    kinds = ("preemptions", "hit tokens", "aborted", "accepted")
    assert RUNS < ENOUGH or all(seen[kind] for kind in kinds)
