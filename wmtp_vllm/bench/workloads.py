"""Long inputs in the manner of RULER (arXiv 2404.06654), at any length and for any tokenizer.

Four of its families, written from the paper's description: needles that are asked for many at a time,
common words, frequent words, and variables to track. The answers are enumerated, so that there is
much to generate. A sample depends on task, length, seed and tokenizer alone: all chance comes from
`random.Random.random`, the one method whose sequence Python keeps from version to version.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Count = Callable[[str], int]
"""Tokens of a text."""


@dataclass(frozen=True)
class Sample:
    """A prompt, and what a right answer lists."""

    prompt: str
    answer: list[str]


class Chance:
    """Random choices of a seed."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed).random

    def below(self, n: int) -> int:
        return int(self.random() * n)

    def choice(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]

    def shuffled(self, values: Sequence[T]) -> list[T]:
        shuffled = list(values)
        for i in range(len(shuffled) - 1, 0, -1):
            j = self.below(i + 1)
            shuffled[i], shuffled[j] = shuffled[j], shuffled[i]
        return shuffled

    def number(self, digits: int) -> str:
        return str(10 ** (digits - 1) + self.below(9 * 10 ** (digits - 1)))

    def words(self, n: int, syllables: int) -> list[str]:
        """`n` different words that are in no dictionary."""
        words: dict[str, None] = {}
        while len(words) < n:
            parts = (self.choice("bdfgklmnprstvz") + self.choice("aeiou") for _ in range(syllables))
            words["".join(parts)] = None
        return list(words)


HAYSTACK = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
NUM_NEEDLES = 48
NUM_COMMON, COMMON_TIMES, UNCOMMON_TIMES = 10, 30, 3
NUM_FREQUENT, ZETA_ALPHA = 30, 2.0
NUM_CHAINS, CHAIN_LENGTH = 4, 8


def _scatter(chance: Chance, sentences: Sequence[str], size: int) -> str:
    """The sentences in their order, at random places in a haystack of `size` sentences."""
    places = sorted(chance.below(size + 1) for _ in sentences)
    text, position = [], 0
    for place, sentence in zip(places, sentences, strict=True):
        text += [HAYSTACK[i % len(HAYSTACK)] for i in range(position, place)]
        text.append(sentence)
        position = place
    text += [HAYSTACK[i % len(HAYSTACK)] for i in range(position, size)]
    return " ".join(text)


def niah_multiquery(chance: Chance, size: int) -> Sample:
    """Needles in a haystack of `size` sentences, all asked for."""
    keys = chance.words(NUM_NEEDLES, 3)
    numbers = [chance.number(7) for _ in keys]
    needles = [
        f"One of the special magic numbers for {key} is: {number}."
        for key, number in zip(keys, numbers, strict=True)
    ]
    asked = chance.shuffled(range(NUM_NEEDLES))
    text = _scatter(chance, needles, size)
    return Sample(
        "Some special magic numbers are hidden within the following text. Memorise them; you will be "
        f"asked about all of them afterwards.\n{text}\n"
        f"What are the special magic numbers for {', '.join(keys[i] for i in asked)} mentioned in the "
        "provided text? List them in this order, one in a line, numbered.\n1.",
        [numbers[i] for i in asked],
    )


def common_words(chance: Chance, size: int) -> Sample:
    """A list in which ten words stand 30 times each, and `size` others three times."""
    words = chance.words(NUM_COMMON + size, 3)
    common, others = words[:NUM_COMMON], words[NUM_COMMON:]
    listed = chance.shuffled(common * COMMON_TIMES + others * UNCOMMON_TIMES)
    numbered = " ".join(f"{i}. {word}" for i, word in enumerate(listed, start=1))
    return Sample(
        "Below is a numbered list of words. Some of them appear more often than others. Memorise the "
        f"ones that appear most often.\n{numbered}\n"
        f"What are the {NUM_COMMON} most common words in the above list? List them, one in a line, "
        "numbered.\n1.",
        common,
    )


