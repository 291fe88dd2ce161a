"""Records to learn from: the target's scores along served texts, collected while texts grow, then packed in batches.

Axis letters: M rows of a step or record, K likeliest tokens of the target, n tokens of a text. The row at position t
is the target's distribution after the token at 0-based index t, so it predicts the token at index t + 1.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import numpy as np

from adaserve_jax.errors import IntegrityError
from adaserve_jax.scheduler.commit import StepUpdates
from adaserve_jax.types import CandidateTrees, DraftTrees, FinishReason, Sequence, StepOutcome, StepPlan

LOG_ZERO = -1e4
"""Replaces -inf in kept rows: its exponential is 0 in every float type, and a product with it is a number."""
MAX_ROWS = 65_536
"""Rows of all running texts together."""
MAX_RECORD_ROWS = 1024
"""Rows of one record, the last ones of its text; this bounds the memory of a buffer of long texts."""
SURPLUS_ROWS = 256
"""Rows above MAX_RECORD_ROWS that a running text may have before they are freed, so that not every step frees some."""
NO_OWNER = -1
FINISHED = ("stop", "length")
"""Finish reasons of texts that are learned from."""
PADDING = -1
"""Segment of tokens that belong to no text."""


class ScoredRows(Protocol):
    """Target's scores at M positions. ids: i32[M, K], likeliest first; log_p: f32[M, K], natural logs."""

    @property
    def ids(self) -> np.ndarray: ...

    @property
    def log_p(self) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class Record:
    """One finished text with the target's scores along it. Raises ValueError on other shapes and positions.

    Attributes:
        tokens: i32[n], prompt and kept output.
        position: i32[m], increasing; the token that a row predicts is in the text.
        ids: i32[m, K], likeliest tokens.
        log_p: f32[m, K], finite.
        draft: index of the draft that speculated for it.
        tenant: account of its request.
        held_out: never trained on, only used to check new weights.
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
    """Return True for the `share` of prompts whose texts are held out.

    A hash of the token ids, keyed by the seed, decides, always the same for a prompt. Whoever knows the seed can choose
    prompts of either side.
    """
    key = seed.to_bytes(8, "little", signed=True)
    digest = blake2b(np.asarray(prompt_ids, "<i4").tobytes(), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "little") < share * 2**64


@dataclass(eq=False)
class _OpenText:
    """One running choice. handle: owner mark of its rows in the pool; rows: how many it has."""

    handle: int
    prompt_ids: np.ndarray
    draft: int
    tenant: str
    held_out: bool
    rows: int = 0


class TextRecorder:
    """Collects rows of the watched texts in a pool that all share, and makes records of them.

    Rows beyond `max_rows` are dropped. `held_out_share` and `seed`: see `is_held_out`. first: least position of a row
    that the draft can learn from. `kept`, `not_finite` and `no_room` count rows since the start; rows that were freed
    later count as kept.
    """

    def __init__(
        self, top_k: int, *, held_out_share: float, seed: int = 0, first: int = 0, max_rows: int = MAX_ROWS
    ) -> None:
        self._first = first
        self._share = held_out_share
        self._seed = seed
        self._texts: dict[str, _OpenText] = {}
        self._next = 0
        self._owner = np.full(max_rows, NO_OWNER, np.int64)
        self._position = np.empty(max_rows, np.int32)
        self._ids = np.empty((max_rows, top_k), np.int32)
        self._log_p = np.empty((max_rows, top_k), np.float32)
        self._free = np.arange(max_rows)[::-1].copy()  # a stack of `_num_free` entries
        self._num_free = max_rows
        self.kept = self.not_finite = self.no_room = 0

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, choice_id: str) -> bool:
        return choice_id in self._texts

    def clear(self) -> None:
        """Forget every text."""
        for choice_id in tuple(self._texts):
            self.end(choice_id, keep=False)

    def begin(self, choice_id: str, prompt_ids: np.ndarray, *, draft: int, tenant: str) -> None:
        """Begin to watch a choice. All texts after one prompt are held out or none. prompt_ids is not copied. Raises
        ValueError if the choice is watched already."""
        if choice_id in self._texts:
            raise ValueError(f"{choice_id!r} is recorded already; end or abandon it before it begins again")
        held_out = is_held_out(prompt_ids, self._share, self._seed)
        self._texts[choice_id] = _OpenText(self._next, prompt_ids, draft, tenant, held_out)
        self._next += 1

    def add_rows(
        self, choice_ids: abc.Sequence[str], row: np.ndarray, position: np.ndarray, target: ScoredRows
    ) -> None:
        """Copy the rows of one step, for all its texts at once.

        Skips rows of unwatched texts, and rows that are no distribution (NaN, +inf, nothing but -inf). Raises
        ValueError if lengths differ. row: i32[M], index into choice_ids of each position. position: i32[M], from 0 in
        the text. target: M rows.
        """
        if not len(row) == len(position) == len(target.ids) == len(target.log_p):
            lengths = [len(part) for part in (row, position, target.ids, target.log_p)]
            raise ValueError(f"row, position, ids and log_p are of one length; got {lengths}")
        watched = [self._texts.get(choice_id) for choice_id in choice_ids]
        handles = np.array([NO_OWNER if text is None else text.handle for text in watched], np.int64)
        owner = handles[row]
        log_p = target.log_p
        finite = ~np.isnan(log_p).any(1) & (log_p < np.inf).all(1) & (log_p > -np.inf).any(1)
        ours = owner != NO_OWNER
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
            if text.rows > MAX_RECORD_ROWS + SURPLUS_ROWS:
                self._trim(text)

    def _trim(self, text: _OpenText) -> None:
        """Free the rows of a running text before its last MAX_RECORD_ROWS."""
        slots = np.flatnonzero(self._owner == text.handle)
        self._give_back(slots[np.argsort(self._position[slots])[:-MAX_RECORD_ROWS]])
        text.rows = MAX_RECORD_ROWS

    def _give_back(self, slots: np.ndarray) -> None:
        self._owner[slots] = NO_OWNER
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)

    def end(self, choice_id: str, output: abc.Sequence[int] | np.ndarray = (), *, keep: bool = True) -> Record | None:
        """End a text, all of whose rows were added, and return its record. output: tokens after the prompt.

        Rows before `first`, those that predict a token beyond its end, and those before its last MAX_RECORD_ROWS are
        dropped. Return None if it is not to be kept, is not watched, or has no rows.
        """
        text = self._texts.pop(choice_id, None)
        if text is None:
            return None
        slots = np.flatnonzero(self._owner == text.handle)
        self._give_back(slots)
        tokens = np.concatenate([text.prompt_ids, np.asarray(output, np.int32)]).astype(np.int32, copy=False)
        slots = slots[(self._position[slots] >= self._first) & (self._position[slots] + 1 < len(tokens))]
        position, first = np.unique(self._position[slots], return_index=True)
        if not keep or not len(position):
            return None
        position, slots = position[-MAX_RECORD_ROWS:], slots[first[-MAX_RECORD_ROWS:]]
        parts = position, self._ids[slots], self._log_p[slots]
        return Record(tokens, *parts, draft=text.draft, tenant=text.tenant, held_out=text.held_out)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every slot is free or a watched text's, and in the free stack exactly once."""
        free = np.sort(self._free[: self._num_free])
        if not np.array_equal(free, np.flatnonzero(self._owner == NO_OWNER)):
            raise IntegrityError("the free rows of the recorder are not those that nobody owns")
        handles = {text.handle for text in self._texts.values()}
        if not set(self._owner[self._owner != NO_OWNER].tolist()) <= handles:
            raise IntegrityError("a row of the recorder belongs to a text that is not watched")
        for text in self._texts.values():
            if text.rows != np.count_nonzero(self._owner == text.handle):
                raise IntegrityError(f"a text of the recorder counts {text.rows} rows, which is not what it has")


