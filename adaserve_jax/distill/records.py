"""What is kept of a finished text to learn from, and the notes that are taken while it grows. Imports no jax.

Axis letters: M rows of a step or record, K likeliest tokens of the target, n tokens of a text. The row at position t
is the target's distribution after the token at 0-based index t, so it predicts the token at index t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np

from adaserve_jax.errors import IntegrityError

LOG_ZERO = -1e4
"""Stands for -inf in kept rows: its exponential is 0 in every float type, and a product with it is a number."""
MAX_ROWS = 65_536
"""Of all texts that run, together."""
MOST_ROWS = 1024
"""Of one record: the last ones of its text. It bounds what a buffer of long texts takes."""
SURPLUS_ROWS = 256
"""Rows above MOST_ROWS that a running text may have before they are given back: once in so many, not at each step."""
NOBODY = -1


class Rows(Protocol):
    """The target's scores at M positions. ids: i32[M, K], likeliest first; log_p: f32[M, K], natural logs."""

    @property
    def ids(self) -> np.ndarray: ...

    @property
    def log_p(self) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class Record:
    """One finished text with the target's scores along it.

    tokens: i32[n], prompt and kept output. position: i32[m], increasing; the token that a row predicts is in the text.
    ids: i32[m, K]; log_p: f32[m, K], finite. draft: index of the draft that speculated for it. held_out: never trained
    on, kept to check what training did.
    Raises ValueError unless shapes and positions are these.
    """

    tokens: np.ndarray
    position: np.ndarray
    ids: np.ndarray
    log_p: np.ndarray
    draft: int = 0
    tenant: str = ""
    held_out: bool = False

    def __post_init__(self) -> None:
        rows = len(self.position)
        fits = self.tokens.ndim == self.position.ndim == 1
        if not (fits and self.ids.ndim == 2 and len(self.ids) == rows and self.log_p.shape == self.ids.shape):
            shapes = [part.shape for part in (self.tokens, self.position, self.ids, self.log_p)]
            raise ValueError(f"a record holds tokens [n], position [m], ids and log_p [m, K]; got {shapes}")
        inside = rows > 0 and self.position[0] >= 0 and self.position[-1] < len(self.tokens) - 1
        if not inside or (np.diff(self.position) <= 0).any():
            raise ValueError(
                f"a record's positions increase within 0..{len(self.tokens) - 2}, the last but one token of the text, "
                f"and there is one at least; got {self.position.tolist()[:8]}"
            )


def is_held_out(prompt_ids: np.ndarray, share: float, seed: int) -> bool:
    """Whether texts after this prompt are among the `share` that is held out. By a hash of its token ids keyed by the
    seed: the same each time the prompt comes, and not to be steered by one who does not know the seed."""
    key = seed.to_bytes(8, "little", signed=True)
    digest = blake2b(np.asarray(prompt_ids, "<i4").tobytes(), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "little") < share * 2**64


@dataclass(eq=False)
class _Text:
    """One choice that still runs. handle: what its rows in the pool are marked with; rows: how many these are."""

    handle: int
    prompt_ids: np.ndarray
    output: list[int]
    draft: int
    tenant: str
    held_out: bool
    rows: int = 0


