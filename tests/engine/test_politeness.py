"""In every process of a real engine: who did not select windowed MTP runs vLLM as it is.

The engines run in processes of their own, spawned, so that nothing is inherited: front end, engine
core and worker. Run as a script, this file starts them one after another; see `main`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.engine import SMALL, native, windowed
from wmtp_vllm import seams

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
FOLDER = "WMTP_TEST_FOLDER"
METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "mtp": native(3),
    "windowed_mtp": windowed(3, window=64, sink=16),
}


def look() -> dict[str, Any]:
    """What of vLLM is replaced in this process, and what of the plugin was loaded before."""
    loaded = sorted(name for name in sys.modules if name.startswith("wmtp_vllm."))
    replaced = []
    for seam in seams.SEAMS:
        for place in seam.places[seams.minor_version()]:
            owner, attribute = seams._locate(place)
            if hasattr(getattr(owner, attribute), "_wmtp_vllm_original"):
                replaced.append(place)
    return {"pid": os.getpid(), "replaced": sorted(replaced), "loaded": loaded}


class CoreSpy(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, which lives in the engine core's process and looks around there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        (Path(os.environ[FOLDER]) / "core.json").write_text(json.dumps(look()))


class WorkerSpy:
    """An extension of vLLM's worker."""

    def look(self) -> dict[str, Any]:
        return look()


def generate(llm: LLM) -> list[list[int]]:
    prompts = [[7 + (i * n) % 200 for i in range(300)] for n in (1, 3, 7)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def main(model: str, folder: str, *methods: str) -> None:
    """Generate by each method, and write what was generated and seen into `folder`."""
    os.environ[FOLDER] = folder
    report = {}
    for method in methods:
        speculative = METHODS[method]
        llm = LLM(
            model,
            speculative_config=dict(speculative) if speculative else None,
            distributed_executor_backend="mp",
            scheduler_cls=f"tests.engine.{Path(__file__).stem}.{CoreSpy.__name__}",
            worker_extension_cls=f"tests.engine.{Path(__file__).stem}.{WorkerSpy.__name__}",
            **SMALL,
        )
        report[method] = {
            "tokens": generate(llm),
            "worker": llm.collective_rpc("look")[0],
            "core": json.loads((Path(folder) / "core.json").read_text()),
            "front end": look(),
        }
        llm.llm_engine.engine_core.shutdown()
        del llm
    (Path(folder) / "report.json").write_text(json.dumps(report))


@pytest.fixture(scope="module")
def run(
    tiny_model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    def script(*methods: str, **environment: str) -> Any:
        folder = tmp_path_factory.mktemp("politeness")
        arguments = [tiny_model("dense"), str(folder), *methods]
        several_processes = {
            "PYTHONPATH": str(ROOT),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
        ran = subprocess.run(
            [sys.executable, __file__, *arguments],
            env=os.environ | several_processes | environment,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr[-4000:]
        return json.loads((folder / "report.json").read_text())

    return script


@pytest.fixture(scope="module")
def report(run: Callable[..., Any]) -> Any:
    return run(*METHODS)


def places(*uses: str) -> list[str]:
    found = [seam.places[seams.minor_version()] for seam in seams.SEAMS if seam.use in uses]
    return sorted(place for places in found for place in places)


PROCESSES = ("front end", "core", "worker")


@pytest.mark.parametrize("method", METHODS)
def test_an_engine_has_three_processes(report: Any, method: str) -> None:
    assert len({report[method][process]["pid"] for process in PROCESSES}) == 3


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("method", ["none", "mtp"])
def test_only_the_method_name_is_replaced_where_another_method_runs(
    report: Any, method: str, process: str
) -> None:
    assert report[method][process]["replaced"] == places("selects")
    parts = [name.split(".")[1] for name in report[method][process]["loaded"]]
    assert not {"kv_manager", "attention_backends", "proposers"} & set(parts)


@pytest.mark.parametrize("process", PROCESSES)
def test_every_seam_is_replaced_where_windowed_mtp_runs(report: Any, process: str) -> None:
    assert report["windowed_mtp"][process]["replaced"] == places("selects", "wrapped")


def test_output_of_mtp_is_that_without_the_plugin(report: Any, run: Callable[..., Any]) -> None:
    without = run("mtp", VLLM_PLUGINS="")["mtp"]
    assert [without[process]["replaced"] for process in PROCESSES] == [[], [], []]
    assert report["mtp"]["tokens"] == without["tokens"]
    assert report["mtp"]["tokens"] == report["windowed_mtp"]["tokens"] == report["none"]["tokens"]


if __name__ == "__main__":
    main(*sys.argv[1:])
