"""A distilled draft accepts more; a run that was stopped ends as if it had not been; what is chosen is what happens."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax.distill.offline import (
    Distillation,
    Models,
    Prompts,
    open_distillation,
    reset_top_layer,
    split,
    write_draft,
)
from adaserve_jax.distill.offline_config import OfflineConfig
from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.models.decoder import param_specs
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.rope import LongRopeScaling
from tests.models.checkpoints import write_checkpoint

CONFIG = OfflineConfig(
    max_tokens=6, epochs=2, rate=3e-3, top_k=16, round_prompts=4, rows=4, step_tokens=64, held_out=0.25, seed=3
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("distill")
    target = write_checkpoint(folder / "target", seed=1, num_hidden_layers=1)
    draft = write_checkpoint(folder / "draft", seed=2, num_hidden_layers=1)
    return Models.find(target, draft)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 300, rng.integers(1, 9)).tolist() for _ in range(16)]


def _open(models: Models, prompts: list[list[int]], config: OfflineConfig, **more: Any) -> Distillation:
    kept = Prompts.of(prompts, config, models.max_context)
    options = {"progress": lambda *_: None, "wants_stop": lambda: False} | more
    return open_distillation(models, kept, config, jnp.float32, **options)


def _without_times(run: Distillation) -> list[dict[str, Any]]:
    return [{**asdict(each), "seconds": 0} for each in run.done.evaluations]


def _same(ours: dict[str, jax.Array], theirs: dict[str, jax.Array]) -> bool:
    return all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def test_texts_stay_within_the_factors_of_longrope_that_are_taken(models: Models) -> None:
    phi = replace(models.target, rope_scaling=LongRopeScaling((1.0,) * 8, (2.0,) * 8, 64, 1.0))
    assert models.max_context == 256
    assert replace(models, target=phi).max_context == replace(models, draft=phi).max_context == 64


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["teacher", pytest.param("mixed", marks=pytest.mark.slow)])
def test_a_stopped_run_ends_as_one_that_was_not(
    models: Models, prompts: list[list[int]], tmp_path: Path, sampling: str
) -> None:
    """Stopped while texts are written, in the second epoch; held-out acceptance rises on the way."""
    config = replace(CONFIG, sampling=sampling, schedule="cosine", warmup=0.2)
    whole = _open(models, prompts, config)
    told: list[float] = []
    assert whole.run(tmp_path / "whole", lambda found: told.append(found.acceptance))
    first, *_, last = whole.done.evaluations
    assert [each.epoch for each in whole.done.evaluations] == [0, 1, 2]
    assert told == [each.acceptance for each in whole.done.evaluations]
    assert last.acceptance > first.acceptance and last.loss < first.loss
    assert (whole.done.rounds, whole.num_rounds) == (6, 6)
    assert not (tmp_path / "whole").exists()

    state = tmp_path / "state"
    stopped = _open(models, prompts, config, wants_stop=lambda: stopped.done.rounds == 4)
    assert not stopped.run(state)
    assert stopped.done.rounds == 4
    weights, evaluations = whole.weights(), _without_times(whole)
    whole.load(state)  # all of another run's state gives way
    assert whole.done.rounds == 4
    assert whole.run(state)
    assert _same(whole.weights(), weights)
    assert _without_times(whole) == evaluations

    with pytest.raises(CheckpointError, match="expected the state of a run that was stopped, found none"):
        whole.load(tmp_path / "nothing")
    settings = state / "settings.json"
    settings.write_text(settings.read_text().replace('"rate": 0.003', '"rate": 0.1'))
    with pytest.raises(CheckpointError, match=r"the run was begun with rate 0\.1, not 0\.003; give what it was begun"):
        whole.load(state)


@pytest.mark.slow
def test_what_is_saved_is_its_owners_and_a_cut_file_is_told(
    models: Models, prompts: list[list[int]], tmp_path: Path
) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    run = _open(models, prompts, CONFIG)
    run._writer.kept = {0: np.arange(4, dtype=np.int32)}
    run.save(state)
    assert state.stat().st_mode & 0o777 == 0o700
    settings = state / "settings.json"
    begun = settings.stat()
    run.save(state)
    assert (settings.stat().st_ino, settings.stat().st_mtime_ns) == (begun.st_ino, begun.st_mtime_ns)
    assert sorted(path.name for path in state.iterdir()) == ["settings.json", "texts.npz", "weights"]
    with pytest.raises(CheckpointError, match=r"settings\.json/state: cannot save the run: Not a directory"):
        run.save(settings / "state")
    texts = state / "texts.npz"
    whole = texts.read_bytes()
    for size in (0, 40, len(whole) // 2, len(whole) - 10):
        texts.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"texts\.npz cannot be read .*; remove .*state and begin anew"):
            run.load(state)


def test_what_is_trained_on_is_not_measured_on(models: Models, prompts: list[list[int]], tmp_path: Path) -> None:
    """Each prompt of the other part is written to and learned from once per epoch, the held-out ones never."""
    run = _open(models, prompts, replace(CONFIG, sampling="student", epochs=1, prompt_rows=True))
    seen: list[int] = []
    by_both = run._writer.by_both
    run._writer.by_both = lambda indices, *rest: seen.extend(indices) or by_both(indices, *rest)
    run.run(tmp_path / "state")
    held_out, trained = split(16, 0.25, CONFIG.seed)
    assert (sorted(seen), sorted(run._writer.kept)) == (trained, held_out)
    assert len(held_out) == 4 and sorted(held_out + trained) == list(range(16))
    texts_at_most = sum(len(prompts[index]) + CONFIG.max_tokens - 1 for index in trained)
    assert sum(len(prompts[index]) for index in trained) <= run.done.tokens <= texts_at_most


@pytest.mark.slow
def test_a_draft_with_more_rows_than_its_target_learns_all_that_its_target_says(
    models: Models, prompts: list[list[int]], tmp_path: Path
) -> None:
    draft = write_checkpoint(tmp_path / "draft", seed=2, num_hidden_layers=1, vocab_size=models.target.vocab_size + 8)
    wide = Models.find(models.target_folder, draft)
    assert wide.draft.vocab_size == models.target.vocab_size + 8
    run = _open(wide, prompts, replace(CONFIG, top_k=1000))
    assert run.run(tmp_path / "state")
    first, *_, last = run.done.evaluations
    assert last.acceptance > first.acceptance


def test_a_reset_layer_is_all_that_changes_and_accepts_less(models: Models, prompts: list[list[int]]) -> None:
    specs = param_specs(replace(models.target, num_layers=2))
    params, fresh = (
        {name: np.full(shape, value if len(shape) > 1 else 1, dtype) for name, (shape, _) in specs.items()}
        for value, dtype in ((1, jnp.float32), (2, jnp.bfloat16))
    )
    found = reset_top_layer(params, fresh)
    changed = {name for name in params if not np.array_equal(found[name], params[name])}
    assert changed == {f"layers.1.{name}" for name in ("qkv", "out", "gate_up", "down")}
    assert all(found[name].dtype == jnp.float32 for name in found)


@pytest.mark.slow
def test_a_run_of_one_step_that_is_all_warm_up_trains(
    models: Models, prompts: list[list[int]], tmp_path: Path
) -> None:  # fmt: skip
    config = replace(CONFIG, epochs=1, warmup=1.0, step_tokens=1_000_000, round_prompts=1_000)
    run = _open(models, prompts, config)
    before = run.weights()
    assert run.run(tmp_path / "state")
    assert run.done.steps == 1 and not _same(run.weights(), before)


@pytest.mark.slow
def test_weights_that_are_no_numbers_end_the_run(models: Models, prompts: list[list[int]], tmp_path: Path) -> None:
    run = _open(models, prompts, replace(CONFIG, rate=1e30))
    with pytest.raises(ConfigError, match=r"training gave a loss of .* rate must be lower than 1e\+30"):
        run.run(tmp_path / "state")


def test_a_written_draft_is_whole_or_not_there(models: Models, tmp_path: Path) -> None:
    params = load_params(models.draft_folder, models.draft)
    write_draft(params, models.draft_folder, tmp_path / "new" / "draft", "f32", lambda *_: None)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["draft"]
    assert len({path.stat().st_mode for path in (tmp_path / "new" / "draft").iterdir()}) == 1
    assert _same(load_params(tmp_path / "new" / "draft", models.draft), params)
    with pytest.raises(CheckpointError, match="of another model"):
        write_draft({}, models.draft_folder, tmp_path / "other" / "draft", "f32", lambda *_: None)
    assert list((tmp_path / "other").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file/draft: the draft cannot be written: File exists"):
        write_draft(params, models.draft_folder, tmp_path / "file" / "draft", "f32", lambda *_: None)


def test_prompts_that_do_not_fit_are_counted() -> None:
    prompts = [[1, 2], [1, 2], [3], [4] * 90, []]
    kept = Prompts.of(prompts, CONFIG, 96)
    assert [prompt.tolist() for prompt in kept.kept] == [[1, 2], [3], [4] * 90]
    assert (kept.repeated, kept.too_long) == (2, 0)
    with pytest.raises(ConfigError, match=r"at least 2 different prompts of at most 1 tokens .*got 1 of 5: 2 repeated"):
        Prompts.of(prompts, CONFIG, 7)


def test_the_rate_rises_and_falls() -> None:
    constant = OfflineConfig(warmup=0.25)
    assert [constant.rate_share(at) for at in (0, 0.125, 0.25, 0.9)] == [0, 0.5, 1, 1]
    cosine = OfflineConfig(schedule="cosine", warmup=0.2)
    assert [cosine.rate_share(at) for at in (0.1, 0.2, 0.6, 1)] == pytest.approx([0.5, 1, 0.5, 0])
    assert OfflineConfig(warmup=1).rate_share(1) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sampling": "tutor"}, "sampling must be one of teacher, student, mixed, got 'tutor'"),
        ({"loss": "mse"}, "loss must be one of kl, reverse_kl, jsd, got 'mse'"),
        ({"rate": 0.0}, "rate must be a finite number above 0, got 0.0"),
        ({"held_out": 1.0}, "held_out must be a number between 0 and 1, got 1.0"),
        ({"epochs": 0}, "epochs must be an integer >= 1, got 0"),
        ({"seed": 2**63}, "seed must be an integer >= 0 of less than 64 bits, got 9223372036854775808"),
        ({"temperature": -1.0}, "temperature must be a finite number >= 0, got -1.0"),
        ({"warmup": 2.0}, "warmup must be a number from 0 to 1, got 2.0"),
        ({"mix": 0.3, "sampling": "student"}, "mix must be 0.5 unless sampling is mixed, got 0.3"),
        ({"beta": 0.3}, "beta must be 0.5 unless loss is jsd, got 0.3"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OfflineConfig(**given)
