"""From records to versions: what is learned serves, what is worse does not, and what became worse is taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from adaserve_jax.distill import updates as updates_module
from adaserve_jax.distill.programs import TrainPrograms
from adaserve_jax.distill.records import Record, pack
from adaserve_jax.distill.trainer import Trainer
from adaserve_jax.distill.updates import PROBATION_RECORDS
from tests.distill.bigrams import LEARN, LENGTH, NUM_TOKENS, VOCAB, Language, Served, programs_of


@pytest.fixture(scope="module")
def programs() -> TrainPrograms:
    return programs_of()


def same(one: dict, other: dict) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


def test_drafts_learn_what_is_served(programs: TrainPrograms):
    served, language = Served(programs), Language(1)
    done = served.take(language.records(160))
    updates = served.updates
    assert updates.version == updates.updates == len(served.versions) > 10
    assert updates.refused == updates.rolled_back == 0
    assert updates.acceptance is not None and updates.acceptance > 0.6
    assert set(done) == {"pack", "accumulate", "apply", "check", "copy", "publish"}
    assert done.count("apply") == LEARN.learn_steps * updates.updates
    assert not same(served.versions[0], served.versions[-1])


def test_an_update_waits_for_new_records_and_for_one_to_be_checked_by(programs: TrainPrograms):
    served, language = Served(programs), Language(1)
    assert served.take([language.record() for _ in range(20)]) == []
    assert served.take([language.record(held_out=True)]) != []
    assert served.updates.version == 1
    assert served.take([language.record() for _ in range(LEARN.learn_every - 1)]) == []
    assert "publish" in served.take([language.record()])
    assert served.updates.version == 2


def test_held_out_records_are_never_trained_on(programs: TrainPrograms):
    """Held-out texts in another language than the others: acceptance on them stays where it was, about."""
    served, one, other = Served(programs, replace(LEARN, learn_tolerance=1.0)), Language(1), Language(2)
    for _ in range(8):
        served.take([*(one.record() for _ in range(8)), other.record(held_out=True)])
    assert served.updates.version > 4
    assert served.updates.acceptance is not None and served.updates.acceptance < 0.4


def test_no_number_serves(programs: TrainPrograms):
    """Rows that are no distribution, as if nobody had kept them out: the gradient is refused, and learning goes on."""
    served, language = Served(programs), Language(1)
    served.take(language.records(16))
    version, weights = served.updates.version, served.versions[-1]
    served.take([replace(language.record(), log_p=np.full((LENGTH - 1, VOCAB), np.nan)) for _ in range(64)])
    updates = served.updates
    assert updates.refused > 0 and updates.version == version
    assert same(updates.trainer.weights(), weights)


@pytest.mark.slow
def test_a_client_with_wrong_rows_changes_nothing_for_the_others(programs: TrainPrograms):
    """One client's texts, and its share of the held-out ones, are in a language that contradicts the others' at every
    token. Drafts that learned it would do better over all, and worse for everybody else."""
    served, language, poison = Served(programs), Language(1), Language(99)
    served.take(language.records(120, tenant="honest"))
    updates, honest = served.updates, [language.record(tenant="honest") for _ in range(8)]
    before = acceptance_on(updates.trainer, honest)
    assert before > 0.6
    served.take([poison.record(tenant="client", held_out=index % 4 == 3) for index in range(160)])
    assert {record.tenant for record in updates.buffer.held_out()} == {"honest", "client"}
    assert updates.refused > 0
    updates.settle()
    assert same(updates.trainer.weights(), served.versions[-1])
    assert acceptance_on(updates.trainer, honest) > before - 2 * LEARN.learn_tolerance


def acceptance_on(trainer: Trainer, records: list[Record]) -> float:
    scores = [trainer.evaluate(batch) for batch in pack(records, NUM_TOKENS, np.random.default_rng(0))]
    return sum(each.overlap_sum for each in scores) / sum(each.weight for each in scores)


def test_a_version_that_turns_out_worse_is_taken_back(programs: TrainPrograms):
    """It serves since it does well on the latest held-out texts, which are in a new language; the next ones are in the
    old one again. Its number is not used twice."""
    served, old = Served(programs, SHORT), Language(1)
    updates, version = served.updates, on_probation(served, old)
    worse, weights = updates.version, served.versions[-2]
    assert updates.good_version == version and updates.rolled_back == 0
    done = served.take([old.record(held_out=True) for _ in range(PROBATION_RECORDS)])
    assert done[-2:] == ["copy", "publish"]
    assert (updates.version, updates.rolled_back) == (version, 1)
    assert same(served.versions[-1], weights)
    served.take(old.records(64))
    assert updates.version > worse


def test_only_records_that_came_since_decide_on_a_version(programs: TrainPrograms):
    """The ring is still full of texts in the new language, by which the version came to serve."""
    served, old = Served(programs, SHORT), Language(1)
    updates, version = served.updates, on_probation(served, old)
    served.take([Language(3).record() for _ in range(SHORT.learn_every - 1)])
    assert updates.version > version
    for _ in range(PROBATION_RECORDS):
        updates.add(old.record(held_out=True))
    assert list(updates.run())[-1] == "publish"
    assert (updates.version, updates.rolled_back) == (version, 1)


@pytest.mark.parametrize("last", [pytest.param("copy", marks=pytest.mark.slow), "publish"])
@pytest.mark.slow
def test_a_version_that_was_found_worse_is_not_kept_at_the_end(programs: TrainPrograms, last: str):
    served, old = Served(programs, SHORT), Language(1)
    updates, version = served.updates, on_probation(served, old)
    weights = served.versions[-2]
    for _ in range(PROBATION_RECORDS):
        updates.add(old.record(held_out=True))
    for kind in updates.run():
        if kind == last:
            break
    assert updates.version > version == updates.good_version
    updates.settle()
    assert (updates.version, updates.good_version, updates.rolled_back) == (version, version, 1)
    assert same(served.versions[-1], weights) and same(updates.trainer.weights(), weights)


def test_nothing_is_done_before_it_is_announced(programs: TrainPrograms, monkeypatch: pytest.MonkeyPatch):
    """Each call says which it is of, so none can hide in the time of another."""
    served, language, done = Served(programs), Language(1), []
    updates = served.updates
    parts = {
        (updates.buffer, "sample"): "pack", (updates_module, "pack"): "pack",
        (updates_module, "group_by_tenant"): "pack",
        (updates.trainer, "accumulate"): "accumulate", (updates.trainer, "apply"): "apply",
        (updates.trainer, "evaluate"): "check", (updates.trainer, "mark_good"): "copy",
        (updates.trainer, "restore_good"): "copy", (updates.trainer, "weights"): "publish",
    }  # fmt: skip
    for (owner, name), kind in parts.items():
        monkeypatch.setattr(owner, name, noted(getattr(owner, name), kind, done))
    for record in language.records(48) + Language(2).records(16) + language.records(32):
        updates.add(record)
        while updates.due:
            run, announced = updates.run(), None
            while True:
                kind = next(run, None)
                assert set(done) <= {announced}
                done.clear()
                if kind is None:
                    break
                announced = kind
    assert updates.updates > 4


def noted(call: Callable[..., Any], kind: str, done: list[str]) -> Callable[..., Any]:
    def noting(*arguments: Any, **options: Any) -> Any:
        done.append(kind)
        return call(*arguments, **options)

    return noting


SHORT = replace(LEARN, learn_buffer=8)


def on_probation(served: Served, old: Language) -> int:
    """Have a version serve that learned another language than the one before. Returns the number of that."""
    updates, new = served.updates, Language(2)
    served.take(old.records(161))
    version = updates.version
    for record in new.records(8) + [new.record(held_out=True) for _ in range(8)]:
        updates.add(record)
    while updates.version == version:
        assert list(updates.run())
    return version


def test_an_update_can_be_left(programs: TrainPrograms):
    served, language = Served(programs), Language(1)
    served.take(language.records(48))
    updates, weights = served.updates, served.versions[-1]
    updates._confirm()
    for record in language.records(8):
        updates.add(record)
    run = updates.run()
    assert [next(run) for _ in range(8)].count("apply") >= 1
    assert not same(updates.trainer.weights(), weights)
    updates.settle()
    assert same(updates.trainer.weights(), weights)
    assert updates.state()["version"] == updates.version


@pytest.mark.slow
def test_drafts_of_one_shape_share_programs_and_nothing_else(programs: TrainPrograms):
    code, maths = Served(programs, name="code"), Served(programs, name="maths")
    code.take(Language(1).records(120))
    maths.take(Language(2).records(120))
    texts = [Language(1).record(), Language(2).record()]
    found = [[acceptance_on(served.updates.trainer, [text]) for text in texts] for served in (code, maths)]
    assert min(found[0][0], found[1][1]) > 0.6
    assert max(found[0][1], found[1][0]) < 0.4
