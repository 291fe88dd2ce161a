"""Kept records: what is written comes back, and what is broken is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adaserve_jax.distill.checkpoint import RecordFormat
from adaserve_jax.distill.records import Record
from adaserve_jax.distill.updates import RecordBuffer
from adaserve_jax.errors import CheckpointError
from tests.distill.make_records import make_record

FORMAT = RecordFormat(top_k=3, vocab_size=1000)
PARTS = ("tokens", "position", "ids", "log_p")


def same(one: Record, other: Record) -> bool:
    arrays = all(np.array_equal(getattr(one, part), getattr(other, part)) for part in PARTS)
    types = all(getattr(one, part).dtype == getattr(other, part).dtype for part in PARTS)
    return arrays and types and (one.tenant, one.held_out) == (other.tenant, other.held_out)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records.npz"


@given(st.lists(st.tuples(st.integers(2, 30), st.sampled_from(["", "ann", "ö\0"]), st.booleans()), max_size=5))
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_comes_back(path: Path, kinds: list[tuple[int, str, bool]]):
    records = [
        make_record(number, num_tokens=num_tokens, tenant=tenant, held_out=held_out)
        for number, (num_tokens, tenant, held_out) in enumerate(kinds)
    ]
    FORMAT.save(path, records)
    loaded = FORMAT.load(path, draft=2)
    assert len(loaded) == len(records)
    assert all(same(one, other) and other.draft == 2 for one, other in zip(records, loaded, strict=True))
    assert all(getattr(record, part).base is None for record in loaded for part in PARTS)  # keeps nothing of the others


def test_a_buffer_goes_on_where_it_was(path: Path):
    before = RecordBuffer(16, 0.5, 1.0)
    before.extend(make_record(number, held_out=number % 3 == 0) for number in range(40))
    FORMAT.save(path, before)
    after = RecordBuffer(16, 0.5, 1.0)
    after.extend(FORMAT.load(path))
    after.check_integrity()
    assert all(same(one, other) for one, other in zip(before, after, strict=True))
    assert (len(after), after.num_held_out) == (24, 8)


def test_only_the_owner_reads_the_file_and_nothing_is_left_beside_it(path: Path):
    FORMAT.save(path, [make_record()])
    FORMAT.save(path, [make_record(1)])
    assert path.stat().st_mode & 0o777 == 0o600 and list(path.parent.iterdir()) == [path]


def test_fewer_tokens_per_row_are_read_as_they_are_asked_for(path: Path):
    record = make_record()
    FORMAT.save(path, [record])
    (loaded,) = RecordFormat(2, 1000).load(path)
    assert np.array_equal(loaded.ids, record.ids[:, :2]) and np.array_equal(loaded.log_p, record.log_p[:, :2])
    with pytest.raises(CheckpointError, match=r"kept records must have 4 tokens per row \(learn_top_k\), got 3;"):
        RecordFormat(4, 1000).load(path)
    with pytest.raises(CheckpointError, match="token ids below 10, the size of the vocabulary"):
        RecordFormat(3, 10).load(path)


def test_records_of_another_target_or_temperature_are_not_taken(path: Path):
    here = RecordFormat(3, 1000, "a" * 64, 1.0)
    here.save(path, [make_record()])
    for other, message in (
        (RecordFormat(3, 1000, "b" * 64, 1.0), "of target a{12}, which is now b{12}; they are left out"),
        (RecordFormat(3, 1000, "a" * 64, 0.5), r"of temperature 1\.0, which is now 0\.5; they are left out"),
    ):
        with pytest.raises(CheckpointError, match=message):
            other.load(path)
    for same in (here, FORMAT):
        assert len(same.load(path)) == 1
    FORMAT.save(path, [make_record()])  # of what nobody said
    assert len(here.load(path)) == 1


def test_a_file_that_is_none_is_told(path: Path):
    with pytest.raises(CheckpointError, match=r"records\.npz: cannot read the kept records"):
        RecordFormat(3, 10).load(path)
    FORMAT.save(path, [make_record()])
    whole = path.read_bytes()
    for content in (b"", b"hello", whole[: len(whole) // 2], whole[:100] + b"\0" * 50 + whole[150:]):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="delete it to go on without"):
            FORMAT.load(path)
    FORMAT.save(path, [make_record()])
    with np.load(path) as file:
        arrays = dict(file) | {"head": np.frombuffer(b"[" * 100_000, np.uint8)}
    np.savez(path, **arrays)
    with pytest.raises(CheckpointError, match="cannot read the kept records"):
        FORMAT.load(path)
    np.savez(path, head=np.array([{}], object))
    with pytest.raises(CheckpointError, match="cannot read"):
        FORMAT.load(path)


def _head(changed: dict[str, Any]) -> np.ndarray:
    head = {"version": 1, "top_k": 3, "tenants": ["", ""]} | changed
    return np.frombuffer(json.dumps(head).encode(), np.uint8)


BROKEN = {
    "version": ({"head": _head({"version": 2})}, "records of version 1"),
    "tenants": ({"head": _head({"tenants": [1, 2]})}, "a tenant of each record"),
    "too few": ({"head": _head({"tenants": [""]})}, "a tenant of each record"),
    "type": ({"tokens": np.zeros(12, np.float64)}, "tokens of type int32, got float64"),
    "lengths": ({"num_tokens": np.array([6, 7])}, "as many tokens and rows as its records have"),
    "negative": ({"num_tokens": np.array([-1, 13])}, "as many tokens and rows as its records have"),
    "ids": ({"ids": np.zeros((9, 2), np.int32), "log_p": np.zeros((9, 3), np.float32)}, r"as many|ids and log_p"),
    "no number": ({"log_p": np.nan}, "finite logs of probabilities"),
    "above one": ({"log_p": 2.0}, "finite logs of probabilities"),
    "order": ({"position": 0}, "positions increase|one there"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_fit_is_told(path: Path, name: str):
    FORMAT.save(path, [make_record(1), make_record(2)])
    changed, message = BROKEN[name]
    with np.load(path) as file:
        arrays = dict(file)
    for part, value in changed.items():
        arrays[part] = value if np.ndim(value) else np.full_like(arrays[part], value)
    np.savez(path, **arrays)
    with pytest.raises(CheckpointError, match=message):
        FORMAT.load(path)
