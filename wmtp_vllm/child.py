"""Run a module of ours in a process of its own: a request as JSON in, a result as JSON out."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    # What is watched is watched where it is made, so the engine runs in the child itself.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # On a CPU: no compiler run for an engine of seconds. Elsewhere it is not read.
    "VLLM_CPU_CI_ENV": "1",
}


class ChildFailed(RuntimeError):
    """The child ended with an error; the message is its log."""


def call(module: str, request: dict[str, Any], environment: Mapping[str, str] = ENVIRONMENT) -> Any:
    """Run `python -m module`, which calls `answer`; its log is in the error, if it fails.

    Raises:
        ChildFailed: it ended with an error.

    """
    with started(module, request, environment) as result:
        return result()


@contextmanager
def started(
    module: str,
    request: dict[str, Any],
    environment: Mapping[str, str] = ENVIRONMENT,
    pass_fds: Sequence[int] = (),
) -> Iterator[Callable[[], Any]]:
    """`call` for a child that works beside this process: what it yields waits for the result.

    The child is ended with the context.
    """
    with tempfile.TemporaryDirectory(prefix="wmtp-") as scratch:
        asked, answered, log = (Path(scratch) / n for n in ("request.json", "result.json", "log"))
        asked.write_text(json.dumps(request))
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(asked), str(answered)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(environment),
                pass_fds=pass_fds,
            )

        def result() -> Any:
            if process.wait() != 0:
                raise ChildFailed(log.read_text())
            return json.loads(answered.read_text())

        try:
            yield result
        finally:
            process.kill()
            process.wait()


def answer(run: Callable[[dict[str, Any]], Any]) -> None:
    """The child's side: what `run` makes of the request is the result."""
    asked, answered = map(Path, sys.argv[1:])
    answered.write_text(json.dumps(run(json.loads(asked.read_text()))))
