"""Text that every machine with Python has: the standard library's sources, and its language topics.

Both are under the PSF licence. What is held out from training is decided by a document's name alone,
so a document that was held out is held out under every version of Python.
"""

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Literal

from wmtp_vllm.bench.workloads import Chance

Part = Literal["training", "held-out"]
NOT_TEXT = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages"}
"""Folders that are no part of the library, that not every machine has, or that are tables."""
OF_THE_MACHINE = ("config-", "_sysconfigdata")
"""What names of files and folders begin with that say how this Python was built."""
TOPICS = "pydoc_data/topics.py"
HELD_OUT_SHARE = 16
"""One document in so many is held out."""


def is_held_out(name: str) -> bool:
    """Whether the document of this name is never trained on."""
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_SHARE == 0


@cache
def documents(part: Part) -> dict[str, str]:
    """The texts of one part of the split, by name, in printable ASCII.

    A name is a source's path in the library, or that of the topics with ":" and the topic.
    """
    root = Path(os.__file__).parent
    found = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name != TOPICS and _is_library(name):
            found[name] = path.read_text(encoding="utf-8", errors="ignore")
    from pydoc_data.topics import topics

    found |= {f"{TOPICS}:{topic}": text for topic, text in sorted(topics.items())}
    return {
        name: printable(text)
        for name, text in found.items()
        if is_held_out(name) == (part == "held-out")
    }


def _is_library(name: str) -> bool:
    parts = name.split("/")
    return not NOT_TEXT & set(parts) and not any(part.startswith(OF_THE_MACHINE) for part in parts)


def printable(text: str) -> str:
    """What of a text the tiny models' tokenizer has tokens for."""
    return "".join(c for c in text.expandtabs() if c == "\n" or " " <= c <= "~")


class Corpus:
    """Passages of one part of the split.

    Args:
        part: "training" or "held-out".
        english: share of the passages that is prose; the rest is source code.
    """

    def __init__(self, part: Part, english: float = 0.25) -> None:
        texts = documents(part)
        prose = [text for name, text in texts.items() if name.startswith(TOPICS)]
        code = [text for name, text in texts.items() if not name.startswith(TOPICS)]
        self.english = english
        self.streams = ("\n".join(prose), "\n".join(code))

    def passage(self, chance: Chance, length: int) -> str:
        """Running text of `length` characters that starts with a line.

        Raises:
            ValueError: the part has no text of that length.
        """
        stream = self.streams[chance.random() >= self.english]
        room = len(stream) - length
        if room < 0:
            raise ValueError(f"no running text of {length} characters; {len(stream)} at most")
        start = stream.find("\n", chance.below(room + 1)) + 1
        start = min(start, room)  # the last passages start within a line
        return stream[start : start + length]
