"""Turns: engines that stay up beside each other and work one after the other, some steps each.

A machine that is shared changes its speed by a third from one minute to the next. What it does to one
arm within a second it does to the others.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from wmtp_vllm import child

GO = b"!"
MORE, DONE, ENDED = b"+", b".", b""
"""What a child says at the end of its turn: it is within an answer; after one; it says nothing more."""


class Turns:
    """The child's side.

    Args:
        go: descriptor from which it reads that its turn has come; None: it is always its turn.
        said: descriptor to which it writes how its turn ended.

    """

    def __init__(self, go: int | None = None, said: int | None = None) -> None:
        self._go, self._said = go, said
        self._wait()

    @property
    def are_taken(self) -> bool:
        """Whether there are others."""
        return self._go is not None

    def pass_on(self, within_an_answer: bool) -> None:
        """Let the others work, and return when the turn has come again.

        Raises:
            EOFError: it never will; the parent has ended.

        """
        if self._said is not None:
            os.write(self._said, MORE if within_an_answer else DONE)
            self._wait()

    def _wait(self) -> None:
        if self._go is not None and os.read(self._go, 1) != GO:
            raise EOFError("the process that gives the turns has ended")


class _Player:
    """A child as its parent sees it."""

    def __init__(self, go: int, said: int) -> None:
        self._go, self._said = go, said
        self.has_ended = False

    def is_within_an_answer(self) -> bool:
        """Whether it still is after one turn more, which this gives it."""
        try:
            os.write(self._go, GO)
            said = os.read(self._said, 1)
        except BrokenPipeError:
            said = ENDED
        self.has_ended = said == ENDED
        return said == MORE


def play(module: str, requests: Iterable[dict[str, Any]]) -> list[Any]:
    """Run `python -m module` for each request, all at once; each gets the descriptors "turns".

    All work at the same answer: who is through with it waits for the others.

    Raises:
        ChildFailed: one ended with an error.

    """
    with ExitStack() as stack:
        games = [stack.enter_context(_seated(module, request)) for request in requests]
        players = [player for player, _ in games]
        while players:
            answering = players
            while answering:
                answering = [player for player in answering if player.is_within_an_answer()]
            players = [player for player in players if not player.has_ended]
        return [result() for _, result in games]


@contextmanager
def _seated(module: str, request: dict[str, Any]) -> Iterator[tuple[_Player, Any]]:
    child_go, go = os.pipe()
    said, child_said = os.pipe()
    theirs = (child_go, child_said)
    try:
        with child.started(module, request | {"turns": theirs}, pass_fds=theirs) as result:
            # Else the pipes would stay open when the child has ended.
            for descriptor in theirs:
                os.close(descriptor)
            yield _Player(go, said), result
    finally:
        os.close(go)
        os.close(said)
