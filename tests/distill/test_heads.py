"""Training of heads: each step is what a head computes that many levels below a root."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from adaserve_jax.distill.footprint import state_bytes, workspace_bytes
from adaserve_jax.distill.heads import (
    HEAD_STEPS,
    STEP_DECAY,
    HeadTarget,
    eagle3_settings,
    head_steps,
    write_new_eagle3,
    write_new_medusa,
)
from adaserve_jax.distill.offline import Distillation, Models, Prompts, open_distillation, split, write_draft
from adaserve_jax.distill.offline_config import OfflineConfig
from adaserve_jax.distill.programs import TrainPrograms, head_sums
from adaserve_jax.distill.records import PackedBatch
from adaserve_jax.distill.trainer import Scores, Trainer
from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import Params, logits
from adaserve_jax.models.export import new_head_folder
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.rope import LinearScaling, YarnScaling
from tests.distill.made import SIZE, assert_same, made_record, packed, workspace_of
from tests.models.checkpoints import CONFIG, write_checkpoint, write_eagle3, write_medusa
from tests.oracles import training
from tests.oracles.eagle3 import Head
from tests.oracles.llama import oracle_logits
from tests.oracles.medusa import medusa_scores

LAYERS = [0, 1, 3]


class Pair(NamedTuple):
    target: Path
    head: Path
    config: ModelConfig
    params: Params
    source: HeadTarget


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("models")
    target = write_checkpoint(folder / "target", num_hidden_layers=4, seed=3)
    head = write_eagle3(folder / "head", eagle_config={"eagle_aux_hidden_state_layer_ids": LAYERS}, seed=4)
    config = ModelConfig.from_folder(head, may_be_head=True)
    model = ModelConfig.from_folder(target)
    return Pair(target, head, config, load_params(head, config), HeadTarget(model, load_params(target, model)))


def _records() -> list[Any]:
    rng = np.random.default_rng(1)
    return [
        made_record(rng, 13, [0, 1, 2, 5, 9, 11], vocab=320), made_record(rng, 11, [0, 3, 4, 8, 9], vocab=320),
    ]  # fmt: skip


def _expected(pair: Pair, tokens: np.ndarray, position: int, step: int) -> np.ndarray:
    """Logits f64[V] after the token at a position, of a head whose root is `step` tokens before it."""
    streams: list[np.ndarray] = []
    oracle_logits(pair.target, tokens, streams=streams)
    features = np.concatenate([streams[layer] for layer in LAYERS], axis=1)
    head, root = Head(pair.head), position - step
    feature = head.read_target(tokens[1 : root + 1].tolist(), features[:root])
    for token in tokens[root + 1 : position + 1].tolist():
        feature = head.step(token, feature)
    return head.logits(feature)


def _steps(
    source: HeadTarget, config: ModelConfig, params: Params, batch: PackedBatch, count: int = HEAD_STEPS
) -> list[Any]:
    """Return what the first `count` of `head_steps` compute of every token of a batch."""

    @jax.jit
    def run(params: Params, batch: PackedBatch) -> list[Any]:
        every = batch._replace(at=jnp.arange(batch.tokens.shape[0]))
        steps = head_steps(params, config, every, source.features(source.params, config, batch))
        return list(steps if count == HEAD_STEPS else islice(steps, count))

    return run(params, jax.tree.map(jnp.asarray, batch))


@pytest.mark.slow
def test_each_step_is_that_many_levels_below_a_root(pair: Pair) -> None:
    batch = packed(*_records())
    found = _steps(pair.source, pair.config, pair.params, batch)
    assert len(found) == HEAD_STEPS
    real = np.flatnonzero(batch.segment >= 0)
    compared = 0
    for step, (scores, below) in enumerate(found):
        assert np.isfinite(np.asarray(scores)[:, 0]).any() or not np.isnan(np.asarray(scores)).any()
        for at in real.tolist():
            own = np.flatnonzero(batch.segment == batch.segment[at])
            position = int(batch.position[at])
            assert bool(below[at]) == (position - step >= 1)
            if position - step < 1:
                continue
            expected = _expected(pair, batch.tokens[own], position, step)
            possible = np.isfinite(expected)
            np.testing.assert_allclose(np.asarray(scores)[at][possible], expected[possible], atol=1e-4)
            compared += 1
    assert compared > 3 * len(real)


@pytest.mark.slow
def test_sums_are_over_the_rows_of_all_steps(pair: Pair) -> None:
    records, learn = _records(), LearnConfig(learn_temperature=1.3)
    batch = packed(*records)

    @jax.jit
    def sums(params: Params, batch: PackedBatch) -> jax.Array:
        features = pair.source.features(pair.source.params, pair.config, batch)
        return head_sums(params, pair.config, learn, batch, features, STEP_DECAY)

    found = sums(pair.params, jax.tree.map(jnp.asarray, batch))
    expected = np.zeros(3)
    for record in records:
        for row, position in enumerate(record.position.tolist()):
            for step in range(min(HEAD_STEPS, position)):
                scores = _expected(pair, record.tokens, position, step)
                has = np.isfinite(scores[record.ids[row]])  # a token that the head lacks is no category
                ids, p = record.ids[row][has][None], np.exp(record.log_p[row][has])[None]
                lost = 1 - np.exp(record.log_p[row][~has]).sum()
                loss = training.row_losses(scores[None], ids, np.log(p / lost), "kl", 0.5, 1.3)[0]
                overlap = training.row_losses(scores[None], ids, np.log(p), "kl", 0.5, 1.3)[1]
                expected += STEP_DECAY**step * np.array([loss[0], overlap[0], 1])
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    lacking = np.isinf(scores[np.concatenate([record.ids for record in records])])
    assert lacking.any()
    assert not lacking.all()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_trained_head_agrees_more_and_keeps_the_targets_embedding(pair: Pair, rank: int) -> None:
    learn = LearnConfig(learn_rate=1e-2, learn_top_k=5, learn_lora_rank=rank)
    programs = TrainPrograms(pair.config, learn, SIZE, jnp.float32, target=pair.source)
    programs.compile()
    trainer, batch = Trainer(programs, pair.params), packed(*_records())
    before = trainer.evaluate(batch)
    for _ in range(30):
        trainer.accumulate(batch)
        assert trainer.apply().finite
    after = trainer.evaluate(batch)
    assert isinstance(after, Scores)
    assert after.weight == before.weight
    assert after.loss_sum < 0.8 * before.loss_sum
    weights = trainer.weights()
    assert_same({name: weights[name] for name in ("embed", "head_row")}, {
        name: pair.params[name] for name in ("embed", "head_row")
    })  # fmt: skip
    assert weights.keys() == pair.params.keys()
    assert not np.array_equal(weights["fc"], pair.params["fc"])
    assert programs.time_micro_step() > 0
    state, base, sums = programs.run("begin", pair.params)
    good = programs.run("begin", pair.params)[0]
    taken = sum(each.nbytes for each in jax.tree.leaves((state, good, base, sums)) if each.ndim)
    assert state_bytes(pair.config, learn, jnp.float32) == taken
    estimate = workspace_bytes(pair.config, learn, jnp.float32, SIZE, pair.source.config)
    assert workspace_of(programs) <= estimate <= 4 * workspace_of(programs)


def test_a_new_head_says_what_the_target_said_one_position_before(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target", num_hidden_layers=3, seed=7, tie_word_embeddings=True)
    write_new_eagle3(target, tmp_path / "head")
    config = ModelConfig.from_folder(tmp_path / "head", may_be_head=True)
    params = load_params(tmp_path / "head", config, target=target)
    tokens = np.random.default_rng(3).integers(0, 320, 9)
    model = ModelConfig.from_folder(target)
    source = HeadTarget(model, load_params(target, model))
    batch = PackedBatch(
        tokens.astype(np.int32), np.arange(9, dtype=np.int32), np.zeros(9, np.int32), np.arange(9), *[np.zeros(9)] * 3
    )  # fmt: skip
    ((found, _),) = _steps(source, config, params, batch, count=1)
    np.testing.assert_allclose(found[1:], oracle_logits(target, tokens)[:-1], atol=1e-4)


@pytest.mark.slow
def test_new_heads_of_a_target_with_scaled_logits_begin_with_its_logits(tmp_path: Path) -> None:
    granite = {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "logits_scaling": 4.0}
    target = write_checkpoint(tmp_path / "target", num_hidden_layers=3, **granite)
    write_new_medusa(target, tmp_path / "medusa")
    write_new_eagle3(target, tmp_path / "head")
    model = ModelConfig.from_folder(target)
    params = load_params(target, model)
    hidden = np.random.default_rng(3).standard_normal((32, 5)).astype(np.float32)
    expected = logits(params, model, hidden)
    config = ModelConfig.from_folder(tmp_path / "medusa", may_be_head=True)
    np.testing.assert_allclose(logits(load_params(tmp_path / "medusa", config), config, hidden), expected, rtol=1e-5)
    (path,) = (tmp_path / "head").glob("*.safetensors")
    scores = load_file(path)["lm_head.weight"]
    np.testing.assert_allclose(scores @ hidden, np.asarray(expected).T, rtol=1e-4, atol=1e-4)


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
TWO_KINDS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    ("given", "theta", "scaling"),
    [
        ({"architectures": ["Phi3ForCausalLM"], "rope_scaling": LONGROPE, "rope_theta": 2e4,
          "original_max_position_embeddings": 128}, 2e4, None),
        ({"architectures": ["Phi3ForCausalLM"], "rope_theta": None,
          "rope_parameters": {"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.75}}, 3e4, None),
        ({"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 64,
          "query_pre_attn_scalar": 16, "rope_parameters": TWO_KINDS}, 1e6, LinearScaling(8.0)),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, 1e4,
         YarnScaling(4.0, 64, 1.1386294361119891, 32.0, 1.0, True)),
        ({"architectures": ["Ministral3ForCausalLM"], "head_dim": 16, "sliding_window": None,
          "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "llama_4_scaling_beta": 0.1,
                              "original_max_position_embeddings": 64, "max_position_embeddings": 256}}, 1e6,
         YarnScaling(4.0, 64, 1.1386294361119891, 32.0, 1.0, True)),
        ({"architectures": ["GlmForCausalLM"], "head_dim": 16, "attention_bias": False,
          "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}},
         1e4, LinearScaling(2.0)),
        ({"architectures": ["HunYuanDenseV1ForCausalLM"],
          "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 50.0}}, 1e4 * 50 ** (16 / 14), None),
    ],
    ids=["longrope", "partial", "gemma3", "yarn", "ministral3", "glm", "alpha"],
)  # fmt: skip
def test_a_new_head_has_the_rotary_base_of_its_target_and_a_scaling_that_its_layer_takes(
    tmp_path: Path, given: dict[str, Any], theta: float, scaling: Any
) -> None:
    values = {name: value for name, value in (CONFIG | given).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    target = ModelConfig.from_folder(tmp_path)
    head = new_head_folder(tmp_path / "head", eagle3_settings(target, values))
    assert (head.rope_theta, head.rope_scaling) == (theta, scaling)


def _medusa(folder: Path, target: Path) -> tuple[ModelConfig, Params, HeadTarget]:
    config = ModelConfig.from_folder(folder, may_be_head=True)
    model = ModelConfig.from_folder(target)
    return config, load_params(folder, config), HeadTarget(model, load_params(target, model))


@pytest.mark.slow
def test_each_medusa_head_reads_what_the_target_said_so_much_earlier(pair: Pair, tmp_path: Path) -> None:
    folder = write_medusa(tmp_path / "heads")
    config, params, source = _medusa(folder, pair.target)
    batch = packed(*_records())
    steps = _steps(source, config, params, batch)
    assert len(steps) == 3
    norm = load_file(pair.target / "model.safetensors")["model.norm.weight"].astype(np.float64)
    for at in np.flatnonzero(batch.segment >= 0).tolist():
        own, position = np.flatnonzero(batch.segment == batch.segment[at]), int(batch.position[at])
        streams: list[np.ndarray] = []
        oracle_logits(pair.target, batch.tokens[own], streams=streams)
        for head, (scores, below) in enumerate(steps):
            assert bool(below[at]) == (position > head)
            if position > head:
                last = streams[-1][position - head - 1]
                hidden = last / np.sqrt((last**2).mean() + 1e-5) * norm
                np.testing.assert_allclose(scores[at], medusa_scores(folder, hidden)[head], atol=1e-4)


@pytest.mark.slow
def test_new_medusa_heads_say_what_the_target_says_and_learn(pair: Pair, tmp_path: Path) -> None:
    write_new_medusa(pair.target, tmp_path / "heads")
    config, params, source = _medusa(tmp_path / "heads", pair.target)
    batch = packed(*_records())
    first, _ = _steps(source, config, params, batch)[0]
    tokens = batch.tokens[batch.segment == 0]
    np.testing.assert_allclose(first[batch.segment == 0][1:], oracle_logits(pair.target, tokens)[:-1], atol=1e-4)
    programs = TrainPrograms(config, LearnConfig(learn_rate=1e-2, learn_top_k=5), SIZE, jnp.float32, target=source)
    programs.compile()
    trainer = Trainer(programs, params)
    before = trainer.evaluate(batch)
    for _ in range(20):
        trainer.accumulate(batch)
        assert trainer.apply().finite
    assert trainer.evaluate(batch).overlap_sum > before.overlap_sum
    write_draft(trainer.weights(), tmp_path / "heads", tmp_path / "out", "auto", lambda *_: None)
    assert ModelConfig.from_folder(tmp_path / "out", may_be_head=True) == config


@pytest.mark.slow
def test_a_head_is_trained_from_prompts_as_a_draft_is(pair: Pair, tmp_path: Path) -> None:
    """A run that is stopped and resumed ends like one that is not, and what is written is a head of the same tokens."""
    rng = np.random.default_rng(0)
    asked = [rng.integers(3, 300, rng.integers(1, 9)).tolist() for _ in range(16)]
    config = OfflineConfig(
        max_tokens=6, epochs=2, rate=3e-3, top_k=16, round_prompts=4, rows=4, step_tokens=64, held_out=0.25, seed=3
    )
    models = Models.find(pair.target, pair.head)

    def opened(wants_stop: Callable[[], bool]) -> Distillation:
        prompts = Prompts.of(asked, config, models.max_context)
        return open_distillation(
            models, prompts, config, jnp.float32, progress=lambda *_: None, wants_stop=wants_stop
        )  # fmt: skip

    whole = opened(lambda: False)
    assert whole.run(tmp_path / "whole")
    first, *_, last = whole.done.evaluations
    assert last.loss < first.loss
    assert last.acceptance > first.acceptance
    asked_to_stop = iter([False] * 12 + [True] * 1000)
    stopped = opened(lambda: next(asked_to_stop))
    assert not stopped.run(tmp_path / "state")
    resumed = opened(lambda: False)
    resumed.load(tmp_path / "state")
    assert resumed.run(tmp_path / "state")
    assert 0 < stopped.done.rounds < resumed.done.rounds
    assert_same(resumed.weights(), whole.weights())
    write_draft(whole.weights(), pair.head, tmp_path / "out", "auto", lambda *_: None)
    written = ModelConfig.from_folder(tmp_path / "out", may_be_head=True)
    assert written == pair.config
    assert_same(load_params(tmp_path / "out", written), whole.weights())


@pytest.mark.slow
def test_texts_of_which_a_head_learns_nothing_are_left_out(pair: Pair, tmp_path: Path) -> None:
    """They end with their second token: a prompt of one, and one more."""
    config = OfflineConfig(max_tokens=1, epochs=1, round_prompts=1, rows=4, top_k=16)
    models = Models.find(pair.target, pair.head)

    def opened(asked: list[list[int]]) -> Distillation:
        prompts = Prompts.of(asked, config, models.max_context)
        return open_distillation(
            models, prompts, config, jnp.float32, progress=lambda *_: None, wants_stop=lambda: False
        )  # fmt: skip

    short, long = [[number] for number in range(4, 12)], [[number, 5, 6] for number in range(4, 12)]
    held_out, trained = split(len(short), config.held_out, config.seed)
    run = opened([(long if index in (*held_out, trained[0]) else short)[index] for index in range(len(short))])
    assert run.run(tmp_path / "state")
    assert (run.done.steps, run.done.tokens, run.done.rounds) == (1, 1, len(trained))
    assert all(np.isfinite(weight).all() for weight in run.weights().values())
    with pytest.raises(ConfigError, match="expected a held-out text of at least 3 tokens, its prompt included"):
        opened(short).run(tmp_path / "state")


def test_what_is_not_for_heads_is_refused(pair: Pair, tmp_path: Path) -> None:
    models = Models.find(pair.target, pair.head)

    def refusal(**changes: Any) -> str:
        config = OfflineConfig(**changes)
        prompts = Prompts.of([[4], [5]], config, models.max_context)
        with pytest.raises(ConfigError) as caught:
            open_distillation(models, prompts, config, jnp.float32, progress=lambda *_: None, wants_stop=lambda: False)
        return str(caught.value)

    assert "sampling must be teacher for an EAGLE-3 head, which writes no texts, got 'mixed'" in refusal(
        sampling="mixed"
    )
    assert "reset_top_layer is not for an EAGLE-3 head; begin with a new head" in refusal(reset_top_layer=True)
    narrow = write_checkpoint(tmp_path, hidden_size=16)
    with pytest.raises(CheckpointError, match="whose target_hidden_size is 32, and its target's is 16; use a head"):
        Models.find(narrow, pair.head)
