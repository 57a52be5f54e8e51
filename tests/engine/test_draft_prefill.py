"""The draft leaves out the prompt tokens whose KV nobody reads, and drafts as well as before."""

import random

import pytest

from tests.support.engine import Engine, engine, windowed

pytestmark = [pytest.mark.engine, pytest.mark.v2]

K, W, S, CHUNK, MAX_TOKENS = 3, 256, 64, 512, 24
ENGINE = {"max_num_batched_tokens": CHUNK}


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(4, 256) for _ in range(length)]


def rows(running: Engine) -> tuple[int, int]:
    """Rows that the draft ran on besides its draft steps, and those that it left out."""
    skipping = running.proposer.propose
    return skipping.num_rows_run, skipping.num_rows_skipped


def test_of_a_long_prompt_only_sink_window_and_two_chunks_are_run(tiny_model, runner):
    length = 32_000 if runner == "V1" else 6_000
    chunk = 4096 if runner == "V1" else CHUNK
    sizes = {
        "max_num_batched_tokens": chunk,
        "max_model_len": 33_000,
        "kv_cache_memory_bytes": 600 << 20,
        "max_num_seqs": 2,
    }
    with engine(
        tiny_model("dense", layers=1), windowed(K, W, S), **ENGINE | sizes, dtype="bfloat16"
    ) as running:
        running.generate([prompt(length)], 1)
        run, skipped = rows(running)
    print(f"{length} prompt tokens: the draft ran on {run}", end=" ")
    assert run + skipped == length
    assert run <= S + W + 2 * chunk


@pytest.fixture(scope="module")
def batches() -> list[list[list[int]]]:
    """One prompt alone; then prompts of all lengths that meet in mixed batches."""
    lengths = [1, 40, 63, 64, 65, 300, CHUNK, CHUNK + 1, 900, 1300, 2000, 2600]
    return [[prompt(3000)], [prompt(n, seed) for seed, n in enumerate(lengths)]]


def answers(running: Engine, batches: list[list[list[int]]]) -> list[list[list[int]]]:
    return [running.generate(batch, MAX_TOKENS) for batch in batches]


@pytest.mark.parametrize(
    ("window", "sink"), [pytest.param(W, S, marks=pytest.mark.next), (96, 0), (600, 100)]
)
def test_output_is_plain_decodings_and_acceptance_that_of_a_full_draft_prefill(
    tiny_model, batches, window, sink
):
    model = tiny_model("dense")
    with engine(model, **ENGINE) as running:
        plain = answers(running, batches)
    acceptance = {}
    for draft_prefill in ("full", "auto"):
        config = windowed(K, window, sink, draft_prefill=draft_prefill)
        with engine(model, config, **ENGINE) as running:
            assert answers(running, batches) == plain
            acceptance[draft_prefill] = running.acceptance_length()
            if draft_prefill == "auto":
                run, skipped = rows(running)
                assert skipped > 0.3 * run
    print(f"AL {acceptance}", end=" ")
    assert acceptance["auto"] >= 0.98 * acceptance["full"] > 1.7


def test_unpadded_drafting_knows_the_same_prompts(tiny_model, runner):
    """On V1 it comes after the sampled tokens were booked, which then look like the prompt's."""
    if runner == "V2":
        pytest.skip("V2 has no unpadded drafting")
    last_in_block = [prompt(n) for n in (2015, 2047, 2016, 2048)]
    acceptance = {}
    for draft_prefill in ("full", "auto"):
        config = windowed(K, W, S, draft_prefill=draft_prefill, disable_padded_drafter_batch=True)
        with engine(tiny_model("dense"), config, **ENGINE) as running:
            running.generate(last_in_block, MAX_TOKENS)
            acceptance[draft_prefill] = running.acceptance_length()
    assert acceptance["auto"] == acceptance["full"]


def test_a_draft_that_leaves_out_too_much_is_caught(tiny_model, batches, monkeypatch):
    """Negative control: the comparison of acceptance fails where a part of the window is left out."""
    from wmtp_vllm.window import Window

    unread_blocks = Window.unread_blocks

    def too_many(window: Window, prefill_len: int) -> range:
        unread = unread_blocks(window, prefill_len)
        return range(unread.start, max(unread.start, unread.stop + W // window.block_size - 1))

    acceptance = []
    for rule in (unread_blocks, too_many):
        monkeypatch.setattr(Window, "unread_blocks", rule)
        with engine(tiny_model("dense"), windowed(K, W, S), **ENGINE) as running:
            running.generate([prompt(n) for n in (2000, 2600, 3000)], 12)
            acceptance.append(running.acceptance_length())
    assert acceptance[1] < 0.98 * acceptance[0]
