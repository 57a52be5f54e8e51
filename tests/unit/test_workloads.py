"""Inputs of the benchmark: of the length that was asked for, the same forever, and answerable."""

import hashlib
import re
from collections import Counter

import pytest

from wmtp_vllm.bench.workloads import NUM_FREQUENT, TASKS, Chance, make

pytestmark = pytest.mark.unit

CHECKSUMS = {
    ("niah_multiquery", 4_000, 0): "a93d462ac3e97685",
    ("niah_multiquery", 100_000, 1): "41a93841a9d47478",
    ("common_words", 4_000, 0): "72fd14617cadfa5b",
    ("common_words", 100_000, 1): "65cf8346aefaf1f8",
    ("frequent_words", 4_000, 0): "c5ba29d61a112468",
    ("frequent_words", 100_000, 1): "a2003cea95e67853",
    ("variable_tracking", 4_000, 0): "81b238683f61d4ef",
    ("variable_tracking", 100_000, 1): "3ddf08b68cb01cb8",
}
"""Of the prompt and the answer, by task, tokens (four characters each) and seed."""


def count(text: str) -> int:
    return len(text) // 4


def checksum(task: str, tokens: int, seed: int) -> str:
    sample = make(task, tokens, seed, count)
    return hashlib.sha256("\n".join([sample.prompt, *sample.answer]).encode()).hexdigest()[:16]


@pytest.mark.parametrize("key", CHECKSUMS, ids=str)
def test_a_sample_is_the_same_bytes_on_every_machine(key):
    assert checksum(*key) == CHECKSUMS[key]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokens", [2_500, 10_000, 50_000])
def test_it_has_at_most_the_tokens_asked_for_and_one_unit_more_would_not_fit(task, tokens):
    prompt = make(task, tokens, 7, count).prompt
    assert tokens - 60 <= count(prompt) <= tokens


@pytest.mark.parametrize("task", TASKS)
def test_another_seed_is_another_text(task):
    assert make(task, 4000, 0, count) != make(task, 4000, 1, count)


def test_too_few_tokens_and_unknown_tasks_are_refused_with_what_is_needed():
    with pytest.raises(ValueError, match=r"niah_multiquery takes at least \d+ tokens; 100 were"):
        make("niah_multiquery", 100, 0, count)
    with pytest.raises(ValueError, match="unknown task 'nope'; known are niah_multiquery"):
        make("nope", 100, 0, count)


def test_every_needle_asked_for_is_in_the_text_once():
    sample = make("niah_multiquery", 20_000, 3, count)
    found = dict(re.findall(r"magic numbers for (\w+) is: (\d+)\.", sample.prompt))
    asked = re.search(r"numbers for ([\w, ]+) mentioned", sample.prompt)
    assert asked is not None
    assert [found[key] for key in asked[1].split(", ")] == sample.answer
    assert len(found) == len(sample.answer) == 48


def test_the_common_words_are_the_most_common():
    sample = make("common_words", 20_000, 3, count)
    words = Counter(re.findall(r"\d+\. (\w+)", sample.prompt))
    assert {word for word, _ in words.most_common(10)} == set(sample.answer)


def test_the_frequent_words_are_ranked_without_ties():
    sample = make("frequent_words", 20_000, 3, count)
    counts = Counter(sample.prompt.splitlines()[1].split())
    assert [word for word, _ in counts.most_common(NUM_FREQUENT)] == sample.answer
    ranked = [n for _, n in counts.most_common(NUM_FREQUENT + 1)]
    assert len(set(ranked)) == len(ranked)


def test_the_chain_asked_for_follows_from_the_assignments():
    sample = make("variable_tracking", 20_000, 3, count)
    value = re.search(r"assigned the value (\d+)", sample.prompt)
    assert value is not None
    holds: dict[str, str] = {}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", sample.prompt):
        holds[name] = holds.get(source, source)
    assert [name for name, held in holds.items() if held == value[1]] == sample.answer


def test_chance_is_even():
    chance = Chance("even")
    drawn = Counter(chance.below(10) for _ in range(20_000))
    assert all(1800 < n < 2200 for n in drawn.values())
