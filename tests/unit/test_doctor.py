"""`wmtp doctor` names what is wrong, with the figure and the fix, and nothing where all is well."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from wmtp_vllm import cli, doctor

pytestmark = pytest.mark.unit

HEALTHY = {
    "vllm:spec_decode_num_drafts_total": 1000,
    "vllm:spec_decode_num_draft_tokens_total": 3000,
    "vllm:spec_decode_num_accepted_tokens_total": 2000,
    "vllm:spec_decode_num_accepted_tokens_per_pos_total[0]": 850,
    "vllm:prefix_cache_queries_total": 10_000,
    "vllm:prefix_cache_hits_total": 4000,
    "vllm:request_time_per_output_token_seconds_sum": 10.0,
    "vllm:request_time_per_output_token_seconds_count": 1000,
    "wmtp:draft_window_tokens": 100,
    "wmtp:draft_sink_tokens": 20,
    "wmtp:draft_reads_total": 1000,
    "wmtp:draft_kept_tokens_total": 120_000,
    "wmtp:draft_context_tokens_total": 2_000_000,
    "wmtp:ring_waits_total": 0,
    "wmtp:ring_pool_blocks": 50,
    "wmtp:warm_starts_total": 8,
    "wmtp:cold_starts_total": 1,
}


@pytest.fixture
def serve() -> Iterator[Callable[[dict[str, float]], str]]:
    """Serves metrics as vLLM's server does; returns the URL."""
    servers = []

    def start(values: dict[str, float]) -> str:
        def line(name: str, value: float) -> str:
            name, _, position = name.removesuffix("]").partition("[")
            label = f',position="{position}"' if position else ""
            return f'{name}{{engine="0"{label}}} {value}\n'

        text = "".join(line(*item) for item in values.items())

        class Metrics(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *arguments: object) -> None: ...

        server = http.server.HTTPServer(("127.0.0.1", 0), Metrics)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/v1"

    yield start
    for server in servers:
        server.shutdown()


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def wmtp(*arguments: str) -> tuple[int, str]:
        return cli.main(["doctor", *arguments]), capsys.readouterr().out

    return wmtp


def test_a_healthy_server_has_no_problem(run, serve):
    code, out = run("--base-url", serve(HEALTHY), "--compare-url", serve(slower()))
    assert code == 0
    assert "PROBLEM" not in out
    for figure in (
        "3.00 tokens a step at K=3; 85% of first drafts",
        "the draft read 120 of 2,000 tokens a step",
        "the ring pool (50 blocks) was never empty",
        "prefix hits: 40%",
        "10.00 ms a token, 15.00 ms with no speculation (1.50x)",
    ):
        assert figure in out


def slower() -> dict[str, float]:
    """A server without speculation, half as fast again."""
    return {
        "vllm:request_time_per_output_token_seconds_sum": 15.0,
        "vllm:request_time_per_output_token_seconds_count": 1000,
    }


@pytest.mark.parametrize(
    ("changes", "problem", "fix"),
    [
        (
            {"vllm:spec_decode_num_accepted_tokens_per_pos_total[0]": 60},
            "acceptance has collapsed",
            "compare with method mtp",
        ),
        (
            {"wmtp:draft_context_tokens_total": 120_000},
            "the window never acts: the draft read 120 of 120 tokens a step",
            "lower draft_window_size",
        ),
        ({"wmtp:ring_waits_total": 7}, "7 times a request had no block", "lower max_num_seqs"),
        ({"vllm:prefix_cache_hits_total": 0}, "no prefix hit in 10,000 tokens", "whole blocks"),
        (
            {"wmtp:cold_starts_total": 30},
            "started cold 30 of 38 times",
            "raise draft_ring_cache_blocks",
        ),
    ],
)
def test_a_problem_of_a_server_is_named_with_its_figure_and_fix(run, serve, changes, problem, fix):
    code, out = run("--base-url", serve(HEALTHY | changes))
    assert code == 1
    [line, advice] = [text for text in out.splitlines() if problem in text or fix in text]
    assert line.startswith("PROBLEM")
    assert fix in advice


def test_speculation_that_is_slower_than_none_is_told(run, serve):
    values = slower() | {"vllm:request_time_per_output_token_seconds_sum": 5.0}
    code, out = run("--base-url", serve(HEALTHY), "--compare-url", serve(values))
    assert code == 1
    assert "slower than no speculation: 10.00 ms a token, 5.00 ms" in out


def test_a_server_without_windowed_mtp_is_told(run, serve):
    native = {k: v for k, v in HEALTHY.items() if k.startswith("vllm:")}
    assert "its draft reads the whole context" in run("--base-url", serve(native))[1]
    assert "does not speculate" in run("--base-url", serve(slower()))[1]
    assert "no metrics at" in run("--base-url", "http://127.0.0.1:9/v1")[1]


def test_a_server_that_has_done_little_is_not_judged(run, serve):
    code, out = run("--base-url", serve({name: value / 100 for name, value in HEALTHY.items()}))
    assert code == 0
    assert "too few" in out


def test_a_model_that_fits(run, tiny_model):
    """To a planner for GPUs a tiny model is all fixed costs, so that it would be slower to speculate."""
    _, out = run(tiny_model("dense"), "--gpu", "H200", "--engine-arguments", arguments())
    [problem] = [line for line in out.splitlines() if line.startswith("PROBLEM")]
    assert "speculation would be slower than none" in problem
    assert "vLLM would start MiMoForCausalLM" in out
    assert "ring pool of" in out
    assert "times the speed of no speculation (predicted)" in out


def arguments(**more: object) -> str:
    return json.dumps({"max_model_len": 8192, "max_num_seqs": 4} | more)


def test_a_checkpoint_without_mtp_weights(run, tiny_model, tmp_path):
    source = Path(tiny_model("dense"))
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(source / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "mtp" not in k}, tmp_path / "model.safetensors")
    code, out = run(str(tmp_path))
    assert code == 1
    assert "has no MTP weights" in out


@pytest.mark.parametrize(
    ("speculative", "more", "problem"),
    [
        ({"method": "mtp"}, {}, "the method is 'mtp'"),
        ({"draft_window_size": 0}, {}, "draft_window_size is an integer of at least 1"),
        ({"draft_window_size": 9000}, {}, "the window never acts"),
        ({}, {"prefill_context_parallel_size": 2}, "context parallelism"),
    ],
)
def test_a_problem_of_a_configuration(run, tiny_model, speculative, more, problem):
    asked = {"method": "windowed_mtp", "num_speculative_tokens": 3} | speculative
    code, out = run(
        tiny_model("dense"),
        *("--speculative-config", json.dumps(asked)),
        *("--engine-arguments", arguments(**more)),
    )
    assert code == 1
    assert problem in out


def test_a_draft_of_fewer_positions_than_max_model_len(run, tiny_model, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    model = tiny_model("dense", max_position_embeddings=4096)
    code, out = run(model, "--engine-arguments", arguments())
    assert code == 1
    assert "the draft has positions for 4,096 tokens, but max_model_len is 8,192" in out


def test_a_ring_pool_that_is_capped(run, tiny_model):
    more = {"max_num_seqs": 900, "kv_cache_memory_bytes": 64 << 20}
    code, out = run(tiny_model("dense"), "--gpu", "H200", "--engine-arguments", arguments(**more))
    assert code == 1
    assert "the ring pool is capped" in out


def test_a_model_or_a_server_must_be_given():
    with pytest.raises(SystemExit, match="give a model"):
        cli.main(["doctor"])
    assert doctor.LEAST > 1
