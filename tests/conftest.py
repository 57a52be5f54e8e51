"""Two kinds of test process, by vLLM's model runner, and what they share.

A process of V2 is one with VLLM_USE_V2_MODEL_RUNNER=1; on a CPU it also needs TRITON_INTERPRET=1 and
`tests/support/triton_interpreter` on PYTHONPATH (`make test-v2`). With that, V1's stand-ins for
Triton kernels are not registered, so V1 has a process of its own. A test marked both `engine` and
`v2` runs in both.
"""

import os

# Before anything imports vLLM, which reads most of these at import.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where tests can look at it
    "VLLM_CPU_CI_ENV": "1",  # no compiler runs
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin make runs beside each other crawl
}
if "PYTEST_XDIST_WORKER" in os.environ:  # a core for each
    os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

ON_GPU = torch.cuda.is_available()
# Where nothing is said, vLLM takes V2 on a GPU, and V1 on a CPU.
RUNNER = "V2" if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", str(int(ON_GPU))) == "1" else "V1"
NO_GPU = "no GPU here"


def pytest_configure() -> None:
    """Refuse a half-set environment: it would test the other runner, or fail far from the cause."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton_interpreter")
    if not ON_GPU and bool(interpreted) != (RUNNER == "V2"):
        raise pytest.UsageError(
            "On a CPU, VLLM_USE_V2_MODEL_RUNNER=1 and TRITON_INTERPRET=1 with "
            "tests/support/triton_interpreter on PYTHONPATH go together: see `make test-v2`."
        )


def pytest_report_header() -> str:
    from vllm import __version__
    from vllm.platforms import current_platform

    device = current_platform.get_device_name() if ON_GPU else f"{NO_GPU}: gpu tests are skipped"
    return f"vLLM {__version__}, Model Runner {RUNNER}, {device}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, left_out = [], []
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if not marks & {"unit", "engine", "v2", "gpu", "xformers"}:
            raise pytest.UsageError(
                f"{item.nodeid} has no marker, so `make test` would leave it out"
            )
        needs_v2 = marks & {"v2", "xformers"}
        if RUNNER == "V1":
            fits = not needs_v2 or marks & {"unit", "engine"}
        else:  # with real Triton kernels all unit tests run beside V2
            fits = needs_v2 or (ON_GPU and marks & {"unit", "gpu"})
        (kept if fits else left_out).append(item)
        if "gpu" in marks and not ON_GPU:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What ran on the GPU, with its figures, and what did not and why."""
    lines, without_gpu = [], 0
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            if "gpu" not in getattr(report, "keywords", ()):  # none where collecting failed
                continue
            if NO_GPU in str(report.longrepr):
                without_gpu += 1
                continue
            notes = [value for key, value in report.user_properties if key == "figure"]
            notes += [report.longrepr[2]] if outcome == "skipped" else []
            name = report.nodeid.partition("::")[2]
            lines += [f"{outcome:7} {name}", *(f"{'':8}{note}" for note in notes)]
    if lines:
        terminalreporter.section("on the GPU")
        terminalreporter.write_line("\n".join(lines))
    if without_gpu:
        terminalreporter.write_line(f"{without_gpu} GPU tests skipped: {NO_GPU}.")


@pytest.fixture(scope="session")
def runner() -> str:
    """The model runner of this process, "V1" or "V2"."""
    return RUNNER


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Makes a tiny model once a session: `tiny_model("dense", layers=4)` returns its path."""
    from wmtp_vllm import tiny_models

    folder = tmp_path_factory.getbasetemp() / "tiny_models"

    def build(name: tiny_models.Name, **options: int) -> str:
        label = "-".join([name, *(f"{k}{v}" for k, v in sorted(options.items()))])
        return str(tiny_models.build(name, Path(folder) / label, **options))

    return build


@pytest.fixture
def plugin_registered() -> None:
    """The plugin as vLLM has it after loading its entry points."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
