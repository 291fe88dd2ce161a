"""The buffer: who goes when it is full, who is drawn, what is held out; beside a model that keeps plain lists."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from adaserve_jax.distill.records import Record
from adaserve_jax.distill.updates import MIN_HELD_OUT, RecordBuffer, fair_limit
from adaserve_jax.errors import IntegrityError
from tests.distill.make_records import make_record


def numbers(records: list[Record]) -> list[int]:
    return [int(record.tokens[0]) for record in records]


def filled(counts: dict[str, int], *, capacity: int = 16, share: float = 0.5, held_out: bool = False) -> RecordBuffer:
    buffer = RecordBuffer(capacity, 1.0, share)
    number = 0
    for tenant, count in counts.items():
        for _ in range(count):
            buffer.add(make_record(number, tenant=tenant, held_out=held_out))
            number += 1
    return buffer


def test_held_out_records_have_a_ring_of_their_own():
    buffer = RecordBuffer(8, 0.125, 0.5)
    buffer.extend(make_record(number, held_out=True) for number in range(30))
    assert numbers(buffer.held_out()) == list(range(30 - MIN_HELD_OUT, 30))
    buffer.extend(make_record(number) for number in range(100, 200))
    assert buffer.num_held_out == MIN_HELD_OUT
    drawn = buffer.sample(np.random.default_rng(0), 100)
    assert sorted(numbers(drawn)) == list(range(192, 200))


def test_draws_differ_and_are_repeated_by_their_seed():
    buffer = filled({"": 16})
    draws = [numbers(buffer.sample(np.random.default_rng(seed), 8)) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert all(len(set(draw)) == 8 for draw in draws)


def test_every_record_is_drawn_equally_often():
    buffer = filled({"": 10})
    rng = np.random.default_rng(5)
    drawn = Counter(number for _ in range(2000) for number in numbers(buffer.sample(rng, 3)))
    assert max(abs(drawn[number] - 600) for number in range(10)) < 5 * np.sqrt(2000 * 0.3 * 0.7)


def test_no_client_has_more_than_its_share_of_a_draw_unless_the_others_have_no_more():
    buffer = filled({"ann": 30, "bob": 6}, capacity=64)
    rng = np.random.default_rng(0)
    for _ in range(20):
        assert Counter(record.tenant for record in buffer.sample(rng, 10)) == {"ann": 5, "bob": 5}
        assert Counter(record.tenant for record in buffer.sample(rng, 20)) == {"ann": 14, "bob": 6}
    assert len(buffer.sample(rng, 100)) == 36


def test_the_held_out_slice_obeys_the_share():
    buffer = filled({"ann": 60, "bob": 20, "cat": 10}, capacity=128, held_out=True)
    held_out = buffer.held_out()
    assert Counter(record.tenant for record in held_out) == {"ann": 30, "bob": 20, "cat": 10}
    assert [number for number in numbers(held_out) if number < 60] == list(range(30, 60))  # the latest of hers
    few = filled({"ann": 60, "bob": 1}, capacity=128, held_out=True)
    assert Counter(record.tenant for record in few.held_out()) == {"ann": MIN_HELD_OUT, "bob": 1}
    assert len(filled({"ann": 60}, capacity=128, held_out=True).held_out()) == 60


def test_held_out_records_that_came_since_are_those_still_there_that_were_added_last():
    buffer = filled({"ann": 20, "bob": 4}, held_out=True)
    assert numbers(buffer.held_out(5)) == [19, 20, 21, 22, 23]
    assert numbers(buffer.held_out(0)) == []
    buffer = filled({"ann": 4, "bob": 20}, capacity=128, held_out=True)
    assert numbers(buffer.held_out(22)) == [2, 3, *range(16, 24)]  # the share is of these
    assert numbers(filled({"": 20}, held_out=True).held_out(18)) == list(range(4, 20))  # two were evicted


@settings(max_examples=20)
@given(st.lists(st.integers(1, 60), max_size=6), st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]))
def test_fair_most_is_the_largest_that_keeps_the_share(counts: list[int], share: float):
    most = fair_limit(counts, share)
    if len(counts) < 2:
        assert most == max(counts, default=0)
        return

    def fair(bound: int) -> bool:
        kept = [min(count, bound) for count in counts]
        return max(kept) <= MIN_HELD_OUT or all(part <= share * sum(kept) for part in kept)

    assert fair(most)
    assert most == max(counts) or not any(fair(bound) for bound in range(most + 1, max(counts) + 1))


def test_a_record_in_the_wrong_ring_is_found():
    buffer = filled({"ann": 3})
    buffer._train.add(make_record(9, held_out=True))
    with pytest.raises(IntegrityError, match="lies among those to train on"):
        buffer.check_integrity()


class BufferMachine(RuleBasedStateMachine):
    """The buffer beside one list per ring, whose rules are said in words of the whole list."""

    CAPACITY, SHARE = 10, 0.4

    def __init__(self) -> None:
        super().__init__()
        self.buffer = RecordBuffer(self.CAPACITY, 0.9, self.SHARE)
        self.model: dict[bool, list[tuple[int, str]]] = {False: [], True: []}
        self.added = 0

    @rule(tenant=st.sampled_from(["", "ann", "bob"]), held_out=st.booleans(), times=st.integers(1, 6))
    def add(self, tenant: str, held_out: bool, times: int) -> None:
        for _ in range(times):
            self.buffer.add(make_record(self.added, tenant=tenant, held_out=held_out, num_tokens=3))
            self._model_add(self.model[held_out], 9 if held_out else self.CAPACITY, tenant)
            self.added += 1

    def _model_add(self, ring: list[tuple[int, str]], capacity: int, tenant: str) -> None:
        limit = int(self.SHARE * capacity)
        own = [entry for entry in ring if entry[1] == tenant]
        largest, most = max(Counter(name for _, name in ring).items(), key=lambda item: item[1], default=("", 0))
        if len(own) >= limit and len(own) < len(ring):
            ring.remove(own[0])
        elif len(ring) == capacity and largest != tenant and most > limit:
            ring.remove(next(entry for entry in ring if entry[1] == largest))
        elif len(ring) == capacity:
            ring.pop(0)
        ring.append((self.added, tenant))

    @rule(num=st.integers(1, 12), seed=st.integers(0, 9))
    def sample(self, num: int, seed: int) -> None:
        drawn = self.buffer.sample(np.random.default_rng(seed), num)
        assert len(drawn) == min(num, len(self.model[False]))
        assert len(set(numbers(drawn))) == len(drawn)
        assert {(int(record.tokens[0]), record.tenant) for record in drawn} <= set(self.model[False])

    @invariant()
    def holds(self) -> None:
        self.buffer.check_integrity()
        kept = [(int(record.tokens[0]), record.tenant) for record in self.buffer]
        assert kept == self.model[False] + self.model[True]


class TestBuffer(BufferMachine.TestCase):
    settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
