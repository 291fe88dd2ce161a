"""The draft alone: its trees are those of a local drafter, however sessions are fed, and nothing compiles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import ModelConfig, resolve_folder
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.results.provenance import weights_hash
from adaserve_jax.runtime.drafter import LocalDrafter
from adaserve_jax.runtime.model import DeviceModel
from adaserve_jax.runtime.warmup import Effort
from adaserve_jax.sampling import RowSampling
from adaserve_jax.star.messages import Close, Draft, Hello, Open, Resync, SessionSampling, Tree, cells_hash
from adaserve_jax.star.service.dispatch import DraftBatch, DraftBatchRow
from adaserve_jax.star.service.main import DraftService
from adaserve_jax.star.service.metrics import PREFIX, ServiceCollector
from adaserve_jax.star.service.model import DraftModel, load
from adaserve_jax.star.settings import DraftServiceSettings
from adaserve_jax.tree.beam import AcceptanceTable
from adaserve_jax.types import CandidateTrees, DraftPlan, StepPlan
from tests.conftest import ROOT
from tests.models.checkpoints import write_checkpoint
from tests.plans import i32, step_plan
from tests.star.streams import HANG_S, Target

pytestmark = pytest.mark.slow

QUICK = Effort((16,), passes=1, repeats=1, repeats_beyond=0, all_depths=False)
SIZES = {
    "max_sessions": 8, "max_batch": 2, "max_batch_tokens": 8, "max_context": 128, "page_size": 16, "num_pages": 24,
    "max_depth": 4, "max_width": 3,
}  # fmt: skip
LENGTHS = (61, 25, 90, 9)
SAMPLINGS = (
    SessionSampling(7, 0, 0.0, 0, 1.0, 0.0),
    SessionSampling(2**63 + 5, 1, 1.0, 0, 1.0, 0.0),
    SessionSampling(9, 2, 0.7, 20, 1.0, 0.0),
    SessionSampling(9, 0, 1.3, 0, 0.9, 0.02),
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> DraftServiceSettings:
    folder = write_checkpoint(tmp_path_factory.mktemp("models") / "draft", num_hidden_layers=1)
    return DraftServiceSettings(model=str(folder), **SIZES)


@pytest.fixture(scope="module")
def model(settings: DraftServiceSettings) -> Iterator[DraftModel]:
    model = load(settings, effort=QUICK)
    yield model
    assert model.compiles_after_ready == 0
    model.close()


@pytest.fixture(autouse=True)
def all_pages_free(model: DraftModel) -> Iterator[None]:
    yield
    model.pool.check_integrity()
    assert model.pool.num_used == 0


class Local:
    """A local drafter of the same checkpoint, alone, with pages of its own: for each tree it is fed the whole text. It
    runs the same programs."""

    def __init__(self, model: DraftModel, folder: Path) -> None:
        config, ours = ModelConfig.from_folder(folder), model.drafter.model
        device = DeviceModel(
            "draft", config, load_params(folder, config), ours.programs, ours.buckets,
            num_pages=24, page_size=16, dtype=jnp.dtype(jnp.float32),
        )  # fmt: skip
        device.compiled = dict(ours.compiled)
        self.drafter = LocalDrafter(device, AcceptanceTable.of(model.table), max_depth=4, widths=model.drafter.widths)

    def tree(
        self, text: np.ndarray, sampling: SessionSampling, depth: int, width: int, calibrated: bool
    ) -> CandidateTrees:
        found = CandidateTrees.empty(1)
        for start in range(0, len(text), 8):
            chunk, last = text[start : start + 8], start + 8 >= len(text)
            draft = DraftPlan(
                depth if last else 0, width, chunk, np.array([len(chunk)], np.int32), np.array([start], np.int32),
                np.ones(1, bool), calibrated,
            )  # fmt: skip
            found = self.drafter.propose(self._plan(draft, sampling))
        return found

    def _plan(self, draft: DraftPlan, sampling: SessionSampling) -> StepPlan:
        said = RowSampling.of([sampling])
        return step_plan(1, page_table=i32(range(8))[None], sampling=said, draft=draft, tree_token_cap=0)


@pytest.fixture(scope="module")
def local(model: DraftModel, settings: DraftServiceSettings) -> Local:
    return Local(model, Path(settings.model))


def check(found: CandidateTrees | None, at: int, depth: int, expected: CandidateTrees) -> None:
    """Row `at`, whose own depth may be less than the batch's; levels do not depend on those below them."""
    assert found is not None and expected.log_f.shape[1]
    columns = np.flatnonzero(found.depth <= depth)
    there = np.flatnonzero(expected.log_f[0] > -np.inf)
    np.testing.assert_array_equal(np.flatnonzero(found.log_f[at, columns] > -np.inf), there)
    for name in ("token", "parent", "cell"):
        np.testing.assert_array_equal(getattr(found, name)[at, there], getattr(expected, name)[0, there], name)
    for name in ("log_q", "log_f"):
        np.testing.assert_allclose(getattr(found, name)[at, there], getattr(expected, name)[0, there], atol=1e-4)


