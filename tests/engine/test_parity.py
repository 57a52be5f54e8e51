"""Every request feature that vLLM serves with native MTP is served alike with windowed MTP.

Each feature is asked of an engine without speculation, one with native MTP and one with windowed MTP
whose window is far smaller than the longer prompts. Where greedy decoding makes the answer exact it must
be that of plain decoding; elsewhere, and where vLLM refuses, that of native MTP.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

from tests.conftest import RUNNER
from tests.support import parity
from tests.support.engine import Engine, engine, native, windowed

pytestmark = [pytest.mark.engine, pytest.mark.v2]

K, WINDOW, SINK = 3, 96, 40
MAX_MODEL_LEN, CHUNK = 1024, 96
# Triton's interpreter takes seconds where V1 takes tenths: the same features of fewer requests.
LENGTHS = (3, 95, 96, 97, 300, 700) if RUNNER == "V1" else (3, 97, 300, 301)
THINNING = 1 if RUNNER == "V1" else 8
TOLERANCE = 1e-3
"""Of log-probabilities, in float32 and batches of different shapes."""
ARGUMENTS = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 4,
    "scheduling_policy": "priority",
    "enable_prefix_caching": True,
}
FAILED = "failed in the middle"
Ask = Callable[[LLM], Any]


def prompts(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(4, 256) for _ in range(n)]} for n in lengths]


def generate(llm: LLM, asked: Sequence[Any] | None = None, **sampling: Any) -> Any:
    """Tokens, texts, reasons and log-probabilities of all answers; greedy unless said otherwise."""
    sampling = {"temperature": 0, "max_tokens": 24} | sampling
    extra = {k: sampling.pop(k) for k in ("lora_request", "priority") if k in sampling}
    outputs = llm.generate(asked or prompts(), SamplingParams(**sampling), use_tqdm=False, **extra)
    return [
        {
            "tokens": [list(answer.token_ids) for answer in output.outputs],
            "texts": [answer.text for answer in output.outputs],
            "reasons": [(a.finish_reason, a.stop_reason) for a in output.outputs],
            "logprobs": [_numbers(answer.logprobs) for answer in output.outputs],
            "prompt logprobs": _numbers(output.prompt_logprobs),
        }
        for output in outputs
    ]


def _numbers(logprobs: Any) -> list[list[tuple[int, float]]]:
    return [
        sorted((token, found.logprob) for token, found in (position or {}).items())
        for position in logprobs or []
    ]


def greedy(**sampling: Any) -> Ask:
    return lambda llm: generate(llm, **sampling)


def seeded(**sampling: Any) -> Ask:
    """First tokens, which nothing drafts. V1 on a CPU fails with a seed where a prompt is cut."""
    sampling |= {"temperature": 1.0, "seed": 3, "max_tokens": 1}
    return lambda llm: generate(llm, prompts((3, 10)), **sampling)


def structured(**constraint: Any) -> Ask:
    return lambda llm: generate(
        llm, max_tokens=60, structured_outputs=StructuredOutputsParams(**constraint)
    )


def beam_search(llm: LLM) -> Any:
    asked = prompts((20, 200))
    outputs = llm.beam_search(asked, BeamSearchParams(beam_width=3, max_tokens=12))
    return [[(s.tokens, s.text) for s in output.sequences] for output in outputs]


def up_to_the_maximum_length(llm: LLM) -> Any:
    lengths = [MAX_MODEL_LEN - n for n in (1, 2, 3, K, K + 1, K + 2, 20)]
    return generate(llm, prompts(lengths), max_tokens=100, ignore_eos=True)


def every_chunk_offset(llm: LLM) -> Any:
    """Chunks of prompts beside each other begin and end everywhere."""
    lengths = range(CHUNK - 20, 2 * CHUNK + 20, 3 * THINNING)
    return generate(llm, prompts(lengths), max_tokens=6)


def prefix_sharing(llm: LLM) -> Any:
    base = prompts((400,), seed=5)[0]["prompt_token_ids"]
    asked = [{"prompt_token_ids": base[:n] + [7] * m} for n in (400, 399, 256) for m in (0, 1, 90)]
    return [generate(llm, asked), generate(llm, asked)]


def priorities(llm: LLM) -> Any:
    return generate(llm, priority=list(range(len(LENGTHS)))[::-1])


def aborted_at_each_step(llm: LLM) -> Any:
    """Aborts after 1, 2, 3 ... steps; what is asked next, and beside, is not disturbed."""
    core = llm.llm_engine
    answers = []
    for steps in range(1, 26, THINNING):
        for i, prompt in enumerate(prompts((150, 230), seed=steps)):
            core.add_request(f"{steps}-{i}", prompt, SamplingParams(temperature=0, max_tokens=60))
        for _ in range(steps):
            core.step()
        core.abort_request([f"{steps}-0", f"{steps}-1"])
        answers.append(generate(llm, prompts((130,)), max_tokens=8))
    return answers


LETTERS = list(range(40, 90))
FEATURES: dict[str, tuple[str, Ask]] = {
    "greedy": ("plain", greedy()),
    "seed (first tokens)": ("plain", seeded()),
    "log-probabilities": ("plain", greedy(logprobs=5)),
    "log-probabilities of the prompt": ("plain", greedy(prompt_logprobs=3)),
    "stop strings": ("plain", greedy(stop=["e", "ka"], max_tokens=60)),
    "stop strings, kept": (
        "plain",
        greedy(stop=["e"], include_stop_str_in_output=True, max_tokens=60),
    ),
    "stop token ids": ("plain", greedy(stop_token_ids=LETTERS, max_tokens=60)),
    "minimum of tokens": ("plain", greedy(stop_token_ids=LETTERS, min_tokens=9, max_tokens=60)),
    "maximum of tokens, 1 to K + 2": (
        "plain",
        lambda llm: [generate(llm, max_tokens=n) for n in range(1, K + 3)],
    ),
    "max_model_len, with drafts in flight": ("plain", up_to_the_maximum_length),
    "n > 1 (first tokens)": ("plain", seeded(n=3)),
    "beam search": ("plain", beam_search),
    "repetition penalty": ("plain", greedy(repetition_penalty=1.3)),
    "presence penalty": ("plain", greedy(presence_penalty=1.5)),
    "frequency penalty": ("plain", greedy(frequency_penalty=1.5)),
    "bad words": ("plain", greedy(bad_words=["ka", "e", "Mi", "f", "0"])),
    "allowed token ids": ("plain", greedy(allowed_token_ids=LETTERS)),
    "logit bias": ("native", greedy(logit_bias={50: 8.0})),
    "min_p": ("native", greedy(temperature=1.0, min_p=0.2)),
    "structured output: regex": ("plain", structured(regex=r"[a-f]{3,9}-[0-9]{2,4}")),
    "structured output: choice": ("plain", structured(choice=["yes", "no", "perhaps"])),
    "structured output: JSON schema": (
        "plain",
        structured(
            json=json.dumps(
                {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "maxLength": 6},
                        "n": {"enum": [1, 2]},
                    },
                    "required": ["name", "n"],
                    "additionalProperties": False,
                }
            )
        ),
    ),
    "structured output: grammar": (
        "plain",
        structured(grammar='root ::= "a" [0-9] "b" [0-9] | "c" root'),
    ),
    "chunked prefill, every offset": ("plain", every_chunk_offset),
    "prefix caching": ("plain", prefix_sharing),
    "priorities": ("plain", priorities),
    "abort at every step": ("plain", aborted_at_each_step),
}


if RUNNER == "V2":  # V1 on a CPU fails in its own sampler, with native MTP too: docs/support.md
    FEATURES["sampling from the best token alone"] = ("plain", greedy(temperature=1.0, top_k=1))


def with_lora(llm: LLM, folder: Path) -> Any:
    """Both with the adapter and without, in one batch."""
    adapter = LoRARequest("adapter", 1, str(folder))
    return generate(llm, lora_request=[adapter, None] * (len(LENGTHS) // 2))


def with_embeddings(llm: LLM, model: Path) -> Any:
    """A prompt's embeddings in place of its tokens."""
    weights = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    embedded = [{"prompt_embeds": weights[torch.tensor(p["prompt_token_ids"])]} for p in prompts()]
    return generate(llm, embedded)


