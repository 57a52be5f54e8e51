"""Prompts that the trained model has never seen, as text or as the file that a benchmark reads.

    python -m wmtp_vllm.tiny_models.heldout --kind copy --length 4000 --count 8 --out prompts.jsonl

Each line is `{"prompt": "..."}`, the format of vLLM's `custom` benchmark dataset.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from wmtp_vllm.bench.workloads import Chance
from wmtp_vllm.tiny_models.tasks import TASKS
from wmtp_vllm.tiny_models.texts import Corpus

KINDS = ("text", *TASKS)
LINES = 8
"""Lines of a task: about 170 tokens to answer with."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, and what the rest of it is: of a task its answer, of a text how it goes on."""

    prompt: str
    answer: str


def make(kind: str, length: int, seed: int, distance: int | None = None) -> Prompt:
    """A prompt of `length` characters: the same for the same arguments and version of Python.

    Args:
        kind: "text", "needles" or "copy".
        length: characters of the prompt, each one byte.
        seed: of all that is random in it.
        distance: of a task, characters from the start of the source to the end of the prompt; half
            of `length` where not given. A text has none.

    Raises:
        ValueError: the kind is unknown, or the source does not fit in `distance`, or `distance` in
            `length`, or there is no held-out text as long.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; known are {', '.join(KINDS)}")
    chance, corpus = Chance(f"held-out {kind} {seed}"), Corpus("held-out")
    if kind == "text":
        if distance is not None:
            raise ValueError("a text has no source to be at a distance")
        text = corpus.passage(chance, 2 * length)
        return Prompt(text[:length], text[length:])
    recall = TASKS[kind](chance, LINES)
    distance = length // 2 if distance is None else distance
    least = len(recall.source) + len(recall.question)
    if not least <= distance <= length:
        raise ValueError(
            f"{kind}: the distance must be from {least} to the length, {length}, not {distance}"
        )
    before = corpus.passage(chance, length - distance)
    between = corpus.passage(chance, distance - least)
    return Prompt(before + recall.source + between + recall.question, recall.answer)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m wmtp_vllm.tiny_models.heldout",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--length", type=int, required=True, help="bytes of each prompt")
    parser.add_argument("--distance", type=int, help="bytes from the source on; default half")
    parser.add_argument("--count", type=int, default=8, help="prompts (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next has the next")
    parser.add_argument("--out", type=Path, required=True)
    parsed = parser.parse_args(arguments)
    try:
        prompts = [
            make(parsed.kind, parsed.length, parsed.seed + i, parsed.distance).prompt
            for i in range(parsed.count)
        ]
    except ValueError as error:
        parser.error(str(error))
    lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    parsed.out.write_text(lines, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
