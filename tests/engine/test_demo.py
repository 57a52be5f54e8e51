"""`wmtp demo` and the offline example, as a newcomer runs them."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from wmtp_vllm import cli, demo

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
WINDOW, SINK, BLOCK, LONGEST, MAX_TOKENS = 96, 40, 32, 700, 16
ARGUMENTS = [
    *("demo", "--context", "200", str(LONGEST), "--max-tokens", str(MAX_TOKENS)),
    *("--draft-window-size", str(WINDOW), "--draft-sink-size", str(SINK)),
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The finished process, and its JSON."""
    file = tmp_path_factory.mktemp("demo") / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", "wmtp_vllm.cli", *ARGUMENTS, "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done, json.loads(file.read_text())


def test_all_three_arms_print_identical_output(ran):
    done, results = ran
    assert done.stdout.count("identical: yes") == 3
    assert "identical: no" not in done.stdout
    assert len(results) == 3
    assert all(len(a) == MAX_TOKENS for arm in results.values() for a in arm["answers"])


def test_windowed_reads_the_window_and_native_the_whole_context(ran):
    _, results = ran
    assert results["windowed_mtp"]["draft_tokens_read"] <= SINK + WINDOW + 2 * BLOCK
    second_turn = LONGEST + MAX_TOKENS + demo.MORE
    assert LONGEST <= results["mtp"]["draft_tokens_read"] <= second_turn + MAX_TOKENS + 4
    assert results["none"]["draft_tokens_read"] is None


def test_windowed_leaves_the_drafts_kv_to_the_target(ran):
    _, results = ran
    assert results["windowed_mtp"]["draft_kv_bytes"] < results["mtp"]["draft_kv_bytes"] / 4
    assert results["windowed_mtp"]["kv_capacity"] > results["mtp"]["kv_capacity"]


def test_the_second_turn_hits_the_cache_as_without_speculation_and_starts_warm(ran):
    done, results = ran
    windowed = results["windowed_mtp"]
    assert windowed["cached_tokens"] == results["none"]["cached_tokens"] > LONGEST
    assert windowed["warm_starts"] >= 2
    assert windowed["cold_starts"] == 0
    assert 0 < windowed["prompt_tokens_skipped"] < LONGEST
    assert f"{windowed['warm_starts']} times (warm start)" in done.stdout


def test_both_drafts_are_accepted(ran):
    _, results = ran
    for arm in ("mtp", "windowed_mtp"):
        assert results[arm]["acceptance_length"] > 2


@pytest.mark.parametrize("wrong", ["", "mtp", "windowed_mtp"])
def test_an_arm_that_answers_otherwise_fails_the_demo(monkeypatch, capsys, wrong):
    """Negative control: fabricated results, one answer of which may differ in its last token."""
    right = demo.Result([[5, 6, 7], [8, 9, 10]], 2.5, 700, 1 << 20, 5000, 0, 0, 0, 0, 1.0)

    def run(arm: demo.Arm) -> demo.Result:
        method = arm.engine_arguments.get("speculative_config", {}).get("method")
        return replace(right, answers=[[5, 6, 7], [8, 9, 11]]) if method == wrong else right

    monkeypatch.setattr(demo, "_run", run)
    assert cli.main(ARGUMENTS) == (1 if wrong else 0)
    printed = capsys.readouterr().out
    assert printed.count("identical: no") == (1 if wrong else 0)
    assert printed.count("identical: yes") == (2 if wrong else 3)


def test_the_offline_example_runs():
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "offline_batch.py"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^'.*' \(\d+ tokens\)$", done.stdout, re.MULTILINE)) == 3
    (length,) = re.findall(r"^acceptance length: ([\d.]+) ", done.stdout, re.MULTILINE)
    assert 2 < float(length) <= 4
