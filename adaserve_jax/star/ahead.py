"""Drafting ahead: while a target verifies its tree, the tree that it will probably ask for next, if nobody else waits.

No thread, clock or device: which text is guessed and whether that is worth its time. Guesses are held against texts by
session.py, answers are core.py's. Nothing here changes a tree: what is made ahead is searched as any other, for the
text that was guessed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from adaserve_jax.star.counters import CoreStats
from adaserve_jax.star.dispatch import Batch, BatchRow
from adaserve_jax.star.guess import Found, Guess
from adaserve_jax.star.limits import Expected
from adaserve_jax.star.messages import Draft
from adaserve_jax.star.room import Keeper
from adaserve_jax.star.session import Session

RATE = 0.1
"""Weight of a new measurement in its moving average."""
FADE = 0.998
"""What is left, after each guess that was not worth it, of the measured delay, and of how much less than a search hits
saved: or nothing would be measured again."""


class Worth:
    """Whether a guess is worth its time: its chance times what a hit saves, against what a batch ahead makes others
    wait. Both in seconds of a target's step, as measured; work ahead in time that nobody wants is free."""

    def __init__(self) -> None:
        self.search_s = 0.0
        """Of a batch that searches for who waits."""
        self.saved_s = 0.0
        """By a hit."""
        self.delay_s = 0.0
        """That Drafts waited for a batch ahead, of each such batch."""
        self._searches = self._hits = self._batches = 0
        self._span = 0.0, 0.0
        self._delayed_s: float | None = None

    def pays(self, chance: float, batches: int) -> bool:
        """Whether to go on with a guess of that chance, which takes so many batches more."""
        saved_s = self.saved_s if self._hits else self.search_s
        if chance * saved_s >= batches * self.delay_s:
            return True
        self.delay_s *= FADE
        self.saved_s += (self.search_s - self.saved_s) * (1.0 - FADE)
        return False

    def searched(self, seconds: float) -> None:
        """A batch for who waited took so long."""
        self._searches += 1
        self.search_s += (seconds - self.search_s) * max(RATE, 1.0 / self._searches)

    def ran(self, started_s: float, ended_s: float) -> None:
        """A batch ahead ran. What it delayed is heard of afterwards, until the next one has run."""
        if self._delayed_s is not None:
            self._batches += 1
            self.delay_s += (self._delayed_s - self.delay_s) * max(RATE, 1.0 / self._batches)
        self._span, self._delayed_s = (started_s, ended_s), 0.0

    def asked(self, came_s: float, rows: int, hits: int, share: float) -> None:
        """A frame with so many Drafts came, of which so many had trees made ahead; share: of a batch of them all that
        the others need."""
        started_s, ended_s = self._span
        if rows and started_s <= came_s < ended_s and self._delayed_s is not None:
            self._delayed_s += ended_s - came_s
        if hits:
            self._hits += 1
            self.saved_s += (self.search_s * (1.0 - share) - self.saved_s) * max(RATE, 1.0 / self._hits)


@dataclass(frozen=True)
class _Kind:
    """Guesses that go into one batch. whole: their texts are, and are searched; else only a token is looked for."""

    whole: bool
    width: int
    calibrated: bool