@dataclass(frozen=True)
class Arms:
    """Answers by feature, of three engines."""

    plain: dict[str, Any]
    native: dict[str, Any]
    windowed: dict[str, Any]


def ask_all(running: Engine, features: dict[str, Ask]) -> dict[str, Any]:
    answers = {}
    for name, ask in features.items():
        try:
            answers[name] = ask(running.llm)
        except (ValueError, VLLMValidationError) as refusal:
            is_alive = not running.core.scheduler.requests
            answers[name] = f"{'refused' if is_alive else FAILED}: {refusal}"
    return answers


def arms(model: str, features: dict[str, Ask], **arguments: Any) -> Arms:
    made = []
    for speculative in (None, native(K), windowed(K, WINDOW, SINK)):
        with engine(model, speculative, **ARGUMENTS | arguments) as running:
            before = running.ring and running.ring.block_pool.get_num_free_blocks()
            made.append(ask_all(running, features))
            has_failed = any(FAILED in str(answer) for answer in made[-1].values())
            if running.ring and not has_failed:
                assert running.ring.block_pool.get_num_free_blocks() == before, "blocks are lost"
                assert running.acceptance_length() > 1.1
    return Arms(*made)


def check(name: str, against: str, answers: Arms) -> None:
    """Compare, and note the result for the table."""
    plain, native, windowed = (a[name] for a in (answers.plain, answers.native, answers.windowed))
    result = "same"
    if isinstance(native, str):  # vLLM's own refusal, in its words
        against = "native"
        result = f"{'fails in vLLM' if FAILED in native else 'refused by vLLM'}, alike"
    elif against == "plain" and differ(native, plain):
        against = "native"
        result = "same; native MTP's differ from plain decoding's"
    try:
        assert_same(windowed, plain if against == "plain" else native)
    except AssertionError:
        parity.record(name, against, "differs")
        raise
    parity.record(name, against, result)


