"""Training in micro-steps: optimiser steps against float64 by hand, refusal of what is no number, and going back."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from adaserve_jax.distill.programs import TrainPrograms
from adaserve_jax.distill.records import PackedBatch, pack
from adaserve_jax.distill.trainer import Scores, Trainer
from adaserve_jax.errors import ConfigError
from adaserve_jax.runtime.compile import CompileCounter
from tests.distill.conftest import LEARN
from tests.distill.made import SIZE, SMALL, as_texts, assert_close, assert_same, float64, made_params, made_record
from tests.oracles import training as oracle

PARAMS = made_params(SMALL)


def made_batches(seed: int = 0, count: int = 2, rows: int = 9) -> tuple[list, list[PackedBatch]]:
    rng = np.random.default_rng(seed)
    records = [made_record(rng, SIZE - 2, rows + index) for index in range(count)]
    return records, pack(records, SIZE, rng)


def train(trainer: Trainer, batches: list[PackedBatch]):
    for batch in batches:
        trainer.accumulate(batch)
    return trainer.apply()


def test_steps_are_those_of_adam_on_the_mean_over_all_rows_of_all_micro_steps(programs: TrainPrograms):
    trainer, weights = Trainer(programs, PARAMS), float64(PARAMS)
    moments = tuple({name: np.zeros_like(each) for name, each in weights.items()} for _ in range(2))
    norms = []
    for step, (seed, few) in enumerate(((1, 9), (2, 9), (4, 1)), 1):  # the mean over few rows is long
        records, batches = made_batches(seed, rows=few)
        assert len(batches) == 2
        applied = train(trainer, batches)
        draft, texts = oracle.Draft(SMALL, weights), as_texts(records)
        rows = sum(len(each.position) for each in records)
        mean = {name: each / rows for name, each in draft.gradient(texts, "kl", 0, 1).items()}
        np.testing.assert_allclose(applied.loss, draft.loss(texts, "kl", 0, 1)[0] / rows, rtol=1e-4)
        norm = np.sqrt(sum((each**2).sum() for each in mean.values()))
        np.testing.assert_allclose(applied.grad_norm, norm, rtol=1e-4)
        norms.append(norm)
        weights, moments = oracle.adam_step(weights, mean, moments, step, LEARN.learn_rate, clip=1.0)
    assert min(norms) < 1 < max(norms)  # some are shortened
    moved = {name: each - np.asarray(PARAMS[name]) for name, each in weights.items()}
    found = {name: np.asarray(each) - np.asarray(PARAMS[name]) for name, each in trainer.weights().items()}
    assert_close(found, moved, relative=0.02)  # Adam divides small gradients by themselves


def test_a_step_with_a_share_of_the_rate_goes_that_share_of_the_way(programs: TrainPrograms):
    moved = []
    for share in (1.0, 0.25):
        trainer = Trainer(programs, PARAMS)
        trainer.accumulate(made_batches()[1][0])
        trainer.apply(share)
        moved.append({name: float64(trainer.weights())[name] - each for name, each in float64(PARAMS).items()})
    assert_close(moved[1], {name: each / 4 for name, each in moved[0].items()}, relative=1e-3)


def test_scores_are_sums_over_rows_of_the_weights_asked_for(programs: TrainPrograms):
    trainer = Trainer(programs, PARAMS)
    records, batches = made_batches(7)
    before = sum((trainer.evaluate(batch) for batch in batches), Scores(0, 0, 0))
    loss, overlap = oracle.Draft(SMALL, float64(PARAMS)).loss(as_texts(records), "kl", 0, 1)
    np.testing.assert_allclose((before.overlap_sum, before.loss_sum, before.weight), (overlap, loss, 9 + 10), rtol=1e-4)
    for _ in range(20):
        train(trainer, batches)
    after = sum((trainer.evaluate(batch) for batch in batches), Scores(0, 0, 0))
    good = sum((trainer.evaluate(batch, good=True) for batch in batches), Scores(0, 0, 0))
    assert good == before
    assert after.loss_sum < 0.9 * before.loss_sum
    assert after.overlap_sum > before.overlap_sum


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_no_number_changes_nothing_and_training_goes_on(programs: TrainPrograms, poison: float):
    poisoned, clean = Trainer(programs, PARAMS), Trainer(programs, PARAMS)
    _, batches = made_batches(1)
    for trainer in (poisoned, clean):
        assert train(trainer, batches).finite
    before = poisoned.weights()
    _, (bad, fine) = made_batches(2)
    bad.log_p[0, 0] = poison
    assert not train(poisoned, [fine, bad]).finite
    assert_same(poisoned.weights(), before)
    assert not poisoned.apply().finite  # no rows
    assert train(poisoned, batches) == train(clean, batches)
    assert_same(poisoned.weights(), clean.weights())


def test_going_back_brings_weights_and_optimiser_and_drops_what_was_begun(programs: TrainPrograms):
    trainer = Trainer(programs, PARAMS)
    _, batches = made_batches(1)
    train(trainer, batches)
    trainer.mark_good()
    good = trainer.weights()
    first = [train(trainer, batches) for _ in range(2)], trainer.weights()
    trainer.accumulate(batches[0])
    for _ in range(2):  # as often as one likes
        trainer.restore_good()
        assert_same(trainer.weights(), good)
        again = [train(trainer, batches) for _ in range(2)], trainer.weights()
        assert first[0] == again[0]
        assert_same(first[1], again[1])


def test_weights_that_serve_share_no_memory_with_those_in_training(programs: TrainPrograms):
    given = {name: each.copy() for name, each in PARAMS.items()}
    trainer = Trainer(programs, given)
    served = trainer.weights()
    assert_same(served, PARAMS)
    _, batches = made_batches(1)
    train(trainer, batches)
    again = trainer.weights()
    train(trainer, batches)
    assert_same(served, PARAMS)
    assert_same(given, PARAMS)
    places = [each.unsafe_buffer_pointer() for params in (given, served, again) for each in params.values()]
    assert len(set(places)) == len(places)
    for params in (given, served, again):  # an engine may free what it served
        for each in params.values():
            each.delete()
    trainer.restore_good()
    assert_same(trainer.weights(), PARAMS)


def test_nothing_compiles_once_programs_are_ready(programs: TrainPrograms):
    counter = CompileCounter()
    _, batches = made_batches(1)
    with counter:
        trainer = Trainer(programs, PARAMS)
        train(trainer, batches)
        trainer.evaluate(batches[0])
        trainer.mark_good()
        trainer.restore_good()
        trainer.weights()
        trainer.snapshot()
    counter.close()
    assert counter.count == 0


def test_a_batch_of_another_shape_is_refused(programs: TrainPrograms):
    rng = np.random.default_rng(0)
    (longer,) = pack([made_record(rng, 20, 3)], 2 * SIZE, rng)
    (fewer,) = pack([made_record(rng, 20, 3, top=2)], SIZE, rng)
    trainer = Trainer(programs, PARAMS)
    with pytest.raises(ConfigError, match="must have 32 tokens and 5 target tokens per row, got 64 and 5; pack rec"):
        trainer.accumulate(longer)
    with pytest.raises(ConfigError, match="got 32 and 2"):
        trainer.evaluate(fewer)


@pytest.mark.slow
def test_low_rank_updates_have_the_gradients_of_the_weights_they_change(low_rank_programs: TrainPrograms):
    """With W = W0 + A B: A's is G B^T and B's is A^T G, G being W's. In bf16, to its precision."""
    programs = low_rank_programs
    params = {name: each.astype(programs.dtype) for name, each in PARAMS.items()}
    state, base, sums = programs.run("begin", params)
    assert_same(programs.run("export", state.trained, base), params)
    rng = np.random.default_rng(1)
    trained = jax.tree.map(
        lambda each: jax.numpy.asarray(0.1 * rng.standard_normal(each.shape), "float32"), state.trained
    )
    assert set(trained) == {name for name, each in params.items() if each.ndim == 2} - {"embed"}
    merged = float64(programs.run("export", trained, base))
    records, (batch, _) = made_batches(1)
    sums = programs.run("accumulate", trained, base, sums, batch)
    records = [each for each in records if len(each.position) == batch.num_rows]
    by_weight = oracle.Draft(SMALL, merged).gradient(as_texts(records), "kl", 0, 1)
    for name, update in trained.items():
        a, b = float64(update._asdict()).values()
        np.testing.assert_allclose(merged[name], float64(params)[name] + a @ b, rtol=2**-8, atol=1e-3)
        found = float64(sums.gradients[name]._asdict())
        assert_close(found, {"a": by_weight[name] @ b.T, "b": a.T @ by_weight[name]}, relative=0.06)


@pytest.mark.slow
def test_updates_that_the_served_type_cannot_show_add_up(low_rank_programs: TrainPrograms):
    """One step of 1e-5 is lost in bf16; what is trained is f32 and keeps it."""
    params = {name: each.astype(low_rank_programs.dtype) for name, each in PARAMS.items()}
    trainer = Trainer(low_rank_programs, params)
    _, batches = made_batches(1)
    loss = [train(trainer, batches).loss for _ in range(400)]
    changed = trainer.weights()
    assert changed["embed"].dtype == low_rank_programs.dtype
    unlike = {name for name in params if not np.array_equal(changed[name], params[name])}
    assert "layers.0.qkv" in unlike and not unlike & {"embed", "norm", "layers.0.attn_norm"}
    assert loss[-1] < loss[0]
