"""Paced targets: what a draft service sees of a real one, and what it gets back, without the target's computing.

Their texts were generated before, by the real target. A token is the target's whatever a draft proposes, so what it
would accept of a tree is what the text has: the noise that both draw with depends on seed and position alone. A paced
target walks each tree along its text and sleeps for as long as a verification takes. The drafter is a real one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

import numpy as np

from adaserve_jax.drafter_config import DrafterConfig
from adaserve_jax.models.config import ModelConfig, resolve_folder
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.sampling import RowSampling
from adaserve_jax.star.client.channel import GrpcTransport
from adaserve_jax.star.client.drafter import RemoteDrafter
from adaserve_jax.star.messages import Hello, cells_hash
from adaserve_jax.tree.acceptance_table import read_chances
from adaserve_jax.types import CandidateTrees, Drafter, DraftPlan, StepPlan

DEADLINE_MS = 5_000.0
"""So late that no round of a measurement goes without its tree."""
CONNECT_S = 60.0
TABLE = "calibration.json"
"""Of the embedded pair, beside its draft."""


@dataclass(frozen=True)
class Text:
    """One request: token ids of its prompt and of what the real target made of it, with this seed."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    seed: int
    temperature: float


@dataclass(frozen=True)
class Shape:
    """How a target drafts and verifies. width, depth: of its trees. verify_s: t_v, what it sleeps in each step."""

    depth: int
    width: int
    verify_s: float


