"""Where the window and the sink are, told by a model whose acceptance says what its draft sees.

The induction model continues a text by copying, and its draft is right exactly while the KV of the
copy source is visible to it: AL is K + 1 then, and 1 otherwise.
"""

import random

import pytest

from tests.support.engine import engine, windowed

pytestmark = [pytest.mark.engine, pytest.mark.v2]

K, W, BLOCK = 7, 256, 32
TAIL = 16  # tokens of the text that the prompt repeats


def copy_prompt(distance: int, seed: int = 0, before: int = 0) -> list[int]:
    """Random tokens and the first `TAIL` of them again: the copy source is `distance` back."""
    rng = random.Random(seed + 1000 * distance)
    text = [rng.randrange(4, 256) for _ in range(distance)]
    return [rng.randrange(4, 256) for _ in range(before)] + text + text[:TAIL]


@pytest.fixture(scope="module")
def no_sink(tiny_model):
    with engine(tiny_model("induction"), windowed(K, W, 0), max_num_seqs=2) as running:
        yield running


@pytest.fixture(scope="module")
def with_sink(tiny_model):
    with engine(tiny_model("induction"), windowed(K, W, 128), max_num_seqs=2) as running:
        yield running


def acceptance(running, distance: int, before: int = 0, max_tokens: int = 24) -> float:
    prompt = copy_prompt(distance, before=before)
    source = prompt[before : before + distance]
    [answer] = running.generate([prompt], max_tokens)
    expected = (source * (2 + max_tokens // distance))[TAIL : TAIL + max_tokens]
    assert answer == expected, "the target itself copies, whatever the draft sees"
    return running.acceptance_length()


@pytest.mark.parametrize("distance", [40, 129, 255, W])
def test_the_whole_window_is_visible(no_sink, distance):
    assert acceptance(no_sink, distance, before=400) == 8.0
