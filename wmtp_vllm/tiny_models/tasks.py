"""Tasks that are solved by looking back: needles to be listed, and passages to be repeated.

The words are random syllables, so nothing but the source says what comes next. The trained model
learns on these, and its acceptance on them tells whether the draft sees the source. What a task says
depends on its arguments alone, on every machine.
"""

from collections.abc import Callable
from dataclasses import dataclass

from wmtp_vllm.bench.workloads import Chance

KEY_SYLLABLES, VALUE_SYLLABLES, WORD_SYLLABLES = 2, 6, (1, 5)


@dataclass(frozen=True)
class Recall:
    """A text of three parts, with whatever else between the first and the second."""

    source: str
    question: str
    answer: str


def needles(chance: Chance, lines: int) -> Recall:
    """`lines` lines of a key and its value, then the keys in another order, to be answered."""
    keys = chance.words(lines, KEY_SYLLABLES)
    values = dict(zip(keys, chance.words(lines, VALUE_SYLLABLES), strict=True))
    asked = chance.shuffled(keys)
    return Recall(
        "\n" + "".join(f"{key} = {values[key]}\n" for key in keys),
        "\n? " + " ".join(asked) + "\n",
        "".join(f"{key} = {values[key]}\n" for key in asked),
    )


def copy(chance: Chance, lines: int) -> Recall:
    """A passage of `lines` lines of six words, to be repeated."""
    shortest, longest = WORD_SYLLABLES

    def word() -> str:
        return chance.words(1, shortest + chance.below(longest - shortest))[0]

    passage = "".join(" ".join(word() for _ in range(6)) + "\n" for _ in range(lines))
    return Recall("\ncopy:\n" + passage, "\ncopy:\n", passage)


TASKS: dict[str, Callable[[Chance, int], Recall]] = {"needles": needles, "copy": copy}
