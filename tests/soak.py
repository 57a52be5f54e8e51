"""A soak of the real server: thousands of requests, disconnects, a pool that preempts all the time.

    python -m tests.soak --requests 5000

Starts `examples/serve.sh` with a pool that is too small, asks it from many clients at once (streaming or
not, some gone in the middle), and prints what it found: differences to the answers that the idle server
gave before, blocks that did not come back, and how memory grew over the second half. Then it kills the
engine's process in the middle of requests, and starts anew. Exits with 1 where something is wrong.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.server import Server, serving, with_commands

SERVER = [
    *("--block-size", "32"),
    *("--num-gpu-blocks-override", "40"),
    *("--kv-cache-memory-bytes", "64M"),
    *("--max-model-len", "1024"),
    *("--max-num-batched-tokens", "256"),
    *("--max-num-seqs", "8"),
    "--speculative-config",
    '{"method": "windowed_mtp", "num_speculative_tokens": 3, '
    '"draft_window_size": 96, "draft_sink_size": 40}',
]
CLIENTS = 16
PROBES = 40
GROWTH = 0.02
"""Of memory, over the second half: more is a leak."""


def processes(server: Server) -> list[psutil.Process]:
    parent = psutil.Process(server.process.pid)
    return [parent, *parent.children(recursive=True)]


def memory_of(server: Server) -> int:
    """Bytes that its processes have for themselves."""
    return sum(process.memory_full_info().uss for process in processes(server))


def body(rng: random.Random) -> dict[str, Any]:
    length = rng.choice([3, 30, 95, 96, 97, 200, 400, 700])
    shared = [random.Random(rng.randrange(4)).randrange(4, 256) for _ in range(length // 2)]
    prompt = shared + [rng.randrange(4, 256) for _ in range(length - length // 2)]
    return {
        "model": "tiny-dense",
        "prompt": prompt,
        "max_tokens": rng.choice([1, 4, 16, 60]),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def ask(
    client: httpx.AsyncClient, asked: dict[str, Any], stop_after: int | None
) -> list[int]:
    """The answer's token ids; with `stop_after`, the client goes after so many chunks of a stream."""
    if stop_after is None:
        answer = await client.post("/v1/completions", json=asked)
        answer.raise_for_status()
        return answer.json()["choices"][0]["token_ids"]
    tokens: list[int] = []
    async with client.stream("POST", "/v1/completions", json=asked | {"stream": True}) as answer:
        answer.raise_for_status()
        chunks = 0
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                tokens += json.loads(line[6:])["choices"][0]["token_ids"]
                chunks += 1
                if chunks == stop_after:
                    break
    return tokens


async def soak(server: Server, requests: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    limits = httpx.Limits(max_connections=CLIENTS + 4)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
        probes = [body(rng) for _ in range(PROBES)]
        expected = [await ask(client, probe, None) for probe in probes]
        counts = Counter[str]()
        memory: list[int] = []
        todo = iter(range(requests))

        async def work() -> None:
            for number in todo:
                probe = rng.randrange(PROBES)
                if rng.random() < 0.5:  # a probe, whose answer is known
                    stop = rng.choice([None, 1_000_000])
                    if await ask(client, probes[probe], stop) != expected[probe]:
                        counts["differences"] += 1
                    counts["compared"] += 1
                else:
                    stop = rng.choice([None, 1, 2, 5])
                    await ask(client, body(rng), stop)
                    counts["disconnected"] += stop is not None
                counts["requests"] += 1
                if number % max(1, requests // 100) == 0:
                    memory.append(memory_of(server))
                    print(
                        f"{number}/{requests} {memory[-1] >> 20} MiB", file=sys.stderr, flush=True
                    )

        await asyncio.gather(*(work() for _ in range(CLIENTS)))
        for probe, answer in zip(probes, expected, strict=True):
            counts["differences"] += await ask(client, probe, None) != answer
        await asyncio.sleep(3)  # a step's statistics come with the step after it
        await ask(client, probes[0], None)
        await asyncio.sleep(3)
    half = memory[len(memory) // 2 :]
    # A quarter's mean against the next one's: single readings jump.
    quarter = len(half) // 2
    first, last = (sum(part) / len(part) for part in (half[:quarter], half[quarter:]))
    return {
        "requests": counts["requests"],
        "compared with the idle server's answer": counts["compared"],
        "differences": counts["differences"],
        "gone in the middle of a stream": counts["disconnected"],
        "preemptions": int(server.metric("vllm:num_preemptions_total")),
        "warm starts": int(server.metric("wmtp:warm_starts_total")),
        "cold starts": int(server.metric("wmtp:cold_starts_total")),
        "ring blocks still held": int(server.metric("wmtp:ring_blocks_held")),
        "share of the target's blocks still held": server.metric("vllm:kv_cache_usage_perc"),
        "memory at the end, MiB": int(last) >> 20,
        "memory growth over the second half": round(last / first - 1, 4),
    }


async def kill_engine(server: Server) -> dict[str, Any]:
    """Kill the engine's process while it answers; the requests must fail, and the server end."""
    rng = random.Random(0)
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        long = body(rng) | {"prompt": [5] * 8, "max_tokens": 1000}
        pending = [asyncio.create_task(ask(client, long, None)) for _ in range(8)]
        await asyncio.sleep(0.5)
        engine = max(processes(server)[1:], key=lambda p: p.memory_info().rss)
        engine.kill()
        outcomes = await asyncio.gather(*pending, return_exceptions=True)
    try:
        code = server.process.wait(timeout=120)
    except subprocess.TimeoutExpired:
        code = None
    return {
        "requests that failed when the engine was killed": sum(
            isinstance(outcome, Exception) for outcome in outcomes
        ),
        "the server ended": code is not None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    environment = with_commands(os.environ)
    log = Path(tempfile.mkdtemp(prefix="wmtp-soak-")) / "log"
    with serving(SERVER, environment, log) as server:
        found = asyncio.run(soak(server, options.requests, options.seed))
        found |= asyncio.run(kill_engine(server))
    with serving(SERVER, environment, log) as server:

        async def one() -> list[int]:
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
                return await ask(client, body(random.Random(0)), None)

        found["started anew and answered"] = bool(asyncio.run(one()))
    print(json.dumps(found, indent=1))
    is_well = (
        found["differences"] == found["ring blocks still held"] == 0
        and found["share of the target's blocks still held"] == 0
        and found["memory growth over the second half"] < GROWTH
        and found["preemptions"] > 0
        and found["requests that failed when the engine was killed"] == 8
        and found["the server ended"]
        and found["started anew and answered"]
    )
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