def wrong_nodes(plan: StepPlan, trees: DraftTrees, candidates: CandidateTrees, outcome: StepOutcome) -> np.ndarray:
    """Find the nodes where the accept walk stopped because the target's token was none of the draft's candidates.

    They are indices of packed nodes, i64[n], in the order of rows. What the draft proposed counts, not what was
    selected of it: a stop where nothing was proposed, or at a proposed token that was not verified, is no error of the
    draft. The position to learn from is that of the node, which predicts the token. Source: Online speculative decoding
    (docs/equations.md).
    """
    num_decode = plan.num_decode
    if not candidates.token.shape[1] or not num_decode:
        return np.zeros(0, np.int64)
    walked = np.flatnonzero(outcome.accepted)  # packed row after row, parents before children
    last = walked[np.searchsorted(trees.row[walked], np.arange(num_decode), side="right") - 1]
    depth = trees.depth[last]
    drawn = outcome.tokens[np.arange(num_decode), depth]
    there = (candidates.parent == trees.candidate[last][:, None]) & (candidates.log_f > -np.inf)
    right = there & (candidates.token == drawn[:, None])
    emitted = outcome.counts[:num_decode] > depth  # not where the step was cut before that token
    return last[there.any(axis=1) & ~right.any(axis=1) & emitted]


