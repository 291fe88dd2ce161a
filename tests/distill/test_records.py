"""Records: which row predicts which token, what is not kept, and the recorder's pool under a state machine."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from adaserve_jax.distill.records import (
    LOG_ZERO,
    MAX_RECORD_ROWS,
    SURPLUS_ROWS,
    Record,
    TextRecorder,
    Watcher,
    is_held_out,
)
from adaserve_jax.types import SequenceUpdate
from tests.conftest import ROOT

K = 3


class Scores(NamedTuple):
    ids: np.ndarray
    log_p: np.ndarray


def scores(*marks: int) -> Scores:
    """A row per mark, told apart by it."""
    ids = np.array(marks, np.int32).reshape(-1, 1) * 10 + np.arange(K, dtype=np.int32)
    return Scores(ids, np.log(np.tile(np.array([0.5, 0.3, 0.1], np.float32), (len(marks), 1))))


def recorder(**changed: object) -> TextRecorder:
    return TextRecorder(**{"top_k": K, "held_out_share": 0.25, "max_rows": 64} | changed)  # type: ignore[arg-type]


def begin(notes: TextRecorder, choice_id: str, *prompt: int, draft: int = 0, tenant: str = "") -> None:
    prompt_ids = np.array(prompt, np.int32)
    notes.begin(choice_id, prompt_ids, draft=draft, tenant=tenant)


def add(notes: TextRecorder, *rows: tuple[str, int, int]) -> None:
    """rows: choice, position, mark."""
    names = sorted({name for name, _, _ in rows})
    row = np.array([names.index(name) for name, _, _ in rows], np.int32)
    position = np.array([place for _, place, _ in rows], np.int32)
    notes.add_rows(names, row, position, scores(*(mark for _, _, mark in rows)))


def test_a_step_of_several_texts_is_taken_apart():
    notes = recorder()
    begin(notes, "a/0", 1, 2, 3, draft=1, tenant="ann")
    begin(notes, "b/0", 4)
    add(notes, ("b/0", 0, 7), ("a/0", 2, 5), ("opted-out/0", 9, 9))
    add(notes, ("a/0", 3, 6), ("b/0", 1, 8))
    a, b = notes.end("a/0", (11, 14)), notes.end("b/0", np.array([12, 13]))
    assert a is not None and b is not None
    assert a.tokens.tolist() == [1, 2, 3, 11, 14] and b.tokens.tolist() == [4, 12, 13]
    assert a.position.tolist() == [2, 3] and b.position.tolist() == [0, 1]
    assert a.ids[:, 0].tolist() == [50, 60] and b.ids[:, 0].tolist() == [70, 80]
    assert (a.draft, a.tenant, b.draft, b.tenant) == (1, "ann", 0, "")
    assert a.tokens.dtype == a.ids.dtype == a.position.dtype == np.int32 and a.log_p.dtype == np.float32
    assert (notes.kept, notes.not_finite, notes.no_room, len(notes)) == (4, 0, 0, 0)


def test_a_row_whose_token_was_cut_off_is_dropped():
    notes = recorder()
    begin(notes, "a/0", 1, 2)
    add(notes, ("a/0", 1, 1), ("a/0", 2, 2), ("a/0", 3, 3))  # predict the tokens at 2, 3 and 4
    record = notes.end("a/0", [5, 6])  # a stop string cut the third
    assert record is not None and record.position.tolist() == [1, 2]


def test_a_row_before_the_first_that_says_something_is_dropped():
    notes = recorder(first=1)
    begin(notes, "a/0", 1)
    begin(notes, "b/0", 1)
    add(notes, ("a/0", 0, 1), ("a/0", 1, 2), ("b/0", 0, 1))
    record = notes.end("a/0", [5, 6])
    assert record is not None and record.position.tolist() == [1]
    assert notes.end("b/0", [5]) is None
    notes.check_integrity()


def test_rows_come_in_the_order_of_the_text():
    notes = recorder()
    begin(notes, "a/0", 1)
    add(notes, ("a/0", 3, 3), ("a/0", 0, 0))
    add(notes, ("a/0", 2, 2), ("a/0", 1, 1))
    record = notes.end("a/0", range(4))
    assert record is not None and record.position.tolist() == [0, 1, 2, 3]
    assert record.ids[:, 0].tolist() == [0, 10, 20, 30]


@pytest.mark.parametrize("bad", [[np.nan, -1, -2], [np.inf, -1, -2], [-np.inf] * 3])
def test_rows_that_are_no_distribution_are_counted_and_passed_over(bad: list[float]):
    notes = recorder()
    begin(notes, "a/0", 1)
    target = scores(1, 2)
    target.log_p[0] = bad
    notes.add_rows(["a/0", "b/0"], np.array([0, 0]), np.array([0, 1]), target)
    notes.add_rows(["b/0"], np.array([0, 0]), np.array([0, 1]), target)  # not watched: not counted
    record = notes.end("a/0", [2, 3])
    assert record is not None and record.position.tolist() == [1] and notes.not_finite == 1


def test_a_token_that_cannot_come_has_a_number_for_its_log():
    notes = recorder()
    begin(notes, "a/0", 1)
    target = scores(1)
    target.log_p[0, 2] = -np.inf
    notes.add_rows(["a/0"], np.array([0]), np.array([0]), target)
    record = notes.end("a/0", [2])
    assert record is not None and record.log_p[0, 2] == LOG_ZERO and np.exp(record.log_p[0, 2]) == 0


def test_a_long_text_keeps_its_last_rows():
    notes = recorder(max_rows=2 * MAX_RECORD_ROWS)
    begin(notes, "a/0", 1)
    add(notes, *(("a/0", place, place) for place in range(MAX_RECORD_ROWS + 10)))
    record = notes.end("a/0", range(MAX_RECORD_ROWS + 10))
    assert record is not None and len(record.tokens) == MAX_RECORD_ROWS + 11
    assert record.position.tolist() == list(range(10, MAX_RECORD_ROWS + 10)) == (record.ids[:, 0] // 10).tolist()
    notes.check_integrity()


def test_a_few_long_texts_leave_room_for_the_others():
    """Of a text of any length only its last rows stay in the pool while it grows."""
    notes = recorder(max_rows=2 * (MAX_RECORD_ROWS + SURPLUS_ROWS + 64))
    long = ("a/0", "b/0")
    for name in long:
        begin(notes, name, 1)
    num_rows, step = 3 * MAX_RECORD_ROWS + 5, 61
    for first in range(0, num_rows, step):
        places = range(first, min(first + step, num_rows))
        add(notes, *((name, place, place) for name in long for place in places))
        notes.check_integrity()
    begin(notes, "c/0", 1)
    add(notes, *(("c/0", place, place) for place in range(64)))
    assert (notes.kept, notes.no_room) == (2 * num_rows + 64, 0)
    for name, rows in (("a/0", num_rows), ("b/0", num_rows), ("c/0", 64)):
        record = notes.end(name, range(rows))
        assert record is not None
        expected = list(range(max(0, rows - MAX_RECORD_ROWS), rows))
        assert record.position.tolist() == expected == (record.ids[:, 0] // 10).tolist()
    notes.check_integrity()


def test_what_is_above_the_room_is_counted_and_room_comes_back():
    notes = recorder(max_rows=3)
    begin(notes, "a/0", 1)
    add(notes, *(("a/0", place, place) for place in range(5)))
    assert (notes.kept, notes.no_room) == (3, 2)
    notes.end("a/0", keep=False)
    begin(notes, "b/0", 1)
    add(notes, ("b/0", 0, 0))
    assert notes.kept == 4
    notes.check_integrity()


def test_mistakes_are_told():
    notes = recorder()
    begin(notes, "a/0", 1)
    with pytest.raises(ValueError, match="'a/0' is recorded already; end or abandon it"):
        begin(notes, "a/0", 1)
    with pytest.raises(ValueError, match=r"of one length; got \[1, 2, 1, 1\]"):
        notes.add_rows(["a/0"], np.array([0]), np.array([0, 1]), scores(1))
    rows = scores(1, 2)
    with pytest.raises(ValueError, match=r"positions increase within 0\.\.1.*got \[1, 2\]"):
        Record(np.arange(3), np.array([1, 2]), *rows)
    with pytest.raises(ValueError, match=r"ids and log_p \[m, K\]"):
        Record(np.arange(9), np.array([1]), *rows)


def test_the_held_out_share_is_held_and_does_not_depend_on_the_run():
    prompts = [np.array([number, 7], np.int32) for number in range(8000)]
    held = [is_held_out(prompt, 0.125, 7) for prompt in prompts]
    assert abs(np.mean(held) - 0.125) < 4 * np.sqrt(0.125 * 0.875 / len(prompts))
    assert held != [is_held_out(prompt, 0.125, 8) for prompt in prompts]
    again = "from adaserve_jax.distill.records import *; print(*[+is_held_out([n, 7], 0.125, 7) for n in range(64)])"
    done = subprocess.run([sys.executable, "-c", again], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == [str(int(one)) for one in held[:64]]


def test_all_texts_after_a_prompt_are_on_one_side():
    """Choices of one request, and the same prompt sent again by whoever: what is checked on was not trained on."""
    notes = recorder(held_out_share=0.5)
    sides = []
    for number in range(32):
        found = set()
        for request in range(2):
            for choice in range(2):
                name = f"r{number}-{request}/{choice}"
                begin(notes, name, 1, number, tenant=f"client {request}")
                add(notes, (name, 0, 0))
                record = notes.end(name, [1])
                assert record is not None
                found.add(record.held_out)
        assert len(found) == 1
        sides += found
    assert set(sides) == {True, False}


def test_a_choice_that_ended_in_a_step_is_not_dropped_when_its_request_is_aborted():
    notes = recorder()
    watcher = Watcher(notes, lambda at: None, only_wrong=False)  # type: ignore[arg-type, return-value]
    for name in ("a/0", "a/1", "a/2"):
        begin(notes, name, 1, 2)
    add(notes, ("a/0", 1, 5))
    state = SimpleNamespace(token_ids=np.array([1, 2, 3], np.int32), prompt_len=2, num_tokens=3)
    ended = {0: SequenceUpdate("a/0", (3,), "stop"), 1: SequenceUpdate("a/1", (3,), "length")}
    watcher.end(SimpleNamespace(states=[state, state], ended=ended))  # type: ignore[arg-type]
    for name in ("a/0", "a/1", "a/2"):
        watcher.drop(name, "abort")
    (record,) = watcher.take_in()
    assert record.tokens.tolist() == [1, 2, 3]
    assert watcher.left_out == {"no_positions": 1, "abort": 1}


class RecorderMachine(RuleBasedStateMachine):
    """The recorder beside lists that are kept per text."""

    texts = Bundle("texts")

    def __init__(self) -> None:
        super().__init__()
        self.notes = recorder(max_rows=24)
        self.model: dict[str, list[tuple[int, int]]] = {}
        self.output: dict[str, int] = {}
        self.begun = 0
        self.marks = 0

    @rule(target=texts)
    def begin(self) -> str:
        name = f"{self.begun}/0"
        self.begun += 1
        begin(self.notes, name, 0)
        self.model[name] = []
        self.output[name] = 0
        return name

    @rule(names=st.lists(texts, max_size=4, unique=True), counts=st.lists(st.integers(0, 4), min_size=4, max_size=4))
    def step(self, names: list[str], counts: list[int]) -> None:
        rows = []
        for name, count in zip(names, counts, strict=False):
            for _ in range(count):
                rows.append((name, len([row for row in rows if row[0] == name]) + self.output[name], self.marks))
                self.marks += 1
        if rows:
            add(self.notes, *rows)
        in_use = sum(map(len, self.model.values()))
        by_name = sorted({name for name, _, _ in rows})
        for name, place, mark in rows[: 24 - in_use]:
            self.model[name].append((place, mark))
        for name in by_name:
            grown = sum(row[0] == name for row in rows)
            self.output[name] += grown

    @rule(name=consumes(texts), keep=st.booleans())
    def end(self, name: str, keep: bool) -> None:
        record = self.notes.end(name, range(self.output.pop(name)), keep=keep)
        expected = self.model.pop(name)
        if not keep or not expected:
            assert record is None
        else:
            assert record is not None
            assert list(zip(record.position.tolist(), (record.ids[:, 0] // 10).tolist(), strict=True)) == expected

    @invariant()
    def holds(self) -> None:
        self.notes.check_integrity()
        assert len(self.notes) == len(self.model)


class TestRecorder(RecorderMachine.TestCase):
    settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