@dataclass
class Tally:
    """What targets did between two moments. rounds: of requests; tokens: emitted; steps: verifications, slept_s: all
    they took; round_s: from the call of the drafter to its trees, summed over steps with trees; drafted: such steps."""

    rounds: int = 0
    tokens: int = 0
    accepted: int = 0
    steps: int = 0
    slept_s: float = 0.0
    drafted: int = 0
    round_s: float = 0.0

    def __add__(self, other: Self) -> Self:
        return type(self)(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __sub__(self, other: Self) -> Self:
        return type(self)(**{name: value - getattr(other, name) for name, value in vars(self).items()})


def accepted(trees: CandidateTrees, row: int, ahead: np.ndarray) -> int:
    """How many of the tokens `ahead`, i32[n], the tree of a row has, one below the other from its root."""
    there = trees.log_f[row] > -np.inf
    at = -1
    for count, token in enumerate(ahead.tolist()):
        found = np.flatnonzero(there & (trees.parent[row] == at) & (trees.token[row] == token))
        if not len(found):
            return count
        at = int(found[0])
    return len(ahead)


class _Row:
    """The request in one slot. known: tokens of it that the drafter was told; length: those committed."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.tokens = np.array(text.prompt + text.output, np.int32)
        self.known, self.length = 0, len(text.prompt)


class PacedTarget:
    """Decodes texts one after another in each of `rows` slots, and begins again after the last. first: the text that it
    begins with. pages: of one slot's table, and most_fed: tokens at once, for a drafter that is on this device."""

    def __init__(
        self,
        drafter: Drafter,
        texts: Sequence[Text],
        shape: Shape,
        *,
        rows: int = 1,
        first: int = 0,
        pages: int = 1,
        most_fed: int = 2**31,
    ) -> None:
        self._drafter, self._shape, self._pages, self._most_fed = drafter, shape, pages, most_fed
        self._texts = itertools.cycle([*texts[first % len(texts) :], *texts[: first % len(texts)]])
        self._rows: list[_Row | None] = [None] * rows
        self.tally = Tally()

    def step(self) -> None:
        """Begin what has to begin, each with a step for its prompt; then one round of all."""
        for slot, row in enumerate(self._rows):
            if row is None or row.length + self._shape.depth >= len(row.tokens):
                self._begin(slot)
        rows = [row for row in self._rows if row is not None]
        called = time.monotonic()
        trees = self._drafter.propose(self._plan(range(len(rows)), self._shape.depth))
        self.tally.round_s += time.monotonic() - called
        self.tally.drafted += 1
        self._sleep()
        for index, row in enumerate(rows):
            ahead = row.tokens[row.length : row.length + self._shape.depth]
            count = accepted(trees, index, ahead) if trees.token.shape[1] else 0
            row.known, row.length = row.length, row.length + count + 1
            self.tally.rounds += 1
            self.tally.tokens += count + 1
            self.tally.accepted += count

    def end(self) -> None:
        """Close what is open."""
        ended = getattr(self._drafter, "ended", None)
        if ended is not None:
            ended(np.arange(len(self._rows)))
        self._rows = [None] * len(self._rows)

    def _begin(self, slot: int) -> None:
        """The next text: its prompt is fed while the target prefills it, which brings the first token."""
        row = self._rows[slot] = _Row(next(self._texts))
        prompt = row.length
        while row.known < prompt:
            row.length = min(row.known + self._most_fed, prompt)
            self._drafter.propose(self._plan([slot], 0))
            row.known = row.length
        self._sleep()
        row.length += 1
        self.tally.tokens += 1

    def _sleep(self) -> None:
        started = time.monotonic()
        time.sleep(self._shape.verify_s)
        self.tally.slept_s += time.monotonic() - started
        self.tally.steps += 1

    def _plan(self, slots: Sequence[int], depth: int) -> StepPlan:
        rows = [row for slot in slots if (row := self._rows[slot]) is not None]
        count, width = len(rows), self._shape.width
        known = np.array([row.known for row in rows], np.int32)
        length = np.array([row.length for row in rows], np.int32)
        fed = np.concatenate([row.tokens[row.known : row.length] for row in rows])
        said = [row.text for row in rows]
        sampling = RowSampling.greedy(count)
        sampling.seed[:], sampling.temperature[:] = zip(*((text.seed, text.temperature) for text in said), strict=True)
        slot = np.array(slots, np.int32)
        table = slot[:, None] * self._pages + np.arange(self._pages, dtype=np.int32)
        root = np.array([row.tokens[row.length - 1] for row in rows], np.int32)
        draft = DraftPlan(depth, width, fed, length - known, known, np.full(count, depth > 0), True)
        none = np.zeros(0, np.int32)
        return StepPlan(
            0, slot, count, root, length - 1, table, sampling, none, none, np.zeros(0, bool), draft, depth * width + 1
        )


def remote_drafter(port: int, name: str, rows: int) -> RemoteDrafter:
    """Connected to the service at that port of this machine. Says nothing of its own times, so it is always admitted.
    Raises TimeoutError."""
    draft = resolve_folder("demo", "draft")  # whose vocabulary and table all grown ones have
    table = read_chances(draft.parent / TABLE)
    config = DrafterConfig((f"grpc://127.0.0.1:{port}",), drafter_deadline_ms=DEADLINE_MS)
    vocabulary_hash = Tokenizer.from_folder(draft).vocabulary_hash(ModelConfig.from_folder(draft).vocab_size)
    hello = Hello(name, vocabulary_hash, cells_hash(table))
    transports = [GrpcTransport(address, config) for address in config.addresses]
    drafter = RemoteDrafter(transports, config, hello=hello, table=table, max_rows=rows)
    if drafter.connect(CONNECT_S) is None:
        drafter.close()
        raise TimeoutError(f"no draft service answers at 127.0.0.1:{port}")
    return drafter


def run_target(port: Connection, service: int, number: int, texts: Sequence[Text], shape: Shape) -> None:
    """The process of one target. It is told "run" or "pause", to which it answers nothing, "tally", to which it answers
    with that and the time it is of, and "end"."""
    drafter = remote_drafter(service, f"target-{number}", 1)
    target = PacedTarget(drafter, texts, shape, first=number * len(texts) // 6)
    port.send("ready")
    runs = False
    try:
        while True:
            while port.poll(0 if runs else None):
                said = port.recv()
                if said == "end":
                    return
                if said == "tally":
                    port.send((target.tally - Tally(), time.monotonic()))
                else:
                    runs = said == "run"
                    if not runs:
                        target.end()
            target.step()
    finally:
        drafter.close()


def texts_as_json(texts: Sequence[Text]) -> list[dict[str, Any]]:
    return [asdict(text) for text in texts]


def texts_from_json(saved: Sequence[dict[str, Any]]) -> list[Text]:
    return [Text(tuple(each["prompt"]), tuple(each["output"]), each["seed"], each["temperature"]) for each in saved]
