"""After a prefix hit the draft starts with the KV of its sink and window, if the pool still has them."""

import random

import pytest

from tests.support.engine import Engine, engine, windowed

pytestmark = [pytest.mark.engine, pytest.mark.v2]

K, W, S, BLOCK, FIRST = 3, 256, 64, 32, 32
CACHING = {
    "enable_prefix_caching": True,
    "max_model_len": 32_000,
    "max_num_batched_tokens": 4096,
    "max_num_seqs": 2,
    "kv_cache_memory_bytes": 256 << 20,
}


def conversation(first: int, turns: int, new: int) -> list[list[int]]:
    """Prompts in turn: the first one, and then each the one before and as much again."""
    rng = random.Random(0)
    tokens = [rng.randrange(4, 256) for _ in range(first + turns * new)]
    return [tokens[: first + turn * new] for turn in range(turns + 1)]


def hold(
    running: Engine, prompts: list[list[int]]
) -> tuple[list[list[int]], list[int], list[float]]:
    """Of each turn the answer, the tokens found cached, and AL."""
    answers, cached, lengths = [], [], []
    for prompt in prompts:
        answers += running.generate([prompt], FIRST)
        cached += running.cached_tokens
        lengths.append(running.acceptance_length() if running.windowed else 0)
    return answers, cached, lengths


@pytest.fixture(scope="module")
def sizes(runner):
    """First prompt, turns, new tokens a turn."""
    return (12_000, 6, 2_000) if runner == "V1" else (3_000, 4, 300)  # the interpreter is slow


@pytest.fixture(scope="module")
def plain(tiny_model, sizes):
    with engine(tiny_model("dense", layers=1), **CACHING) as running:
        return hold(running, conversation(*sizes))


@pytest.fixture(scope="module")
def uncached(tiny_model, sizes):
    """AL of the first turns where nothing is found."""
    prompts = conversation(*sizes)[1:4]
    with engine(
        tiny_model("dense", layers=1),
        windowed(K, W, S),
        **CACHING | {"enable_prefix_caching": False},
    ) as running:
        return hold(running, prompts)[2]


def test_every_turn_of_a_conversation_starts_warm_and_hits_what_plain_vllm_hits(
    tiny_model, plain, uncached, sizes
):
    with engine(tiny_model("dense", layers=1), windowed(K, W, S), **CACHING) as running:
        answers, cached, lengths = hold(running, conversation(*sizes))
        turns = sizes[1]
        assert (running.ring.num_warm_starts, running.ring.num_cold_starts) == (turns, 0)
    assert cached == plain[1]
    assert answers == plain[0]
    print(f"AL of the first {FIRST} tokens: {lengths[1:]} warm, {uncached} uncached", end=" ")
    assert lengths[1:4] == pytest.approx(uncached, rel=0.05)


def test_a_pool_with_no_room_to_stay_warm_is_lossless_and_counted_as_cold(tiny_model, plain, sizes):
    # Between two turns another request needs the whole pool.
    config = windowed(K, W, S, draft_ring_cache_blocks=0, draft_prefill="full")
    rng = random.Random(1)
    with engine(tiny_model("dense", layers=1), config, **CACHING | {"max_num_seqs": 1}) as running:
        for turn, prompt in enumerate(conversation(*sizes)[:4]):
            assert running.generate([prompt], FIRST) == [plain[0][turn]]
            assert running.cached_tokens == [plain[1][turn]]
            running.generate([[rng.randrange(4, 256) for _ in range(9_000)]], 1)
        assert (running.ring.num_warm_starts, running.ring.num_cold_starts) == (0, 3)


@pytest.mark.next
def test_a_block_whose_next_token_differs_is_not_used(tiny_model):
    """The draft's KV of a block's last token depends on the token after it, which no hash covers."""
    rng = random.Random(2)
    tokens = [rng.randrange(4, 256) for _ in range(30 * BLOCK)]
    hit = 20 * BLOCK
    agreeing = tokens[: hit + 40]
    other = [*tokens[:hit], (tokens[hit] + 1) % 250 + 4, *tokens[hit + 1 : hit + 40]]
    found = {}
    with engine(tiny_model("dense", layers=1), windowed(K, W, S), **CACHING) as running:
        start_warm = running.ring._start_warm

        def watched(request, row, num_hit):
            start_warm(request, row, num_hit)
            found[request.prompt_token_ids[hit]] = [not b.is_null for b in row[:num_hit]]

        running.ring._start_warm = watched
        running.generate([tokens], 4)
        running.acceptance_length()
        answer = running.generate([agreeing, other], FIRST)
        acceptance = running.acceptance_length()
        warm = running.ring.num_warm_starts, running.ring.num_cold_starts
    assert found[agreeing[hit]][-1]
    assert not found[other[hit]][-1], "the stale block"
    assert all(found[other[hit]][-4:-1]), "what is before it is used"
    assert warm == (1, 1)
    uncached = CACHING | {"enable_prefix_caching": False}
    with engine(tiny_model("dense", layers=1), windowed(K, W, S), **uncached) as running:
        assert running.generate([agreeing, other], FIRST) == answer
        expected = running.acceptance_length()
    print(f"AL {acceptance:.3f}, uncached {expected:.3f}", end=" ")
    assert acceptance == pytest.approx(expected, rel=0.1)


@pytest.mark.next
def test_a_preempted_request_resumes_warm_and_is_lossless(tiny_model):
    # Room for about 1,600 tokens of the target, and three requests of up to 700.
    sizes = {"num_gpu_blocks_override": 50, "max_model_len": 1024, "max_num_seqs": 4}
    rng = random.Random(3)
    prompts = [[rng.randrange(4, 256) for _ in range(400)] for _ in range(3)]
    with engine(tiny_model("dense", layers=1), **CACHING | {"max_model_len": 1024}) as running:
        expected = running.generate(prompts, 250)
    with engine(tiny_model("dense", layers=1), windowed(K, W, S), **CACHING | sizes) as running:
        assert running.generate(prompts, 250) == expected
        counters = {m.name: getattr(m, "value", 0) for m in running.llm.get_metrics()}
        starts = running.ring.num_warm_starts + running.ring.num_cold_starts
        assert counters["vllm:num_preemptions"] > 0
        assert starts > 0, "a preempted request found its prefix again"
        assert running.acceptance_length() > 2


def test_a_reset_of_the_prefix_cache_empties_the_rings_too(tiny_model):
    prompt = conversation(600, 0, 0)[0]
    with engine(tiny_model("dense", layers=1), windowed(K, W, S), **CACHING) as running:
        running.generate([prompt], 4)
        assert any(block.block_hash for block in running.ring.block_pool.blocks)
        assert running.llm.reset_prefix_cache()
        assert not any(block.block_hash for block in running.ring.block_pool.blocks)
