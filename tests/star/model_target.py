"""A target as the protocol wants it, small enough to be read: it judges every answer by what it asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from adaserve_jax.star.messages import FromService, FromTarget, Open, Refused, Resync, SessionSampling, Tree, Welcome
from tests.star.toys import close, columns_of, draft, hello, opened, toy_columns


@dataclass
class Ask:
    """One Draft with depth, and what its tree must be."""

    text: list[int]
    sampling: SessionSampling
    depth: int
    width: int
    calibrated: bool


@dataclass(eq=False)
class ModelSession:
    """text: the true one; told: tokens of it that this epoch has said; is_open: whether this epoch was opened."""

    number: int
    text: list[int]
    sampling: SessionSampling
    epoch: int = 0
    round: int = 0
    told: int = 0
    is_open: bool = False
    is_over: bool = False
    is_bad: bool = False
    asks: dict[tuple[int, int], Ask] = field(default_factory=dict)
    answered: set[tuple[int, int]] = field(default_factory=set)

    @property
    def answered_last(self) -> bool:
        """Whether the latest thing it said was a Draft whose tree is here."""
        return (self.epoch, self.round - 1) in self.answered

    def renew(self) -> None:
        """Next time it speaks it sends the whole text, in a new epoch."""
        self.epoch, self.is_open, self.told = self.epoch + 1, False, 0

    def open(self) -> Open:
        """Say the whole text in a new epoch."""
        self.is_open, self.told = True, len(self.text)
        return opened(self.number, self.epoch, self.text, self.sampling)

    def speak(self, tokens: Sequence[int], overlap: int, **shape) -> list[FromTarget]:
        """The text grows by `tokens`; of what was said before, `overlap` tokens are said again."""
        frame: list[FromTarget] = []
        if not self.is_open:
            frame.append(self.open())
        self.text = [*self.text, *tokens]
        base = max(self.told - overlap, 0)
        asked = draft(self.number, self.epoch, self.round, base, self.text[base:], **shape)
        if asked.depth and self.text:
            ask = Ask(list(self.text), self.sampling, asked.depth, asked.width, asked.calibrated)
            self.asks[self.epoch, self.round] = ask
        self.round += 1
        self.told = len(self.text)
        return [*frame, asked] if self.text or not asked.depth else frame


class ModelTarget:
    """One target with its sessions, and what is on the way to and from the service."""

    def __init__(self, target_id: str):
        self.id = target_id
        self.sessions: dict[int, ModelSession] = {}
        self.up: list[list[FromTarget]] = []
        self.down: list[list[FromService]] = []
        self.is_welcome = False
        self.refusals: list[Refused] = []
        self.trees = 0
        self._next = 1

    def connect(self) -> None:
        """A new stream: what was on the way is lost, every session is opened anew."""
        self.up, self.down, self.is_welcome = [[hello(self.id)]], [], False
        for session in self.sessions.values():
            session.renew()

    def begin(self, text: list[int], sampling: SessionSampling) -> ModelSession:
        session = ModelSession(self._next, text, sampling)
        self.sessions[session.number] = session
        self._next += 1
        return session

    def end(self, session: ModelSession) -> None:
        session.is_over = True
        self.up.append([close(session.number)])

    @property
    def live(self) -> list[ModelSession]:
        return [session for session in self.sessions.values() if not session.is_over]

    def hear(self, frame: Sequence[FromService]) -> None:
        """Check everything that the service says."""
        for message in frame:
            if isinstance(message, Welcome):
                self.is_welcome = True
            elif isinstance(message, Tree):
                self._hear_tree(message)
            elif isinstance(message, Resync):
                session = self.sessions[message.session]
                if message.epoch == session.epoch and session.is_open:
                    session.renew()
            elif isinstance(message, Refused):
                self._hear_refused(message)

    def _hear_tree(self, tree: Tree) -> None:
        session = self.sessions[tree.session]
        ask = session.asks[tree.epoch, tree.round]
        assert tree.length == len(ask.text) and tree.width == ask.width
        expected = toy_columns(ask.text, ask.sampling, ask.depth, ask.width, ask.calibrated)
        assert columns_of(tree) == expected or not len(tree.index)
        if len(tree.index):
            session.answered.add((tree.epoch, tree.round))
            self.trees += 1

    def _hear_refused(self, refused: Refused) -> None:
        self.refusals.append(refused)
        if refused.session == 0:
            self.is_welcome = False
            return
        session = self.sessions[refused.session]
        assert session.is_bad or refused.code not in ("invalid", "too_long")
        session.is_over = True
