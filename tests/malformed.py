"""Malformed requests to the real server, thousands, which Schemathesis makes from its OpenAPI schema.

    make malformed

Asks native MTP's server and windowed MTP's the same, and prints how they answered. Exits with 1 where a
server went down, gives other answers than before or holds blocks afterwards, or where an operation fails
(status 5xx) that does not with native MTP.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.soak import ask, body
from tests.support.server import Server, serving, with_commands

SERVER = [
    *("--block-size", "32"),
    *("--kv-cache-memory-bytes", "64M"),
    *("--max-model-len", "256"),  # a request that is no mistake generates up to there
    *("--max-num-batched-tokens", "256"),
    *("--max-num-seqs", "8"),
    *("--tool-call-parser", "hermes", "--enable-auto-tool-choice"),
]
SPECULATION: dict[str, dict[str, Any]] = {
    "native MTP": {"method": "mtp"},
    "windowed MTP": {"method": "windowed_mtp", "draft_window_size": 96, "draft_sink_size": 40},
}
PROBES = 8


async def answers(server: Server) -> list[list[int]]:
    rng = random.Random(0)
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        asked = [body(rng) | {"prompt": [rng.randrange(4, 256)] * 150} for _ in range(PROBES)]
        return [await ask(client, one, None) for one in asked]


def statuses(server: Server) -> dict[str, Counter[str]]:
    """How often each operation answered with "2xx", "4xx" and "5xx", by the server's own count."""
    found: dict[str, Counter[str]] = {}
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "http_requests_total":
                operation = f"{sample.labels['method']} {sample.labels['handler']}"
                count = found.setdefault(operation, Counter())
                count[sample.labels["status"]] += int(sample.value)
    return found


def abuse(server: Server, st: Sequence[str], examples: int, seed: int, log: Path) -> dict[str, Any]:
    expected = asyncio.run(answers(server))
    with log.open("w") as output:
        subprocess.run(
            [
                *(*st, "run", f"{server.url}/openapi.json"),
                *("--mode", "all", "--phases", "coverage,fuzzing"),
                *("--max-examples", str(examples), "--seed", str(seed)),
                *("--checks", "not_a_server_error", "--continue-on-failure"),
                *("--exclude-path", "/generative_scoring"),  # as the hooks do
                *("--request-timeout", "60", "--workers", "4"),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"SCHEMATHESIS_HOOKS": "tests.support.schemathesis_hooks"},
        )
    if server.process.poll() is not None:
        return {"still up": False}
    found = statuses(server)
    total = sum(found.values(), Counter())
    is_up = httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    return {
        "requests": total.total() - 2 * PROBES,
        "operations": len(found),
        "statuses": dict(sorted(total.items())),
        "operations with a 5xx": {name: n for name, c in found.items() if (n := c["5xx"])},
        "still up": is_up,
        "other answers than before": sum(
            a != b for a, b in zip(asyncio.run(answers(server)), expected, strict=True)
        ),
        "requests still running": int(server.metric("vllm:num_requests_running")),
        "share of the target's blocks still held": server.metric("vllm:kv_cache_usage_perc"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--st", default="st", help="Schemathesis's command")
    parser.add_argument("--examples", type=int, default=60, help="of each operation")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    environment, folder = (
        with_commands(os.environ),
        Path(tempfile.mkdtemp(prefix="wmtp-malformed-")),
    )
    found = {}
    for name, config in SPECULATION.items():
        config = json.dumps({"num_speculative_tokens": 3} | config)
        arguments = [*SERVER, "--speculative-config", config]
        log = folder / name.replace(" ", "-")
        with serving(arguments, environment, log.with_suffix(".server")) as server:
            found[name] = abuse(
                server, [options.st], options.examples, options.seed, log.with_suffix(".requests")
            )
    print(json.dumps(found, indent=1), f"\nlogs: {folder}")
    if not all(of["still up"] for of in found.values()):
        return 1
    native, windowed = (set(of["operations with a 5xx"]) for of in found.values())
    is_well = windowed <= native and all(
        of["other answers than before"] == of["requests still running"] == 0
        and of["share of the target's blocks still held"] == 0
        and of["requests"] > 1000
        for of in found.values()
    )
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