class Recorder:
    """Takes notes of every watched text, in a pool of rows that all of them share, and makes records of them.

    max_rows: rows of all running texts together; what comes above it is not kept. No text has many more of them than
    its record will. held_out_share and seed: see `is_held_out`. `kept`, `not_finite`, `no_room`: rows since the start,
    by what became of them; those that were given back later are among the kept.
    """

    def __init__(self, top_k: int, *, held_out_share: float, seed: int = 0, max_rows: int = MAX_ROWS):
        self._share = held_out_share
        self._seed = seed
        self._texts: dict[str, _Text] = {}
        self._next = 0
        self._owner = np.full(max_rows, NOBODY, np.int64)
        self._position = np.empty(max_rows, np.int32)
        self._ids = np.empty((max_rows, top_k), np.int32)
        self._log_p = np.empty((max_rows, top_k), np.float32)
        self._free = np.arange(max_rows)[::-1].copy()  # a stack: the last `_num_free` entries down to 0 are in use
        self._num_free = max_rows
        self.kept = 0
        self.not_finite = 0
        self.no_room = 0

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, choice_id: str) -> bool:
        return choice_id in self._texts

    def begin(self, choice_id: str, prompt_ids: np.ndarray, *, draft: int, tenant: str) -> None:
        """From now on the choice is watched. All texts after the same prompt are held out or none, whosever they are.
        prompt_ids is kept, not copied. Raises ValueError when the choice is watched already."""
        if choice_id in self._texts:
            raise ValueError(f"{choice_id!r} is recorded already; end or abandon it before it begins again")
        held_out = is_held_out(prompt_ids, self._share, self._seed)
        self._texts[choice_id] = _Text(self._next, prompt_ids, [], draft, tenant, held_out)
        self._next += 1

    def add_rows(self, choice_ids: Sequence[str], row: np.ndarray, position: np.ndarray, target: Rows) -> None:
        """Take in what one step said of all its texts, in one copy for all of them.

        row: i32[M], whose each position is, as an index into choice_ids; position: i32[M], from 0 in the text;
        target: M rows. Rows of texts that are not watched are passed over, as are those that are no distribution (NaN,
        +inf, nothing but -inf). Raises ValueError when lengths differ.
        """
        if not len(row) == len(position) == len(target.ids) == len(target.log_p):
            lengths = [len(part) for part in (row, position, target.ids, target.log_p)]
            raise ValueError(f"row, position, ids and log_p are of one length; got {lengths}")
        watched = [self._texts.get(choice_id) for choice_id in choice_ids]
        handles = np.array([NOBODY if text is None else text.handle for text in watched], np.int64)
        owner = handles[row]
        log_p = target.log_p
        finite = ~np.isnan(log_p).any(1) & (log_p < np.inf).all(1) & (log_p > -np.inf).any(1)
        ours = owner != NOBODY
        take = np.flatnonzero(ours & finite)
        self.not_finite += int(ours.sum()) - len(take)
        self.no_room += max(0, len(take) - self._num_free)
        take = take[: self._num_free]
        slots = self._free[self._num_free - len(take) : self._num_free]
        self._num_free -= len(take)
        self.kept += len(take)
        self._owner[slots] = owner[take]
        self._position[slots] = position[take]
        self._ids[slots] = target.ids[take]
        self._log_p[slots] = np.maximum(log_p[take], LOG_ZERO)
        added = np.bincount(row[take], minlength=len(choice_ids))
        for index in np.flatnonzero(added).tolist():
            text = watched[index]
            assert text is not None
            text.rows += int(added[index])
            if text.rows > MOST_ROWS + SURPLUS_ROWS:
                self._trim(text)

    def _trim(self, text: _Text) -> None:
        """Give back the rows of a running text that are before its last MOST_ROWS."""
        slots = np.flatnonzero(self._owner == text.handle)
        self._give_back(slots[np.argsort(self._position[slots])[:-MOST_ROWS]])
        text.rows = MOST_ROWS

    def _give_back(self, slots: np.ndarray) -> None:
        self._owner[slots] = NOBODY
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)

    def output(self, choice_id: str, token_ids: Sequence[int]) -> None:
        """These tokens follow in the text. Nothing happens where it is not watched."""
        text = self._texts.get(choice_id)
        if text is not None:
            text.output.extend(token_ids)

    def end(self, choice_id: str, *, keep: bool = True) -> Record | None:
        """The text is over, and all rows of it were added. Rows that predict a token beyond its end are dropped, and
        those before the last MOST_ROWS. None when it is not to be kept, was not watched, or has no rows."""
        text = self._texts.pop(choice_id, None)
        if text is None:
            return None
        slots = np.flatnonzero(self._owner == text.handle)
        self._give_back(slots)
        tokens = np.concatenate([text.prompt_ids, np.array(text.output, np.int32)]).astype(np.int32, copy=False)
        slots = slots[self._position[slots] + 1 < len(tokens)]
        position, first = np.unique(self._position[slots], return_index=True)
        if not keep or not len(position):
            return None
        position, slots = position[-MOST_ROWS:], slots[first[-MOST_ROWS:]]
        parts = position, self._ids[slots], self._log_p[slots]
        return Record(tokens, *parts, draft=text.draft, tenant=text.tenant, held_out=text.held_out)

    def abandon(self, choice_id: str) -> None:
        """Forget the text and its rows."""
        self.end(choice_id, keep=False)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every slot is free or a watched text's, and in the free stack exactly once."""
        free = np.sort(self._free[: self._num_free])
        if not np.array_equal(free, np.flatnonzero(self._owner == NOBODY)):
            raise IntegrityError("the free rows of the recorder are not those that nobody owns")
        handles = {text.handle for text in self._texts.values()}
        if not set(self._owner[self._owner != NOBODY].tolist()) <= handles:
            raise IntegrityError("a row of the recorder belongs to a text that is not watched")
        for text in self._texts.values():
            if text.rows != np.count_nonzero(self._owner == text.handle):
                raise IntegrityError(f"a text of the recorder counts {text.rows} rows, which is not what it has")
