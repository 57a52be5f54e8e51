"""Log lines about things that go on all the time, now and then."""

import time


class Pace:
    """Says when the next line is due: at once, and then no sooner than after so many seconds."""

    def __init__(self, seconds: float = 10.0) -> None:
        self.seconds = seconds
        self._next = 0.0

    def is_due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self.seconds
        return True