class PendingRows(Protocol):
    """Rows on their way to the host: `runtime.capture.Pending`, which this file cannot import, since it has no jax."""

    def collect(self) -> ScoredRows: ...


@dataclass(frozen=True, eq=False)
class SampledRows:
    """M positions of one step whose scores are captured.

    row: i32[M], index into choice_ids. position: i32[M], of the token that was fed, from 0 in its text.
    """

    choice_ids: abc.Sequence[str]
    row: np.ndarray
    position: np.ndarray


class Watcher:
    """Watches choices from start to end: captures scores after each step, and makes records of ended texts.

    A step costs a few array operations, however many texts are watched. `left_out` counts choices without a record, by
    reason. capture: begins to fetch the scores at sampled positions of the last step, i32[M]: tree nodes in packed
    order, then ends of prompts in row order. only_wrong: capture only positions where the draft was wrong.
    """

    def __init__(self, recorder: TextRecorder, capture: Callable[[np.ndarray], PendingRows], *, only_wrong: bool):
        self._recorder = recorder
        self._capture = capture
        self._only_wrong = only_wrong
        self._pending: tuple[SampledRows, PendingRows] | None = None
        self._ended: list[tuple[str, FinishReason | None, np.ndarray]] = []
        """Id, finish reason and output i32[tokens] of the choices that ended in the last step."""
        self.left_out: dict[str, int] = {}

    @property
    def is_waiting(self) -> bool:
        """True if `take_in` has something to do."""
        return self._pending is not None or bool(self._ended)

    def begin(self, choice: Sequence, tenant: str) -> None:
        self._recorder.begin(choice.sequence_id, choice.prompt_ids, draft=choice.draft, tenant=tenant)

    def drop(self, choice_id: str, reason: str) -> None:
        """Stop watching a choice that ended outside a step; ignore one that is not watched or ended in a step."""
        if choice_id in self._recorder and all(choice_id != ended for ended, _, _ in self._ended):
            self._recorder.end(choice_id, keep=False)
            self.leave_out(reason)

    def leave_out(self, reason: str, choices: int = 1) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + choices

    def ask(
        self, plan: StepPlan, trees: DraftTrees, candidates: CandidateTrees, outcome: StepOutcome,
        choice_ids: abc.Sequence[str],
    ) -> None:  # fmt: skip
        """Begin to capture the target's scores of the step just committed; call `take_in` before.

        They are those of accepted nodes, roots included, and of the ends of prompts, or just of `wrong_nodes`.
        """
        watched = np.array([choice_id in self._recorder for choice_id in choice_ids], bool)
        if not watched.any():
            return
        nodes = wrong_nodes(plan, trees, candidates, outcome) if self._only_wrong else np.flatnonzero(outcome.accepted)
        row = trees.row[nodes]
        position = plan.ctx_len[row] + trees.depth[nodes]
        final = np.flatnonzero(plan.prefill_final)
        if len(final) and not self._only_wrong:
            ends = plan.num_decode + final
            nodes = np.concatenate([nodes, trees.num_nodes + np.arange(len(final))])
            row = np.concatenate([row, ends])
            position = np.concatenate([position, plan.ctx_len[ends] + plan.prefill_counts[final] - 1])
        kept = watched[row]
        at, row, position = (part[kept].astype(np.int32) for part in (nodes, row, position))
        if len(at):
            self._pending = SampledRows(choice_ids, row, position), self._capture(at)

    def end(self, updates: StepUpdates) -> None:
        """Note the choices that ended in that step."""
        for index, update in updates.ended.items():
            if update.sequence_id in self._recorder:
                state = updates.states[index]
                output = state.token_ids[state.prompt_len : state.num_tokens]
                self._ended.append((update.sequence_id, update.finish_reason, output))

    def take_in(self) -> list[Record]:
        """Fetch the captured scores of the last step, and return records of the texts that ended in it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            sampled, rows = pending[0], pending[1].collect()
            self._recorder.add_rows(sampled.choice_ids, sampled.row, sampled.position, rows)
        ended, self._ended = self._ended, []
        records = []
        for choice_id, reason, output in ended:
            record = self._recorder.end(choice_id, output, keep=reason in FINISHED)
            if record is not None:
                records.append(record)
            else:
                self.leave_out("no_positions" if reason in FINISHED else str(reason))
        return records

    def stop(self, reason: str) -> None:
        """Forget the watched choices and count them as left out; one where there is none, so that the reason shows."""
        self._pending, self._ended = None, []
        self.leave_out(reason, max(len(self._recorder), 1))
        self._recorder.clear()


class PackedBatch(NamedTuple):
    """Texts packed into arrays of one size, so that each micro-step costs the same. T packed tokens, N = T rows.

    The arrays are numpy's on the host, and jax's in programs.

    Attributes:
        tokens: i32[T].
        position: i32[T], from 0 in each text.
        segment: i32[T], index of the text, or PADDING.
        at: i32[N], index in `tokens` of the token that was fed when the target scored its successor.
        ids: i32[N, K], the target's likeliest successors.
        log_p: f32[N, K], their natural logs.
        weight: f32[N]; a row of weight 0 is no row and has no effect.
    """

    tokens: Any
    position: Any
    segment: Any
    at: Any
    ids: Any
    log_p: Any
    weight: Any

    @property
    def num_rows(self) -> int:
        return int(np.count_nonzero(self.weight))


@dataclass(frozen=True, eq=False)
class Window:
    """Tokens [start, stop) of a record's text, and the rows [first_row, last_row) within them."""

    record: Record
    start: int
    stop: int
    first_row: int
    last_row: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def pack(records: abc.Sequence[Record], num_tokens: int, rng: np.random.Generator) -> list[PackedBatch]:
    """Pack every row of every record once, in as few batches as first fit finds, windows in an order drawn by `rng`.

    A text longer than num_tokens becomes several windows; each row has at least a quarter of a window of context, or
    its whole text so far. Tokens after a text's last row are left out. All records have the same K.
    """
    windows = [window for record in records for window in _windows(record, num_tokens)]
    bins: list[list[Window]] = []
    left: list[int] = []
    for index in rng.permutation(len(windows)):
        window = windows[index]
        place = next((i for i, room in enumerate(left) if room >= window.num_tokens), None)
        if place is None:
            place = len(bins)
            bins.append([])
            left.append(num_tokens)
        bins[place].append(window)
        left[place] -= window.num_tokens
    return [_batch(each, num_tokens) for each in bins]