def differ(one: Any, other: Any) -> bool:
    try:
        assert_same(one, other)
    except AssertionError:
        return True
    return False


def assert_same(found: Any, expected: Any) -> None:
    """Equal, but for numbers with a fraction, which are close."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, abs=TOLERANCE)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.fixture(scope="module")
def answers(tiny_model: Callable[..., str]) -> Arms:
    return arms(tiny_model("dense"), {name: ask for name, (_, ask) in FEATURES.items()})


@pytest.mark.parametrize("name", FEATURES)
def test_a_request_feature_is_served_alike(answers: Arms, name: str) -> None:
    check(name, FEATURES[name][0], answers)


def test_the_comparison_can_fail(answers: Arms) -> None:
    """Negative control: features do change the answers, and the comparison sees it."""
    plain = answers.plain
    for name in ("repetition penalty", "bad words", "allowed token ids", "stop strings"):
        assert differ(plain[name], plain["greedy"])


def test_lora_of_the_target_is_served_alike(tiny_model: Callable[..., str], tmp_path: Path) -> None:
    model = Path(tiny_model("dense"))
    make_adapter(model, tmp_path)
    name = "LoRA of the target"
    found = arms(
        str(model), {name: lambda llm: with_lora(llm, tmp_path)}, enable_lora=True, max_lora_rank=8
    )
    check(name, "plain", found)
    with_adapter, without = found.plain[name][-2], found.plain[name][-1]
    assert with_adapter["tokens"] != without["tokens"]


def make_adapter(model: Path, folder: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}.mlp.down_proj"
        out, inner = weights[f"{name}.weight"].shape
        for part, shape in (("lora_A", (8, inner)), ("lora_B", (out, 8))):
            tensors[f"base_model.model.{name}.{part}.weight"] = (
                torch.randn(shape, generator=generator) * 0.3
            )
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["down_proj"]})
    )


def test_embeddings_as_prompts_are_served_alike(tiny_model: Callable[..., str]) -> None:
    model = Path(tiny_model("dense"))
    name = "embeddings as prompts"
    found = arms(
        str(model), {name: lambda llm: with_embeddings(llm, model)}, enable_prompt_embeds=True
    )
    check(name, "plain", found)