def frequent_words(chance: Chance, size: int) -> Sample:
    """A coded text of about `size` words whose frequencies fall as a power of their rank."""
    words = chance.words(NUM_FREQUENT * 4, 3)
    weights = [(rank + 1) ** -ZETA_ALPHA for rank in range(len(words))]
    # Each word as often as its weight says and not drawn, so that the ranking is certain.
    times = [
        round(size * weight / sum(weights)) + max(0, NUM_FREQUENT - rank)
        for rank, weight in enumerate(weights)
    ]
    text = [word for word, n in zip(words, times, strict=True) for _ in range(n)]
    return Sample(
        "Read the following coded text and track the frequency of each coded word.\n"
        f"{' '.join(chance.shuffled(text))}\n"
        f"What are the {NUM_FREQUENT} most frequently appearing words in the above coded text? List "
        "them from the most frequent on, one in a line, numbered.\n1.",
        words[:NUM_FREQUENT],
    )


def variable_tracking(chance: Chance, size: int) -> Sample:
    """Chains of assignments in a haystack of `size` sentences; one chain is asked for."""
    names = [word.upper() for word in chance.words(NUM_CHAINS * CHAIN_LENGTH, 2)]
    chains = [names[i * CHAIN_LENGTH : (i + 1) * CHAIN_LENGTH] for i in range(NUM_CHAINS)]
    values = [chance.number(5) for _ in chains]
    # One chain's assignments stay in their order; the chains are interleaved.
    statements: list[str] = []
    left = [
        [f"VAR {c[0]} = {v}"] + [f"VAR {b} = VAR {a}" for a, b in itertools.pairwise(c)]
        for c, v in zip(chains, values, strict=True)
    ]
    while any(left):
        statements.append(chance.choice([chain for chain in left if chain]).pop(0))
    return Sample(
        "Memorise and track the chains of variable assignment hidden in the following text.\n"
        f"{_scatter(chance, [f'{s}.' for s in statements], size)}\n"
        f"Find all variables that are assigned the value {values[0]} in the text above, directly or "
        "through others. List them, one in a line, numbered.\n1.",
        chains[0],
    )


TASKS: dict[str, Callable[[Chance, int], Sample]] = {
    "niah_multiquery": niah_multiquery,
    "common_words": common_words,
    "frequent_words": frequent_words,
    "variable_tracking": variable_tracking,
}


def make(task: str, num_tokens: int, seed: int, count: Count) -> Sample:
    """The longest sample of a task that has at most `num_tokens` tokens.

    Args:
        task: one of `TASKS`.
        num_tokens: most tokens of the prompt.
        seed: of all that is random in it.
        count: tokens of a text, by the tokenizer at hand.

    Raises:
        ValueError: the task is unknown, or what it asks for alone takes more tokens.

    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; known are {', '.join(TASKS)}")

    def sample(size: int) -> Sample:
        return TASKS[task](Chance(f"{task} {seed}"), size)

    least = count(sample(0).prompt)
    if least > num_tokens:
        raise ValueError(f"{task} takes at least {least} tokens; {num_tokens} were asked for")
    # Length grows with size, all but evenly: close in from both sides.
    low, low_tokens = 0, least
    high, high_tokens = 1, count(sample(1).prompt)
    while high_tokens <= num_tokens:
        per_unit = max(1e-9, (high_tokens - least) / high)
        low, low_tokens = high, high_tokens
        high = max(high + 1, min(4 * high + 64, int((num_tokens - least) / per_unit * 1.02) + 1))
        high_tokens = count(sample(high).prompt)
    while high - low > 1:
        slope = (num_tokens - low_tokens) / max(1, high_tokens - low_tokens)
        middle = min(high - 1, max(low + 1, low + int((high - low) * slope)))
        tokens = count(sample(middle).prompt)
        if tokens <= num_tokens:
            low, low_tokens = middle, tokens
        else:
            high, high_tokens = middle, tokens
    return sample(low)