def batch_of(rows: list[DraftBatchRow], width: int, calibrated: bool = True) -> DraftBatch:
    return DraftBatch(tuple(rows), max(row.depth for row in rows), width, calibrated, 0.0)


def row_of(key: int, start: int, tokens: np.ndarray, depth: int) -> DraftBatchRow:
    return DraftBatchRow("target", key, 0, 1, key, start, tokens, depth, SAMPLINGS[key])


def texts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 300, length).astype(np.int32) for length in LENGTHS]


@pytest.mark.parametrize("calibrated", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_interleaved_sessions_have_the_trees_of_a_local_drafter(model: DraftModel, local: Local, calibrated: bool):
    """Fed in chunks of other sizes, in batches of other rows, at other depths; one loses its KV between and is fed
    anew, on other pages."""
    rng = np.random.default_rng(int(calibrated))
    held = [0] * 4
    for turn, width in enumerate((3, 1, 2, 3)):
        ends = [max(2, length * (turn + 1) // 4) for length in LENGTHS]
        if turn == 2:
            model.release(2)
            held[2] = 0
        while any(end - at > 4 for end, at in zip(ends, held, strict=True)):  # all but the end, two together
            rows = []
            for key in rng.permutation(4)[:2].tolist():
                upto = min(ends[key] - 1, held[key] + int(rng.integers(1, 5)))
                if upto > held[key]:
                    assert model.reserve(key, upto)
                    rows.append(row_of(key, held[key], texts()[key][held[key] : upto], 0))
                    held[key] = upto
            if rows:
                assert model.run(batch_of(rows, 1)) is None
        depths = rng.permutation([1, 2, 3, 4]).tolist()
        for order in rng.permutation(4).reshape(2, 2).tolist():
            rows = []
            for key in order:
                assert model.reserve(key, ends[key])
                start = min(held[key], ends[key] - 1)
                rows.append(row_of(key, start, texts()[key][start : ends[key]], depths[key]))
                held[key] = ends[key]
            found = model.run(batch_of(rows, width, calibrated))
            for at, key in enumerate(order):
                expected = local.tree(texts()[key][: ends[key]], SAMPLINGS[key], depths[key], width, calibrated)
                check(found, at, depths[key], expected)
    for key in range(4):
        model.release(key)


def test_what_is_asked_again_is_found_again(model: DraftModel, local: Local):
    """The last token is fed a second time, on the slot that it has."""
    text = texts()[1][:14]
    assert model.reserve(3, 14)
    assert model.run(batch_of([row_of(3, 0, text[:8], 0)], 1)) is None
    first = model.run(batch_of([row_of(3, 8, text[8:], 3)], 2))
    again = model.run(batch_of([row_of(3, 13, text[13:], 3)], 2))
    for found in (first, again):
        check(found, 0, 3, local.tree(text, SAMPLINGS[3], 3, 2, True))
    model.release(3)


def same_as(tree: Tree, expected: CandidateTrees) -> None:
    assert expected.cell is not None and expected.log_q is not None
    there = np.flatnonzero(expected.log_f[0] > -np.inf)
    np.testing.assert_array_equal(tree.index, there)
    for name in ("token", "parent", "cell"):
        np.testing.assert_array_equal(getattr(tree, name), getattr(expected, name)[0, there], name)
    np.testing.assert_allclose(tree.log_q, expected.log_q[0, there], atol=1e-4)


def test_pages_are_reserved_whole_or_not_at_all_and_return(model: DraftModel):
    assert model.capacity == 16 * 24
    assert model.reserve(1, 16 * 20) and model.pool.num_used == 20
    assert model.reserve(1, 16 * 20 - 15) and model.pool.num_used == 20, "it has those already"
    assert not model.reserve(2, 16 * 5) and model.pool.num_used == 20
    assert model.reserve(2, 16 * 4) and model.pool.num_used == 24
    model.release(1)
    model.release(1)
    assert model.pool.num_used == 4
    model.release(2)


def test_it_says_what_it_is_and_how_long_it_takes(model: DraftModel, settings: DraftServiceSettings):
    assert model.version == weights_hash(Path(settings.model))
    assert model.vocabulary_hash == Tokenizer.from_folder(settings.model).vocabulary_hash(model.vocabulary)
    assert set(model.samples.draft_level_s) == {(rows, width) for rows in (1, 2) for width in (1, 3)}
    assert set(model.samples.catchup_s) == set(model.limits.token_edges)
    assert all(seconds > 0 for seconds in (*model.samples.draft_level_s.values(), *model.samples.catchup_s.values()))


def test_vocabularies_are_told_apart(settings: DraftServiceSettings):
    demo = [Tokenizer.from_folder(resolve_folder("demo", role)).vocabulary_hash(2048) for role in ("target", "draft")]
    assert demo[0] == demo[1] != Tokenizer.from_folder(settings.model).vocabulary_hash(2048)
    assert len(demo[0]) == 16 and set(demo[0]) <= set("0123456789abcdef")


def test_sizes_that_cannot_be_are_said_before_loading(settings: DraftServiceSettings):
    cases = {
        "max_context must be at most 256, which the draft supports, got 99999": {"max_context": 99999},
        "max_batch_tokens (1) must be at least the smaller one of max_batch and max_sessions (2)": {
            "max_batch_tokens": 1
        },
        "num_pages must be at least 8, which one request of max_context needs, got 2": {"num_pages": 2},
        "lower num_pages, max_context or max_sessions": {"num_pages": 10**9},
    }
    for message, changed in cases.items():
        with pytest.raises(ConfigError) as raised:
            load(replace(settings, **changed))
        assert message in str(raised.value)


# ---- behind the port ----


@pytest.fixture(scope="module")
def service(settings: DraftServiceSettings, model: DraftModel) -> Iterator[DraftService]:
    service = DraftService(replace(settings, listen="127.0.0.1:0", http=""), model)
    yield service
    service.close()


def hello(model: DraftModel, name: str = "target") -> Hello:
    return Hello(name, model.vocabulary_hash, cells_hash(model.table), model.version)


def test_over_the_wire_trees_are_those_of_a_local_drafter(service: DraftService, model: DraftModel, local: Local):
    """Sessions with sampling of their own, as long as several chunks, drafted for together; the prompt comes first."""
    target = Target(service.port)
    target.send(hello(model))
    welcome = target.receive()
    assert (welcome.max_depth, welcome.max_width, welcome.max_context) == (4, 3, 128)
    assert welcome.level_s == model.samples.draft_level_s and welcome.catchup_s == model.samples.catchup_s
    for key, text in enumerate(texts()):
        target.send(Open(key + 1, 1, text[:-5], SAMPLINGS[key]))
    for turn, (depth, width) in enumerate(((4, 3), (2, 1), (3, 2)), 1):
        drafts = [
            Draft(key + 1, 1, turn, len(text) - 6 + turn, text[-6 + turn : -5 + turn], depth, width, True, 1.0, HANG_S)
            for key, text in enumerate(texts())
        ]
        target.send(*drafts)
        for tree in [target.receive() for _ in drafts]:
            key = tree.session - 1
            text = texts()[key][: len(texts()[key]) - 5 + turn]
            assert tree.length == len(text) and tree.round == turn
            same_as(tree, local.tree(text, SAMPLINGS[key], depth, width, True))
    target.send(*(Close(key + 1) for key in range(4)), Draft(1, 1, 9, 0, np.zeros(0, np.int32), 0, 0, True, 1.0, 1.0))
    assert target.receive() == Resync(1, 1), "it is closed"
    target.close()


def test_what_does_not_fit_is_refused(service: DraftService, model: DraftModel):
    target = Target(service.port)
    target.send(hello(model))
    target.receive()
    plain = SAMPLINGS[0]
    target.send(
        Open(1, 1, np.zeros(125, np.int32), plain),
        Draft(1, 1, 1, 125, np.zeros(0, np.int32), 4, 3, True, 1.0, 1.0),
        Open(2, 1, np.array([model.vocabulary], np.int32), plain),
    )
    refused = {(each := target.receive()).session: each.code for _ in range(2)}
    assert refused == {1: "too_long", 2: "invalid"}
    target.close()
    other = Target(service.port)
    other.send(replace(hello(model), cells_hash="others"))
    assert other.receive().code == "cells"
    other.close()


def test_metrics_say_what_the_documents_say(service: DraftService, model: DraftModel):
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServiceCollector(service.worker, service.audit, model))
    exposition = generate_latest(registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(exposition)}
    documented = (ROOT / "docs" / "prometheus.md").read_text()
    assert [name for name in families if f"`{name}" not in documented] == []
    named = set(re.findall(r"^\| `(adaserve_draft_service_\w+?)(?:_total)?`", documented, re.MULTILINE))
    assert named == set(families)
    value = {name: sum(sample.value for sample in family.samples) for name, family in families.items()}
    assert value[PREFIX + "kv_pages"] == 24 and value[PREFIX + "compiles_after_ready"] == 0
    assert value[PREFIX + "load"] >= 0 and value[PREFIX + "streams_opened"] >= 0
