"""What was learned, on disk: what is written when, what is read again, and what is removed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaserve_jax.distill.checkpoint import RecordFormat, Snapshot
from adaserve_jax.distill.learner import RECORDS, SAVE_EVERY_S, TOPICS, CheckpointSaver
from adaserve_jax.distill.programs import TrainPrograms
from adaserve_jax.distill.routing import MIN_PROMPTS, DraftRouter
from adaserve_jax.errors import CheckpointError, ConfigError
from tests.clock import Clock
from tests.distill.bigrams import VOCAB, Language, Served, programs_of
from tests.slow import slow_after
from tests.waiting import wait_until

NAMES = ("default", "code")
EMBEDDING = np.array([[1, 0], [0, 0], [-1, 0]], np.float32)


@pytest.fixture(scope="module")
def programs() -> TrainPrograms:
    return programs_of()


def topics() -> DraftRouter:
    return DraftRouter(NAMES, "topic", embedding=EMBEDDING)


def taught() -> DraftRouter:
    router = topics()
    for _ in range(MIN_PROMPTS):
        router.learn("code", [0])
    return router


def drafts_of(programs: TrainPrograms) -> list[Served]:
    return [Served(programs, name=name) for name in NAMES]


def keeper_of(folder: Path, served: list[Served], clock: Clock | None = None, **options: Any) -> CheckpointSaver:
    keeper = CheckpointSaver(folder, [each.updates for each in served], clock or Clock(0.0), **options)
    keeper.load()
    return keeper


def written(keeper: CheckpointSaver) -> None:
    wait_until(lambda: keeper.idle_for_s != 0.0)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.slow
def test_topics_are_kept_whether_or_not_drafts_learn(programs: TrainPrograms, tmp_path: Path) -> None:
    folder, clock, router = tmp_path / "learned", Clock(0.0), taught()
    keeper = keeper_of(folder, drafts_of(programs), clock, topics=router)
    clock.now_s = SAVE_EVERY_S
    keeper.save_if_due()
    written(keeper)
    assert json.loads((folder / TOPICS).read_text()) == router.to_state()
    assert mode_of(folder / TOPICS) == 0o600
    assert mode_of(folder) == mode_of(folder / "code") == 0o700
    router.learn("code", [2])
    keeper.close()
    again = topics()
    keeper_of(folder, drafts_of(programs), topics=DraftRouter(NAMES)).close()  # for once without topics
    keeper_of(folder, drafts_of(programs), topics=again).close()
    assert again.to_state() == router.to_state() != topics().to_state()


@pytest.mark.parametrize(
    "content", slow_after(1, ['{"version": 1, "embedding": "other", "topics": {}}', "", "[1]", "nothing"])
)
def test_broken_topics_are_learned_anew(
    programs: TrainPrograms, tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / TOPICS).write_text(content)
    router = topics()
    keeper = keeper_of(tmp_path, drafts_of(programs), topics=router)
    assert router.to_state() == topics().to_state()
    assert "learned anew" in caplog.text
    router.learn("code", [0])
    keeper.close()
    assert json.loads((tmp_path / TOPICS).read_text()) == router.to_state()


def test_no_text_stays_that_is_not_to_be_kept(programs: TrainPrograms, tmp_path: Path) -> None:
    served = drafts_of(programs)
    served[0].take(Language(1).records(16))
    records = RecordFormat(VOCAB, VOCAB, "target", 1.0)
    keeper_of(tmp_path, served, records=records).close()
    file, cut_off = tmp_path / "default" / RECORDS, tmp_path / "default" / f".{RECORDS}.abc"
    assert file.exists()
    cut_off.write_bytes(b"half of it")
    again = drafts_of(programs)
    keeper_of(tmp_path, again, records=records).close()
    assert len(again[0].updates.buffer) == 16 and file.exists() and not cut_off.exists()
    cut_off.write_bytes(b"half of it")
    keeper_of(tmp_path, drafts_of(programs)).close()
    assert not list(tmp_path.rglob(f"*{RECORDS}*"))


def test_folders_that_cannot_be_used_or_hold_something_else_are_named(programs: TrainPrograms, tmp_path: Path) -> None:
    """The second one is what `adaserve distill` kept of a run that was stopped."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"learn_folder: .*file/x/default cannot be made ready \(.*; choose another"):
        keeper_of(tmp_path / "file" / "x", drafts_of(programs))
    served = drafts_of(programs)
    served[0].updates.trainer.snapshot().save(tmp_path / "default", 1, {"rounds": 3})
    expected = r"default: its checkpoint is not one of a draft that learned while it served \(KeyError\('version'\)\)"
    with pytest.raises(CheckpointError, match=expected):
        keeper_of(tmp_path, drafts_of(programs))


def test_a_folder_has_one_engine_that_learns(programs: TrainPrograms, tmp_path: Path) -> None:
    keeper = keeper_of(tmp_path, drafts_of(programs))
    with pytest.raises(ConfigError, match=r"another engine learns into .*/default; end it, or choose another folder"):
        keeper_of(tmp_path, drafts_of(programs))
    keeper.close()
    keeper_of(tmp_path, drafts_of(programs)).close()


def test_what_is_new_can_wait_until_it_is_due(programs: TrainPrograms, tmp_path: Path) -> None:
    served, clock = drafts_of(programs), Clock(0.0)
    keeper = keeper_of(tmp_path, served, clock)
    assert keeper.idle_for_s is None
    served[0].take(Language(1).records(64))
    assert served[0].updates.good_version > 0
    clock.now_s = 20.0
    keeper.save_if_due()
    assert keeper.idle_for_s == SAVE_EVERY_S - 20.0
    clock.now_s = SAVE_EVERY_S
    assert keeper.idle_for_s == 0
    keeper.save_if_due()
    written(keeper)
    assert keeper.idle_for_s is None
    keeper.close()


def test_one_draft_is_copied_and_written_after_the_other(
    programs: TrainPrograms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, clock, order = drafts_of(programs), Clock(0.0), []
    keeper = keeper_of(tmp_path, served, clock)
    for each in served:
        each.take(Language(1).records(64))
        trainer = each.updates.trainer
        monkeypatch.setattr(trainer, "snapshot", partial(copied, trainer.snapshot, order))
    save = Snapshot.save
    monkeypatch.setattr(Snapshot, "save", lambda *args: order.append("write") or save(*args))
    clock.now_s = SAVE_EVERY_S
    keeper.save_if_due()
    wait_until(lambda: order == ["copy", "write"] and not keeper.is_copying)  # the other may be trained meanwhile
    wait_until(lambda: keeper.save_if_due() or keeper.idle_for_s != 0.0)
    assert order == ["copy", "write"] * 2
    keeper.close()
    assert order == ["copy", "write"] * 4, "those on probation are confirmed by the end"
    again = drafts_of(programs)
    keeper_of(tmp_path, again).close()
    assert [each.updates.version for each in again] == [each.updates.version for each in served]


def copied(snapshot: Callable[[], Snapshot], order: list[str]) -> Snapshot:
    order.append("copy")
    return snapshot()


def test_a_folder_that_cannot_be_written_is_asked_again_later(
    programs: TrainPrograms, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served, clock = drafts_of(programs), Clock(0.0)
    keeper = keeper_of(tmp_path, served, clock)
    served[0].take(Language(1).records(64))
    clock.now_s = SAVE_EVERY_S
    folder, away = tmp_path / "default", tmp_path / "away"
    folder.rename(away)
    folder.touch()  # nothing can be written in it
    keeper.save_if_due()
    written(keeper)
    folder.unlink()
    away.rename(folder)
    assert "what draft default learned could not be written" in caplog.text
    assert keeper.idle_for_s == SAVE_EVERY_S and not keeper.is_copying
    keeper.close()
    again = drafts_of(programs)
    keeper_of(tmp_path, again).close()
    assert again[0].updates.version == served[0].updates.version > 0


def test_a_copy_that_fails_is_logged_and_learning_goes_on(
    programs: TrainPrograms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served, clock = drafts_of(programs), Clock(0.0)
    keeper = keeper_of(tmp_path, served, clock)
    served[0].take(Language(1).records(64))
    clock.now_s = SAVE_EVERY_S
    with monkeypatch.context() as patch:
        patch.setattr(served[0].updates.trainer, "snapshot", lambda: 1 // 0)
        keeper.save_if_due()
        written(keeper)
    assert "ZeroDivisionError" in caplog.text and not keeper.is_copying
    keeper.close()


def test_the_checkpoint_is_written_before_the_records(
    programs: TrainPrograms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, clock, order = drafts_of(programs), Clock(0.0), []
    keeper = keeper_of(tmp_path, served, clock, records=RecordFormat(VOCAB, VOCAB, "target", 1.0))
    served[0].take(Language(1).records(64))
    monkeypatch.setattr(Snapshot, "save", lambda *_: order.append("checkpoint"))
    monkeypatch.setattr(RecordFormat, "save", lambda *_: order.append("records"))
    clock.now_s = SAVE_EVERY_S
    keeper.save_if_due()
    written(keeper)
    assert order == ["checkpoint", "records"]
    keeper.close()
    assert order == ["checkpoint", "records"] * 2 + ["records"], "each draft's records once, as they are at the end"


def test_one_draft_that_cannot_be_left_keeps_nothing_from_being_written(
    programs: TrainPrograms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = drafts_of(programs)
    keeper = keeper_of(tmp_path, served)
    for each in served:
        each.take(Language(1).records(64))
    monkeypatch.setattr(served[0].updates, "settle", lambda: 1 // 0)
    good = [each.updates.good_version for each in served]
    assert served[1].updates.version > good[1] > 0  # the last one is on probation, and confirmed by the end
    keeper.close()
    assert "could not be left" in caplog.text
    again = drafts_of(programs)
    keeper_of(tmp_path, again).close()
    assert [each.updates.version for each in again] == [good[0], served[1].updates.version]
    with pytest.raises(RuntimeError, match="after shutdown"):
        keeper._writer.submit(int)
