"""A hybrid model (gated delta net, full attention, mixture of experts) in bfloat16, on V1.

In bfloat16 the batch shape alone changes tokens at near ties, with native MTP too. So output is
compared with native MTP's where the window covers the context, and otherwise each token with the
argmax of a teacher-forced plain run.
"""

import random

import pytest

from tests.support.engine import Engine, engine, native, windowed

pytestmark = pytest.mark.engine

K, MAX_TOKENS = 3, 48
ENGINE = {"dtype": "bfloat16", "block_size": None, "max_num_batched_tokens": 1024}
NOISE = 0.1
"""Logit regret that bfloat16 alone explains: a few of its steps at the size of the logits here."""


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    lengths = [1, 5, 60, 63, 64, 300, 1100, 2500]
    return [[rng.randrange(4, 256) for _ in range(n)] for n in lengths]


def largest_regret(plain: Engine, answers: list[list[int]]) -> float:
    """The most, in logits, that any emitted token is below the argmax of a teacher-forced run."""
    from vllm import SamplingParams

    full = [
        {"prompt_token_ids": prompt + answer}
        for prompt, answer in zip(prompts(), answers, strict=True)
    ]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    worst = 0.0
    for output, answer in zip(
        plain.llm.generate(full, params, use_tqdm=False), answers, strict=True
    ):
        places = output.prompt_logprobs[-len(answer) :]
        for token, place in zip(answer, places, strict=True):
            best = max(candidate.logprob for candidate in place.values())
            worst = max(worst, best - place[token].logprob)
    return worst


@pytest.fixture(scope="module")
def native_run(tiny_model):
    with engine(tiny_model("hybrid"), native(K), **ENGINE) as running:
        answers = running.generate(prompts(), MAX_TOKENS)
        capacity = running.core.vllm_config.cache_config.kv_cache_size_tokens
        return answers, running.acceptance_length(), capacity


def test_a_window_wider_than_the_context_is_native_mtp_exactly(tiny_model, native_run):
    with engine(tiny_model("hybrid"), windowed(K, 4032, 64), **ENGINE) as running:
        assert running.generate(prompts(), MAX_TOKENS) == native_run[0]
        assert running.acceptance_length() == native_run[1]


def test_a_narrow_window_emits_the_targets_argmax_and_gives_memory_back(tiny_model, native_run):
    with engine(tiny_model("hybrid"), windowed(K, 64, 16), **ENGINE) as running:
        answers = running.generate(prompts(), MAX_TOKENS)
        acceptance = running.acceptance_length()
        capacity = running.core.vllm_config.cache_config.kv_cache_size_tokens
    with engine(tiny_model("hybrid"), **ENGINE) as plain:
        regret, native_regret = largest_regret(plain, answers), largest_regret(plain, native_run[0])
        garbage = [[5] * MAX_TOKENS for _ in answers]
        assert largest_regret(plain, garbage) > 10 * NOISE, "negative control: regret can be large"
    print(
        f"largest logit regret {regret:.4f}, native MTP's {native_regret:.4f}; AL {acceptance:.2f}"
    )
    assert regret <= max(native_regret, NOISE)
    assert acceptance > 1.5
    assert capacity >= 1.08 * native_run[2]
