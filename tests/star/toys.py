"""A draft of which every answer can be foretold: its trees are a function of text, sampling, depth and width alone.

`ToyDevice` runs the batches of a `DraftCore` as a device would: it remembers what was fed, position by position, and
searches from that, so that a mix-up of sessions, positions or pages shows in the tree. `ToyPages` is the page pool.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from adaserve_jax.star.messages import Close, Draft, FromService, Hello, Open, SessionSampling, Tree
from adaserve_jax.star.service.core import DraftCore
from adaserve_jax.star.service.dispatch import DraftBatch
from adaserve_jax.star.service.limits import DraftLimits
from adaserve_jax.types import CandidateTrees

VOCABULARY = 97
PLAIN = SessionSampling(seed=1, choice=0, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
SAMPLED = SessionSampling(seed=2**64 - 1, choice=3, temperature=0.8, top_k=20, top_p=0.9, min_p=0.05)
Columns = tuple[list[int], list[int], list[int], list[int], list[float]]
"""index, token, parent, cell, log_q of a tree."""


def limits(**changes) -> DraftLimits:
    """Of a small service."""
    values = {
        "draft_version": "v1",
        "vocabulary_hash": "voc",
        "cells_hash": "cells",
        "max_depth": 4,
        "max_width": 3,
        "max_context": 64,
        "max_rows": 4,
        "max_feed": 16,
        "lease_s": 60.0,
    }
    return DraftLimits(**(values | changes))


def hello(target_id: str = "a", **changes) -> Hello:
    return Hello(**({"target_id": target_id, "vocabulary_hash": "voc", "cells_hash": "cells"} | changes))


def opened(session: int, epoch: int, tokens, sampling: SessionSampling = PLAIN) -> Open:
    return Open(session, epoch, np.asarray(tokens, np.int32), sampling)


def draft(session: int, epoch: int, number: int, base: int, tokens, **changes) -> Draft:
    """Round `number`; by default of depth 2 and width 2, wanted within a second."""
    values = {"depth": 2, "width": 2, "calibrated": True, "due_s": np.inf, "give_up_s": 1.0} | changes
    return Draft(session, epoch, number, base, np.asarray(tokens, np.int32), **values)


def close(session: int) -> Close:
    return Close(session)


def toy_columns(text, sampling: SessionSampling, depth: int, width: int, calibrated: bool) -> Columns:
    """The tree after `text`, whose level l does not depend on the levels after it. Some nodes are absent."""
    index, token, parent, cell, log_q = [], [], [], [], []
    for level in range(depth):
        for rank in range(width):
            key = repr((list(map(int, text)), sampling, width, calibrated, level, rank)).encode()
            number = int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
            if rank and number % 5 == 0:
                continue
            before = [at for at in index if at // width == level - 1]
            index.append(level * width + rank)
            token.append(number % VOCABULARY)
            parent.append(before[number // 7 % len(before)] if before else -1)
            cell.append(number % 11)
            log_q.append(float(np.float32(-(number % 1000) / 500)))
    return index, token, parent, cell, log_q


def columns_of(tree: Tree) -> Columns:
    """What a Tree says, as `toy_columns` does."""
    return (
        tree.index.tolist(),
        tree.token.tolist(),
        tree.parent.tolist(),
        tree.cell.tolist(),
        [float(value) for value in tree.log_q],
    )


class ToyPages:
    """Pages of `page` tokens. Raises where it is used wrongly. `wiped`: told the key that gives its pages back."""

    def __init__(self, pages: int = 1000, page: int = 4):
        self._pages, self._page = pages, page
        self.held: dict[int, int] = {}
        self.released: set[int] = set()
        self.wiped = lambda key: None

    @property
    def capacity(self) -> int:
        return self._pages * self._page

    def reserve(self, key: int, tokens: int) -> bool:
        wanted = max(self.held.get(key, 0), -(-tokens // self._page))
        others = sum(pages for other, pages in self.held.items() if other != key)
        if wanted + others > self._pages:
            return False
        self.held[key] = wanted
        return True

    def release(self, key: int) -> None:
        del self.held[key]
        self.wiped(key)


class ToyDevice:
    """Runs batches. kv: by key what each position was fed, as long as the session has room."""

    def __init__(self, room: ToyPages, bounds: DraftLimits):
        self.kv: dict[int, list[int]] = {}
        self._room, self._bounds = room, bounds
        room.wiped = lambda key: self.kv.pop(key, None)

    def run(self, batch: DraftBatch) -> CandidateTrees | None:
        """Feed, then search; checks that the batch keeps to the limits."""
        assert 0 < len(batch.rows) <= self._bounds.max_rows
        assert 0 < sum(len(row.tokens) for row in batch.rows) <= self._bounds.max_feed
        assert len({row.key for row in batch.rows}) == len(batch.rows)
        assert batch.depth == max(row.depth for row in batch.rows)
        assert all((row.depth > 0) == (batch.depth > 0) for row in batch.rows)
        for row in batch.rows:
            kv = self.kv.setdefault(row.key, [])
            assert len(row.tokens) and row.start <= len(kv), "fed beyond what the KV holds"
            kv[row.start :] = row.tokens.tolist()
            assert self._room.held[row.key] * self._room._page >= len(kv), "fed beyond the room"
        return self._search(batch) if batch.depth else None

    def _search(self, batch: DraftBatch) -> CandidateTrees:
        shape = (len(batch.rows), batch.depth * batch.width)
        token, parent, cell = (np.full(shape, -1, np.int32) for _ in range(3))
        log_f, log_q = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.float32)
        for at, row in enumerate(batch.rows):
            text = self.kv[row.key]
            found = toy_columns(text, row.sampling, batch.depth, batch.width, batch.calibrated)
            for index, *values in zip(*found, strict=True):
                token[at, index], parent[at, index], cell[at, index], log_q[at, index] = values
                log_f[at, index] = -1.0
        depth = np.repeat(np.arange(1, batch.depth + 1, dtype=np.int32), batch.width)
        return CandidateTrees(token, parent, log_f, depth, cell, log_q)


class ToyService:
    """A core with its room and its device; `now` is set by the test. keywords: of `limits`. nothing: the answers to
    Drafts that were given up."""

    def __init__(self, targets="a", *, pages: int = 1000, core: dict | None = None, **changes):
        self.bounds = limits(**changes)
        self.pages = ToyPages(pages)
        self.device = ToyDevice(self.pages, self.bounds)
        self.core = DraftCore(self.bounds, self.pages, **(core or {}))
        self.now = 0.0
        self.nothing: list[Tree] = []
        for target_id in targets:
            self.say(target_id, hello(target_id))

    def say(self, target_id: str, *messages) -> list[FromService]:
        return self.core.receive(target_id, messages, self.now)

    def run(self, seconds: float = 0.0) -> tuple[list[tuple[str, int, int]], list[Tree]]:
        """One batch: (target, session, tokens fed) of its rows, and the trees that were answered."""
        batch = self.core.next_batch(self.now)
        self.nothing += [tree for _, frame in self.core.given_up() for tree in frame if isinstance(tree, Tree)]
        if batch is None:
            return [], []
        trees = self.device.run(batch)
        self.now += seconds
        answers = self.core.done(batch, trees, self.now)
        return rows_of(batch), [tree for _, frame in answers for tree in frame if isinstance(tree, Tree)]


def rows_of(batch: DraftBatch) -> list[tuple[str, int, int]]:
    """(target, session, tokens fed) of each row."""
    return [(row.target_id, row.session, len(row.tokens)) for row in batch.rows]