class Ahead:
    """Work ahead of a draft service. longest: tokens of a session, its tree included; max_rows: of a batch."""

    def __init__(
        self, max_feed: int, max_rows: int, longest: int, expected: Expected, keeper: Keeper, stats: CoreStats
    ):
        self.worth = Worth()
        self._max_feed, self._max_rows, self._longest = max_feed, max_rows, longest
        self._expected, self._keeper, self._stats = expected, keeper, stats
        self._open: dict[int, tuple[Session, Guess]] = {}  # by key, what is to be done
        self._flying: dict[int, Guess] = {}

    # ---- guesses ----

    def answered(self, session: Session, draft: Draft, found: Found) -> None:
        """A Draft got this tree: guess the text that its session will ask for next."""
        path = found.best_path(int(draft.width), int(draft.depth))
        count, chance = session.target.ends.likeliest(path)
        guess = session.guess = Guess(session.text, path, count, chance, draft)
        if path.depth and len(guess.text) + (not guess.is_whole) + draft.depth <= self._longest:
            self._consider(session, guess)

    def heard(self, session: Session, guess: Guess | None, before: int, *, follows: bool) -> None:
        """A session for which this was guessed, when its text had `before` tokens, has spoken. follows: of the round
        after the tree's."""
        if guess is None:
            return
        self.drop(session)
        if follows and guess.path.depth:
            session.target.ends.saw(guess.path, session.text[before:])

    def drop(self, session: Session) -> None:
        """What was not begun for it is not worth beginning any more."""
        self._open.pop(session.key, None)

    def take(self, session: Session) -> Found | None:
        """The tree of the Draft that waits, if it was made ahead; its guess, if there is one, is over."""
        guess, asked = session.guess, session.asked
        assert asked is not None
        if guess is None or guess.found is None or not guess.fits(asked.draft):
            session.drop_guess()
            return None
        session.guess = None
        self._stats.ahead_hits += 1
        return guess.found

    def asked(self, sessions: Iterable[Session], hits: int, came_s: float) -> None:
        """A frame asked for trees: those that wait, beside the hits."""
        drafts = [session.asked.draft for session in sessions if session.asked is not None]
        waits, share = len(drafts), 0.0
        if waits and hits:
            depth, width = max(int(draft.depth) for draft in drafts), int(drafts[0].width)
            all_s = self._expected.search_s(waits + hits, depth, width)
            share = min(self._expected.search_s(waits, depth, width) / all_s, 1.0) if all_s else 1.0
        self.worth.asked(came_s, waits + hits, hits, share)

    # ---- batches ----

    def next(self, now: float) -> tuple[Batch | None, dict[int, Session]]:
        """Work for a device that has nothing else to do; only in room that nobody holds. Also its
        sessions, by key."""
        rows: list[BatchRow] = []
        sessions: dict[int, Session] = {}
        kind, depth, left = _Kind(True, 1, True), 0, self._max_feed
        for key, (session, guess) in sorted(self._open.items(), key=lambda item: not item[1][1].is_whole):
            if session.guess is not guess or session.closed or not session.target.here or session.lag:
                del self._open[key]
                continue
            if session.flying or session.asked is not None:
                continue
            its, feed = _Kind(guess.is_whole, guess.width, guess.calibrated), guess.feed
            if (rows and its != kind) or len(feed) > left:
                continue
            del self._open[key]
            if not self._keeper.reserve_free(session, len(guess.text)):
                continue
            kind, left = its, left - len(feed)
            levels = guess.depth if guess.is_whole else 1
            depth = max(depth, levels)
            rows.append(
                BatchRow(
                    session.target.id, session.number, session.epoch, session.round, key, len(guess.text) - len(feed),
                    feed, levels, session.sampling,
                )
            )  # fmt: skip
            session.flying, sessions[key] = True, session
            self._flying[key] = guess
            if len(rows) == self._max_rows:
                break
        if not rows:
            return None, sessions
        return Batch(tuple(rows), depth, kind.width, kind.calibrated, now, ahead=True), sessions

    def landed(self, row: BatchRow, session: Session, found: Found | None) -> None:
        """A row of a batch ahead is done; found: None where it failed."""
        guess = self._flying.pop(row.key)
        if found is None or session.closed or session.guess is not guess:
            return
        guess.held = row.start + len(row.tokens)
        if not len(found.columns[0]):
            return
        if guess.is_whole:
            guess.found = found
            self._stats.ahead_trees += 1
            return
        session.guess = guess.completed(found)
        self._consider(session, session.guess)

    def _consider(self, session: Session, guess: Guess) -> None:
        if self.worth.pays(guess.chance, 1 if guess.is_whole else 2):
            self._open[session.key] = session, guess
