"""Prefix caching: the target gets every hit that it would get without speculation."""

import random

import pytest

from tests.support.engine import Engine, engine, native, windowed

pytestmark = [pytest.mark.engine, pytest.mark.v2, pytest.mark.next]

BLOCK, MAX_TOKENS = 32, 8
CACHING = {"enable_prefix_caching": True, "max_num_batched_tokens": 256}


def conversation() -> list[list[int]]:
    """Prompts in turn: fresh ones, on and off block boundaries, their repeats and extensions."""
    rng = random.Random(0)
    tokens = [rng.randrange(4, 256) for _ in range(1200)]
    first = [tokens[:330], tokens[500 : 500 + 10 * BLOCK], tokens[900:933]]
    extended = [p + tokens[:77] for p in first]
    diverging = [first[0][:200] + tokens[1000:1100]]
    return [*first, *first, *extended, *diverging, *extended]


def answer_in_turn(running: Engine) -> tuple[list[list[int]], list[int]]:
    answers, cached = [], []
    for prompt in conversation():
        answers += running.generate([prompt], MAX_TOKENS)
        cached += running.cached_tokens
    return answers, cached


@pytest.fixture(scope="module")
def plain(tiny_model):
    with engine(tiny_model("dense"), **CACHING) as running:
        return answer_in_turn(running)


@pytest.mark.parametrize("window", [(64, 0), (96, 40)], ids=str)
def test_hits_and_output_are_those_of_vllm_without_speculation(tiny_model, plain, window):
    with engine(tiny_model("dense"), windowed(3, *window), **CACHING) as running:
        answers, cached = answer_in_turn(running)
        assert running.acceptance_length() > 1.5
        assert running.llm.reset_prefix_cache()
        running.generate([conversation()[0]], MAX_TOKENS)
        assert running.cached_tokens == [0], "a reset empties the cache"
    assert cached == plain[1]
    assert answers == plain[0]
    assert sum(c > 0 for c in cached) >= 8, "the conversation does hit"


def test_native_mtp_loses_a_block_where_windowed_does_not(tiny_model, plain):
    """Why `disable_eagle_block_drop` is set; it also shows that the comparison can fail."""
    with engine(tiny_model("dense"), native(3), **CACHING) as running:
        _, cached = answer_in_turn(running)
    assert sum(cached) < sum(plain[1])


def test_a_full_draft_kv_keeps_vllms_own_rule_and_output(tiny_model, plain):
    config = windowed(3, 64, 16, draft_kv_cache="full")
    with engine(tiny_model("dense"), config, **CACHING) as running:
        answers, cached = answer_in_turn(running)
    assert answers == plain[0]
    assert sum(cached) < sum(plain[1])