def _windows(record: Record, num_tokens: int) -> Iterator[Window]:
    position, row = record.position, 0
    while row < len(position):
        before = max(int(position[row]) - num_tokens // 4, 0)
        stop = min(int(position[-1]) + 1, before + num_tokens)
        end = int(np.searchsorted(position, stop))
        stop = int(position[end - 1]) + 1
        yield Window(record, max(0, stop - num_tokens), stop, row, end)
        row = end


def _batch(windows: abc.Sequence[Window], num_tokens: int) -> PackedBatch:
    top = windows[0].record.ids.shape[1]
    batch = PackedBatch(
        tokens=np.zeros(num_tokens, np.int32),
        position=np.zeros(num_tokens, np.int32),
        segment=np.full(num_tokens, PADDING, np.int32),
        at=np.zeros(num_tokens, np.int32),
        ids=np.zeros((num_tokens, top), np.int32),
        log_p=np.zeros((num_tokens, top), np.float32),
        weight=np.zeros(num_tokens, np.float32),
    )
    token = row = 0
    for segment, window in enumerate(windows):
        record, count, rows = window.record, window.num_tokens, window.last_row - window.first_row
        here, taken = slice(token, token + count), slice(window.first_row, window.last_row)
        batch.tokens[here] = record.tokens[window.start : window.stop]
        batch.position[here] = np.arange(count)
        batch.segment[here] = segment
        into = slice(row, row + rows)
        batch.at[into] = record.position[taken] - window.start + token
        batch.ids[into] = record.ids[taken]
        batch.log_p[into] = record.log_p[taken]
        batch.weight[into] = 1
        token, row = token + count, row + rows
    return batch
