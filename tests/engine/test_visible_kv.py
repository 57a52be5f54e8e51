"""Where the window and the sink are, told by a model whose acceptance says what its draft sees.

The induction model continues a text by copying, and its draft is right exactly while its KV of the
copy source is visible: AL is K + 1 = 8 then, and 1 otherwise. A prompt is some random tokens before,
a random text, and that text's first tokens again, so the source lies one text's length back.
"""

import random
from collections.abc import Iterable

import pytest

from tests.support.engine import Engine, engine, windowed

pytestmark = [pytest.mark.engine, pytest.mark.v2, pytest.mark.next]

K, W, S, BLOCK = 7, 256, 128, 32
REPEATED = 16  # tokens of the text that the prompt repeats
MAX_TOKENS = 17  # the prefill's, and two steps' where all drafts are right
# Tokens where no draft is right but the first, which the prefill makes: its chunk sees all of itself.
FEW = 14
ALIGNMENTS = range(BLOCK + 1)
# A step with too little room for a batch's drafts verifies fewer of them.
ROOMY = {"max_num_batched_tokens": 4096}


@pytest.fixture(scope="module")
def no_sink(tiny_model):
    with engine(tiny_model("induction"), windowed(K, W, 0), **ROOMY) as running:
        yield running


@pytest.fixture(scope="module")
def with_sink(tiny_model):
    with engine(tiny_model("induction"), windowed(K, W, S), **ROOMY) as running:
        yield running


def acceptance_length(
    running: Engine, prompts: Iterable[tuple[int, int]], max_tokens: int = MAX_TOKENS
) -> float:
    """AL over prompts of (tokens before the text, tokens of the text), whose answers are checked."""
    texts, full = [], []
    for before, distance in prompts:
        rng = random.Random(before * 10_007 + distance)
        text = [rng.randrange(4, 256) for _ in range(distance)]
        texts.append(text)
        full.append([rng.randrange(4, 256) for _ in range(before)] + text + text[:REPEATED])
    answers = running.generate(full, max_tokens)
    for text, answer in zip(texts, answers, strict=True):
        copied = (text * (2 + max_tokens // len(text)))[REPEATED : REPEATED + max_tokens]
        assert answer == copied, "the target copies, whatever its draft sees"
    return running.acceptance_length()


def test_every_distance_up_to_the_window_is_visible(no_sink, runner):
    distances = range(24, W + 1) if runner == "V1" else [24, 64, 129, 200, W - 1, W]
    assert acceptance_length(no_sink, ((3 * BLOCK, d) for d in distances)) == 8.0


def test_the_whole_window_is_visible_at_every_alignment_to_the_blocks(no_sink):
    assert acceptance_length(no_sink, ((before, W) for before in ALIGNMENTS)) == 8.0


def test_nothing_two_blocks_behind_the_window_is_visible_at_any_alignment(no_sink):
    beyond = ((before, W + 2 * BLOCK) for before in ALIGNMENTS)
    assert acceptance_length(no_sink, beyond, max_tokens=FEW) <= 1.1


def test_the_sink_is_visible_at_every_distance_and_alignment(with_sink):
    beyond = W + S + 2 * BLOCK
    distances = [*(beyond + i for i in ALIGNMENTS), 1000, 3001]
    assert acceptance_length(with_sink, ((0, d) for d in distances)) == 8.0


def test_the_gap_between_sink_and_window_is_not_visible(with_sink):
    # The source begins behind the sink and ends two blocks before the window.
    beyond = [(S, W + 2 * BLOCK), (S + 7, 600), (700, 900)]
    assert acceptance_length(with_sink, beyond, max_tokens=FEW) <= 1.1


def test_a_window_one_block_short_is_caught(tiny_model):
    """Negative control: the assertion of the whole window fails on a window that begins later."""
    with engine(tiny_model("induction"), windowed(K, W - BLOCK, 0), **ROOMY) as short:
        misses = ((before, W) for before in ALIGNMENTS)
        assert acceptance_length(short, misses, max_tokens=FEW) < 5.0


def test_the_full_draft_kv_is_read_through_the_same_window(tiny_model):
    config = windowed(K, W, S, draft_kv_cache="full")
    with engine(tiny_model("induction"), config, **ROOMY) as running:
        assert acceptance_length(running, ((before, W) for before in (0, 13, 31))) == 8.0
        assert acceptance_length(running, [(0, 600), (0, 1000)]) == 8.0
        assert acceptance_length(running, [(S, W + 2 * BLOCK)], max_tokens=FEW) <= 1.1
