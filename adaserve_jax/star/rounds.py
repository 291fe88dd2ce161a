"""One round: what a step asked of the draft services, and what became of it until it stopped waiting."""

from __future__ import annotations

from collections.abc import Iterable

from adaserve_jax.star.answers import Answer, Asked
from adaserve_jax.star.messages import Tree


class Round:
    """Asked trees by session, those that are still waited for and those that came; changed with the drafter's lock.

    again: those whose session has to be opened anew first. last_s: when the last tree came, on the clock. known: places
    that said anything of what they were asked, were it a refusal; garbled: those that said what cannot be read; lost:
    those whose stream ended meanwhile. empty: trees that came without nodes.
    """

    def __init__(self) -> None:
        self.pending: dict[int, Asked] = {}
        self.answers: list[Answer] = []
        self.again: list[Asked] = []
        self.places: set[int] = set()
        self.known: set[int] = set()
        self.garbled: set[int] = set()
        self.lost: set[int] = set()
        self.empty = 0
        self.last_s = 0.0
        self._reopened: set[int] = set()

    @property
    def waits(self) -> bool:
        """Whether a tree may still come, and nothing has to be sent first."""
        return bool(self.pending) and not self.again

    def ask(self, asked: Asked) -> None:
        self.pending[asked.session] = asked
        self.places.add(asked.place)

    def take(self, place: int, tree: Tree, now: float) -> bool:
        """Whether the tree, which came from that place, was waited for; then it is kept, unless it is empty."""
        asked = self.pending.get(tree.session)
        if asked is None or asked.place != place or not asked.is_answered_by(tree):
            return False
        del self.pending[tree.session]
        self.known.add(place)
        if not len(tree.index):
            self.empty += 1
            return True
        self.answers.append((asked, tree))
        self.last_s = now
        return True

    def give_up(self, session: int, *, again: bool = False) -> None:
        """Wait no longer for a session's tree, since its service said that there will be none. again: unless the
        session is opened anew, which is done once in a round."""
        asked = self.pending.pop(session, None)
        if asked is None:
            return
        self.known.add(asked.place)
        if again and session not in self._reopened:
            self._reopened.add(session)
            self.again.append(asked)

    def spoil(self, session: int) -> None:
        """What came for a session cannot be read: no tree of it comes any more."""
        asked = self.pending.pop(session, None)
        if asked is not None:
            self.garbled.add(asked.place)

    def lose(self, place: int) -> None:
        """That place's stream has ended."""
        for session in [session for session, asked in self.pending.items() if asked.place == place]:
            del self.pending[session]
        self.again = [asked for asked in self.again if asked.place != place]
        if place in self.places:
            self.lost.add(place)

    def judged(self, invalid: Iterable[Asked]) -> tuple[set[int], set[int]]:
        """Places that brought a tree that makes sense, and those that brought nothing, though their stream stood."""
        unsound = {id(asked) for asked in invalid}
        good = {asked.place for asked, _ in self.answers if id(asked) not in unsound}
        garbled = self.garbled | {asked.place for asked, _ in self.answers if id(asked) in unsound}
        return good, (self.places - good - self.lost) & ((self.places - self.known) | garbled)
