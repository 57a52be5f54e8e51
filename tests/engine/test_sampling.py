"""Sampling with a temperature: the same distribution as plain decoding, by a chi-square test."""

from collections import Counter

import pytest
from scipy.stats import chi2_contingency

from tests.support.engine import Engine, engine, windowed

# Room for every prompt at once: vLLM on a CPU fails where a seeded request's prefill is cut in chunks
# ("CPU Generator does not use offset"), with no speculation too.
ENGINE = {"max_num_seqs": 128, "max_num_batched_tokens": 8192, "max_model_len": 256}
PROMPT = list(range(20, 60))
Samples = list[tuple[int, ...]]


def sample(running: Engine, samples: int, max_tokens: int, seed: int, temperature=1.0) -> Samples:
    """The first tokens of answers to one prompt, each with a seed of its own."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=seed + i
        )
        for i in range(samples)
    ]
    prompts = [{"prompt_token_ids": PROMPT}] * samples
    outputs = running.llm.generate(prompts, params, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def p_value(a: Samples, b: Samples, place: int = 0) -> float:
    """That the tokens at `place` are of one distribution; rare ones are counted together."""
    counts = [Counter(answer[place] for answer in answers) for answers in (a, b)]
    often = [token for token in counts[0] | counts[1] if sum(c[token] for c in counts) >= 20]
    table = [[*(c[t] for t in often), c.total() - sum(c[t] for t in often)] for c in counts]
    columns = [column for column in zip(*table, strict=True) if sum(column)]
    return float(chi2_contingency(list(zip(*columns, strict=True))).pvalue)


@pytest.fixture(scope="module")
def engines_in_turn(tiny_model, runner):
    """Samples of plain decoding, then of windowed MTP: first tokens, colder ones, later tokens."""
    # The interpreter is slow.
    num_first, num_colder, num_later = (2000, 500, 400) if runner == "V1" else (600, 300, 200)

    def all_samples(running: Engine, seed: int) -> tuple[Samples, Samples, Samples]:
        return (
            sample(running, num_first, 1, seed),
            sample(running, num_colder, 1, seed, temperature=0.6),
            sample(running, num_later, 3, seed),
        )

    with engine(tiny_model("dense"), **ENGINE) as running:
        plain = all_samples(running, 0)
    with engine(tiny_model("dense"), windowed(3, 64, 16), **ENGINE) as running:
        speculative = all_samples(running, 1_000_000)
        again = sample(running, 40, 3, 1_000_000)
    return plain, speculative, again


@pytest.mark.engine
@pytest.mark.v2
def test_first_tokens_have_the_frequencies_of_plain_decoding(engines_in_turn):
    (plain, colder, _), (speculative, *_), _ = engines_in_turn
    assert len(set(plain)) > 10, "the distribution is not a single token's"
    assert p_value(plain, speculative) > 0.01
    assert p_value(colder, speculative) < 0.01, (
        "negative control: the test tells temperatures apart"
    )


# vLLM's V1 on a CPU reads uninitialised temperatures for drafted tokens, with native MTP too: its
# stand-in for the Triton kernel that spreads them over a request's tokens writes into a copy.
@pytest.mark.v2
@pytest.mark.parametrize("place", [1, 2])
def test_drafted_tokens_have_the_frequencies_of_plain_decoding(engines_in_turn, place):
    (_, _, plain), (_, _, speculative), _ = engines_in_turn
    assert p_value(plain, speculative, place) > 0.01


@pytest.mark.v2
def test_seeded_sampling_repeats_itself(engines_in_turn):
    _, (_, _, speculative), again = engines_in_turn
    assert again == speculative[: len(again)]
