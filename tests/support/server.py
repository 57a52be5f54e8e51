"""`examples/serve.sh`, as its users start it, and what tests ask of it beside the API."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from wmtp_vllm.bench.server import metrics

ROOT = Path(__file__).parents[2]
START_LIMIT = 420  # seconds; about 25 on two idle cores


@dataclass(frozen=True)
class Server:
    url: str
    log: Path
    process: subprocess.Popen

    def metric(self, name: str) -> float:
        """A metric's value, summed over its labels."""
        values = metrics(self.url)
        assert name in values, f"/metrics has no {name}"
        return values[name]


def with_commands(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment, with this Python's commands first on PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return {**environment, "PATH": path}


@contextmanager
def serving(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> Iterator[Server]:
    """A server of the tiny model that answers, and is gone at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            [ROOT / "examples" / "serve.sh", *arguments, *address],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", log, process)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        _terminate(process)


def _wait_until_healthy(server: Server) -> None:
    started = time.monotonic()
    while time.monotonic() - started < START_LIMIT:
        if (code := server.process.poll()) is not None:
            raise RuntimeError(f"the server ended with {code}:\n{server.log.read_text()}")
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                print(f"the server took {time.monotonic() - started:.0f} s to start", end=" ")
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"no server after {START_LIMIT} s:\n{server.log.read_text()}")


def _terminate(process: subprocess.Popen) -> None:
    """End the server; its engine and worker processes share its process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=60)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
