"""What a router sees of a stream that passes through it: where events end, how far the answer is, whether it is whole.

Nothing is decoded while it passes: events are counted, and a response's own counts are read from its end.
"""

from __future__ import annotations

import re

EVENT_END = b"\n\n"
DONE = b"data: [DONE]\n\n"
MOST_HELD_BYTES = 2**22
"""Of one event; what is longer passes in pieces."""
TAIL_BYTES = 4096
"""Of the end of an answer, which has its counts."""
_COUNTS = re.compile(rb'"verify_steps":\s*(\d+),\s*"accepted_tokens":\s*(\d+)')


class WholeEvents:
    """Lets pass whole events only, so that an answer that is cut can end with an event that says so.

    events: how many have passed. done: whether the last one did, after which nothing is missing.
    """

    def __init__(self) -> None:
        self.events = 0
        self.done = False
        self.tail = b""
        self._rest = b""

    def feed(self, part: bytes) -> bytes:
        """What may pass now."""
        part = self._rest + part if self._rest else part
        end = part.rfind(EVENT_END) + len(EVENT_END)
        if end < len(EVENT_END):
            end = 0 if len(part) <= MOST_HELD_BYTES else len(part)
        passed, self._rest = part[:end], part[end:]
        if passed:
            self.events += passed.count(EVENT_END)
            self.done = passed.endswith(DONE)
            self.tail = (self.tail + passed)[-TAIL_BYTES:]
        return passed

    def rest(self) -> bytes:
        """What was held back, for an answer that ended as it should."""
        rest, self._rest = self._rest, b""
        return rest


def counts_of(tail: bytes) -> tuple[int, int] | None:
    """Output tokens and verifications, as the end of an answer of this package's servers has them; None: it has not."""
    found = _COUNTS.findall(tail)
    if not found:
        return None
    steps, accepted = map(int, found[-1])
    return steps + accepted, steps
