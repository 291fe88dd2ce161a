"""What is learned survives a restart: whole, the last two of it, and never into another draft."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from adaserve_jax.distill import checkpoint
from adaserve_jax.distill.checkpoint import KEPT, Snapshot
from adaserve_jax.distill.programs import TrainPrograms
from adaserve_jax.distill.records import pack
from adaserve_jax.distill.trainer import Trainer
from adaserve_jax.errors import CheckpointError
from tests.distill.made import SIZE, SMALL, assert_same, made_params, made_record

PARAMS = made_params(SMALL)


def some_batch(seed: int = 0):
    rng = np.random.default_rng(seed)
    (batch,) = pack([made_record(rng, SIZE - 2, 9)], SIZE, rng)
    return batch


def train(trainer: Trainer, steps: int) -> None:
    for step in range(steps):
        trainer.accumulate(some_batch(step))
        trainer.apply()


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir())


def test_training_goes_on_as_if_it_had_not_been_interrupted(programs: TrainPrograms, tmp_path: Path):
    trainer = Trainer(programs, PARAMS)
    train(trainer, 3)
    trainer.mark_good()
    train(trainer, 1)  # not good yet: not saved
    trainer.snapshot().save(tmp_path / "default", 1, {"version": 7, "centroid": [0.5, 1.0]})
    trainer.restore_good()
    train(trainer, 2)

    restarted = Trainer(programs, PARAMS)
    restarted.accumulate(some_batch(9))
    assert restarted.load(tmp_path / "default") == {"version": 7, "centroid": [0.5, 1.0]}
    train(restarted, 2)
    assert_same(restarted.weights(), trainer.weights())
    restarted.restore_good()
    trainer.restore_good()
    assert_same(restarted.weights(), trainer.weights())


def test_the_last_two_stay_and_steps_only_rise(programs: TrainPrograms, tmp_path: Path):
    trainer = Trainer(programs, PARAMS)
    for step, expected in [(1, [1]), (5, [1, 5]), (5, [5, 6]), (2, [6, 7])]:
        trainer.snapshot().save(tmp_path, step, {"step": step})
        assert steps_in(tmp_path) == expected
        assert len(expected) <= KEPT
    assert trainer.load(tmp_path) == {"step": 2}


def test_an_empty_or_absent_folder_holds_nothing(programs: TrainPrograms, tmp_path: Path):
    trainer = Trainer(programs, PARAMS)
    train(trainer, 1)
    before = trainer.weights()
    assert trainer.load(tmp_path) is None
    assert trainer.load(tmp_path / "absent") is None
    assert not (tmp_path / "absent").exists()
    assert_same(trainer.weights(), before)


def test_a_broken_checkpoint_gives_way_to_the_one_before(programs: TrainPrograms, tmp_path: Path, caplog):
    trainer = Trainer(programs, PARAMS)
    for step in (1, 2, 3):
        trainer.snapshot().save(tmp_path, step, {"step": step})
    about = tmp_path / "3" / "about" / "metadata"
    chunk = max((tmp_path / "3" / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    for path, content in [
        (about, about.read_bytes().replace(b'"content"', b'"other"')),
        (about, about.read_bytes().replace(b'"meta"', b'"other"')),
        (about, about.read_bytes().replace(b'"content": ', b'"content": 1')),
        (chunk, chunk.read_bytes()[::-1]),
        (chunk, b"broken"),
        (chunk, None),
    ]:
        path.unlink() if content is None else path.write_bytes(content)
        with caplog.at_level(logging.WARNING):
            assert trainer.load(tmp_path) == {"step": 2}
        assert "checkpoint 3 was changed since" in caplog.text or "checkpoint 3 cannot be read" in caplog.text
        caplog.clear()
    for path in tmp_path.glob("*/about/metadata"):
        path.write_bytes(b"{")
    with pytest.raises(CheckpointError, match="none of its 2 checkpoints can be read; move it away to begin anew"):
        trainer.load(tmp_path)


def test_what_a_killed_process_left_and_files_of_others_are_no_checkpoints(programs: TrainPrograms, tmp_path: Path):
    trainer = Trainer(programs, PARAMS)
    trainer.snapshot().save(tmp_path, 4, {"step": 4})
    shutil.copytree(tmp_path / "4", tmp_path / "5.orbax-checkpoint-tmp")
    shutil.rmtree(tmp_path / "5.orbax-checkpoint-tmp" / "state")
    (tmp_path / "records.npz").write_bytes(b"records")
    (tmp_path / "records").mkdir()
    assert trainer.load(tmp_path) == {"step": 4}
    trainer.snapshot().save(tmp_path, 5, {"step": 5})
    assert trainer.load(tmp_path) == {"step": 5}
    assert (tmp_path / "records.npz").exists() and (tmp_path / "records").exists()


def test_what_was_learned_elsewhere_is_refused_and_nothing_changes(programs: TrainPrograms, tmp_path: Path):
    Trainer(programs, PARAMS).snapshot().save(tmp_path, 1, {})
    other = Trainer(programs, PARAMS | {"norm": PARAMS["norm"] + 1})
    train(other, 1)
    before = other.weights()
    expected = "learned from other draft weights than those given; give the draft that it began with, in the same type"
    with pytest.raises(CheckpointError, match=expected):
        other.load(tmp_path)
    assert_same(other.weights(), before)
    snapshot = other.snapshot()
    Snapshot(snapshot.draft, 4, snapshot.arrays).save(tmp_path / "rank", 1, {})
    with pytest.raises(CheckpointError, match=r"updates of rank 4 \(0: none\), and the rank given is 0; give that"):
        other.load(tmp_path / "rank")
    name = next(iter(snapshot.arrays))
    Snapshot(snapshot.draft, 0, snapshot.arrays | {name: snapshot.arrays[name][1:]}).save(tmp_path / "shape", 1, {})
    with pytest.raises(CheckpointError, match=r"is of shape \[.*\], expected \["):
        other.load(tmp_path / "shape")
    Snapshot(snapshot.draft, 0, snapshot.arrays | {name: snapshot.arrays[name] * np.nan}).save(tmp_path / "nan", 1, {})
    with pytest.raises(CheckpointError, match="holds values that are not finite"):
        other.load(tmp_path / "nan")


def test_a_format_of_later_is_refused(programs: TrainPrograms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_FORMAT", 2)
        Trainer(programs, PARAMS).snapshot().save(tmp_path, 1, {})
    with pytest.raises(CheckpointError, match="expected format 1, got 2; take another folder"):
        Trainer(programs, PARAMS).load(tmp_path)


def test_what_was_learned_from_another_target_is_refused(programs: TrainPrograms, tmp_path: Path):
    Trainer(programs, PARAMS, "a" * 64).snapshot().save(tmp_path / "known", 1, {"step": 1})
    Trainer(programs, PARAMS).snapshot().save(tmp_path / "unknown", 1, {"step": 1})
    with pytest.raises(
        CheckpointError, match=r"another target \(fingerprint a{12}\) than the one given \(b{12}\); give"
    ):
        Trainer(programs, PARAMS, "b" * 64).load(tmp_path / "known")
    for target, folder in (("a" * 64, "known"), ("", "known"), ("b" * 64, "unknown")):
        assert Trainer(programs, PARAMS, target).load(tmp_path / folder) == {"step": 1}


@pytest.mark.slow
def test_low_rank_checkpoints_hold_the_updates_only(low_rank_programs: TrainPrograms, tmp_path: Path):
    params = {name: each.astype(low_rank_programs.dtype) for name, each in PARAMS.items()}
    trainer = Trainer(low_rank_programs, params)
    train(trainer, 3)
    trainer.mark_good()
    arrays = trainer.snapshot().arrays
    updated = {name for name, each in params.items() if each.ndim == 2} - {"embed"}
    assert len(arrays) == 3 * 2 * len(updated) + 1  # each with two moments, and the optimiser's count
    trainer.snapshot().save(tmp_path, 1, {})
    restarted = Trainer(low_rank_programs, params)
    restarted.load(tmp_path)
    assert_same(restarted.weights(), trainer.weights())


def test_a_snapshot_is_written_by_another_thread_while_training_goes_on(programs: TrainPrograms, tmp_path: Path):
    trainer = Trainer(programs, PARAMS)
    train(trainer, 1)
    trainer.mark_good()
    snapshot, expected = trainer.snapshot(), trainer.weights()
    writer = threading.Thread(target=snapshot.save, args=(tmp_path, 1, {}))
    writer.start()
    train(trainer, 3)
    trainer.mark_good()
    writer.join()
    trainer.load(tmp_path)
    assert_same(trainer.weights(), expected)


def test_a_folder_that_cannot_be_written_is_named(programs: TrainPrograms, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file/default: cannot write a checkpoint .*; check that folder"):
        Trainer(programs, PARAMS).snapshot().save(tmp_path / "file" / "default", 1, {})
