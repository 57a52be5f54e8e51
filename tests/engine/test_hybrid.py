"""A hybrid model (gated delta net, full attention, mixture of experts) in bfloat16.

On V1, and with prefix caching, which fails there without any plugin, on V2.

In bfloat16 the batch shape alone changes tokens at near ties, with native MTP too. So output is
compared with native MTP's where the window covers the context, and otherwise each token with the
argmax of a teacher-forced plain run.
"""

import random

import pytest

from tests.support.engine import Engine, engine, native, windowed

K, MAX_TOKENS = 3, 48
ENGINE = {"dtype": "bfloat16", "block_size": None, "max_num_batched_tokens": 1024}
NOISE = 0.1
"""Logit regret that bfloat16 alone explains: a few of its steps at the size of the logits here."""


def prompts() -> list[list[int]]:
    """Token ids of all lengths."""
    rng = random.Random(3)
    lengths = [1, 5, 60, 63, 64, 300, 1100, 2500]
    return [[rng.randrange(4, 256) for _ in range(n)] for n in lengths]


def largest_regret(
    plain: Engine, answers: list[list[int]], asked: list[list[int]] | None = None
) -> float:
    """The most, in logits, that any emitted token is below the argmax of a teacher-forced run."""
    from vllm import SamplingParams

    full = [
        {"prompt_token_ids": prompt + answer}
        for prompt, answer in zip(asked or prompts(), answers, strict=True)
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


@pytest.mark.engine
def test_a_window_wider_than_the_context_is_native_mtp_exactly(tiny_model, native_run):
    with engine(tiny_model("hybrid"), windowed(K, 4032, 64), **ENGINE) as running:
        assert running.generate(prompts(), MAX_TOKENS) == native_run[0]
        assert running.acceptance_length() == native_run[1]


@pytest.mark.engine
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


@pytest.mark.v2
def test_prefix_hits_are_plain_vllms_and_output_the_targets_argmax(tiny_model):
    """A fresh prompt, its repeat and its extension; the blocks of this model have hundreds of tokens."""
    caching = ENGINE | {"enable_prefix_caching": True, "max_num_seqs": 2}
    rng = random.Random(4)
    fresh = [rng.randrange(4, 256) for _ in range(900)]
    asked = [fresh, fresh, fresh + fresh[:150]]
    cached, answers = {}, {}
    for name, config in (("windowed", windowed(K, 64, 16)), ("plain", None)):
        with engine(tiny_model("hybrid"), config, **caching) as running:
            answers[name], cached[name] = [], []
            for prompt in asked:
                answers[name] += running.generate([prompt], 12)
                cached[name] += running.cached_tokens
            if config:
                acceptance = running.acceptance_length()
                starts = running.ring.num_warm_starts, running.ring.num_cold_starts
            else:
                # What is scored asks for prompt logprobs, which pass the cache by.
                regret = largest_regret(running, answers["windowed"], asked)
    print(f"cached {cached}; largest logit regret {regret:.4f}; AL {acceptance:.2f}", end=" ")
    assert cached["windowed"] == cached["plain"]
    assert all(cached["plain"][1:]), "repeat and extension hit"
    assert starts == (2, 0), "and start warm"
    assert regret <= NOISE
    assert acceptance > 1.5
