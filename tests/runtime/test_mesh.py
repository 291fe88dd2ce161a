"""Tensor parallelism on forced host devices: the same logits and, in deterministic mode, the same bits and texts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaserve_jax import LLM
from tests.conftest import ROOT
from tests.runtime.mesh_process import CASES, QUICK, READ, texts_of
from tests.runtime.test_programs import copies_of
from tests.slow import longer_when_slow

LIMIT_S = 400
pytestmark = [pytest.mark.torch, pytest.mark.timeout(LIMIT_S + 20)]
DEVICES = 4


@dataclass(frozen=True)
class Mesh:
    """What the process with four devices found. is_whole: of all cases. logits: f32[tokens, V] by "case-ways"."""

    is_whole: bool
    logits: dict[str, np.ndarray]
    report: dict[str, Any]


def on_devices(folder: Path, *what: str) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.mesh_process", folder, *what],
        cwd=ROOT, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def found_by(what: str, folder: Path) -> Mesh:
    on_devices(folder, what)
    with np.load(folder / "logits.npz") as logits:
        return Mesh(what == "all", dict(logits), json.loads((folder / "report.json").read_text()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Mesh:
    """Run all cases."""
    return found_by("all", tmp_path_factory.mktemp("mesh"))


@pytest.fixture(scope="module", params=longer_when_slow(["quick", "all"]))
def mesh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mesh:
    """Run the quick cases, or all of them."""
    if request.param == "all":
        return request.getfixturevalue("whole")
    return found_by("quick", tmp_path_factory.mktemp("mesh"))


@pytest.mark.parametrize(
    ("case", "ways"),
    [
        ("biases", 4),
        ("biases_exact", 2),
        ("norms", 2),
        ("norms", 4),
        ("norms_exact", 4),
        ("norms_int8", 4),
        ("norms_int4", 4),
        ("odd", 2),
        ("experts_exact", 4),
        ("experts_int8", 4),
        ("experts_int4", 4),
        ("narrow", 2),
        ("narrow_exact", 2),
        ("three", 2),
        ("gemma", 2),
        ("gemma_exact", 2),
        ("gemma_int8", 2),
        ("phi", 2),
        ("glm", 2),
        ("joint", 2),
        ("joint", 4),
        ("joint_exact", 2),
        ("joint_exact", 4),
        ("shared", 2),
        ("shared", 4),
        ("shared_exact", 4),
        ("shared_int8", 4),
        ("oss", 2),
        ("oss", 4),
        ("oss_exact", 4),
        ("oss_int8", 2),
        ("mxfp4", 2),
        ("mxfp4", 4),
        ("gptq", 2),
        ("gptq_int8", 2),
        ("gptq_int4", 2),
        ("adapted", 4),
        ("adapted_exact", 4),
        ("adapted_int8", 4),
        ("adapted_int4", 4),
        ("adapted_phi", 2),
        ("adapted_phi_exact", 2),
        ("adapted_oss", 4),
    ],
)
@pytest.mark.slow
def test_the_logits_of_every_case_are_those_of_one_device(whole: Mesh, case: str, ways: int) -> None:
    """In another order of the sums, too, they are those of one device in its own order."""
    check_logits(whole, case, ways)


@pytest.mark.parametrize(("case", "ways"), [(case, 4) for case in QUICK])
def test_the_logits_are_those_of_one_device(mesh: Mesh, case: str, ways: int) -> None:
    check_logits(mesh, case, ways)


def check_logits(mesh: Mesh, case: str, ways: int) -> None:
    one, several = mesh.logits[f"{case.removesuffix('_exact')}-1"], mesh.logits[f"{case}-{ways}"]
    assert one.std() > 0.5
    np.testing.assert_allclose(several, one, atol=1e-4)


@pytest.mark.slow
def test_deterministic_mode_gives_the_bits_of_one_device(whole: Mesh) -> None:
    """At sizes of real products; those of the tiny checkpoints take other paths through the CPU's libraries."""
    for case in ("demo_exact", "grown_exact"):
        np.testing.assert_array_equal(whole.logits[f"{case}-4"], whole.logits[f"{case}-1"])


@pytest.mark.slow
def test_a_converted_checkpoint_divides_as_its_source_does(whole: Mesh) -> None:
    np.testing.assert_array_equal(whole.logits["converted-4"], whole.logits["norms-4"])
    np.testing.assert_array_equal(whole.logits["converted_int8-4"], whole.logits["norms_int8-4"])
    assert np.abs(whole.logits["norms_int8-1"] - whole.logits["norms-1"]).max() > 1e-3


@pytest.mark.slow
def test_texts_do_not_depend_on_the_number_of_devices(whole: Mesh, deterministic: LLM) -> None:
    one = texts_of(deterministic)
    assert all(len(text) == 24 for text in one)
    assert whole.report["texts"] == one


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["demo", "demo-head"])
def test_texts_of_two_devices_are_those_of_one(tmp_path: Path, deterministic: LLM, draft: str) -> None:
    """In one process; test_multihost.py has one device in each of two."""
    on_devices(tmp_path, "2", draft)
    assert json.loads((tmp_path / "texts.json").read_text()) == texts_of(deterministic)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [["eagle3"], ["medusa", "mtp"]], ids=len)
def test_a_head_reads_the_features_of_a_divided_target(tmp_path: Path, kinds: list[str]) -> None:
    """It searches as beside a target on one device; embedding and logits that it has from the target are copies."""
    on_devices(tmp_path, "heads", *kinds)
    with np.load(tmp_path / "heads.npz") as found:
        trees = dict(found)
    for kind in kinds:
        for row in (0, 1):
            one, two = ({name: trees[f"{kind}-{ways}-{row}-{name}"] for name in ("token", "parent", "log_f", "log_q")}
                        for ways in (1, 2))  # fmt: skip
            assert (one["log_f"] > -np.inf).all()
            np.testing.assert_array_equal(one["token"], two["token"])
            np.testing.assert_array_equal(one["parent"], two["parent"])
            for name in ("log_f", "log_q"):
                np.testing.assert_allclose(two[name], one[name], atol=1e-4)
    sizes = json.loads((tmp_path / "heads.json").read_text())
    assert len(sizes) == 2 * len(kinds)
    for kind, parts in sizes.items():
        for name, (planned, held) in parts.items():
            assert planned == held, (kind, name)
    for kind in {"eagle3", "mtp"}.intersection(kinds):
        assert sizes[f"{kind}-2"]["weights"] > sizes[f"{kind}-1"]["weights"]


@pytest.mark.slow
def test_heads_learn_beside_a_divided_target_as_beside_a_whole_one(tmp_path: Path) -> None:
    on_devices(tmp_path, "taught")
    found = {key: np.array(scores) for key, scores in json.loads((tmp_path / "taught.json").read_text()).items()}
    for kind in ("eagle3", "medusa"):
        losses = found[f"{kind}-1"][:, 0]
        assert losses[-1] < losses[0] - 0.1
        np.testing.assert_allclose(found[f"{kind}-2"], found[f"{kind}-1"], rtol=1e-3)


def test_every_device_holds_its_share(mesh: Mesh) -> None:
    """Two key-value heads: each device of two has one of them, and of four one that another has too."""
    held = mesh.report["held"]
    for case, ways, least, most in (
        ("plain", 4, 0.25, 0.35),
        ("norms", 2, 0.5, 0.56),  # norms, and scales of sums, are whole everywhere
        ("norms", 4, 0.25, 0.35),  # and key-value rows twice
        ("norms_exact", 4, 0.25, 0.35),
        ("norms_int8", 4, 0.25, 0.35),
        ("experts", 4, 0.25, 0.35),
        ("experts_exact", 4, 0.25, 0.35),
    ):
        if not mesh.is_whole and case not in QUICK:
            continue
        one, several = held[f"{case.removesuffix('_exact')}-1"], held[f"{case}-{ways}"]
        assert several["pools"] == [one["pools"][0] // 2] * ways
        assert len(set(several["weights"])) == 1
        assert least <= several["weights"][0] / one["weights"][0] < most


def test_the_ledger_knows_the_share_of_every_device(mesh: Mesh) -> None:
    """To the byte, in f32, int8 and int4, in both orders of the sums."""
    for key, held in mesh.report["held"].items():
        ways = int(key.rpartition("-")[2])
        assert {name: [size] * ways for name, size in mesh.report["ledger"][key].items()} == held, key


def test_no_program_on_a_mesh_copies_a_pool(mesh: Mesh) -> None:
    held, hlo = mesh.report["held"], mesh.report["hlo"]
    assert {*hlo} == {f"{case}-{ways}" for case in READ if mesh.is_whole or case in QUICK for ways in CASES[case][3]}
    for key, programs in hlo.items():
        heads = 2 if key.endswith("-1") else 1
        assert programs
        for program in programs:
            shape = next(s for s in _shapes(program) if len(s) == 5 and s[2] == heads)
            assert 2 * 4 * np.prod(shape) == held[key]["pools"][0]
            assert copies_of(program, shape) == []


def _shapes(hlo: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, text.split(","))) for text in re.findall(r"f32\[([\d,]+)\]", hlo)]


def test_sizes_that_do_not_divide_are_named(mesh: Mesh) -> None:
    refusals = mesh.report["refusals"]
    assert refusals["more"].startswith("tp must be at most 4, the cpu devices that jax sees, got 8; a CPU shows more")
    groups = "2 devices (tp) cannot divide the 3 groups of inputs of layers.0.down"
    assert refusals["groups"] == f"quantize must be none or int8 here, got 'int4': {groups}"
    assert refusals["uneven"] == "tp must divide the target's num_attention_heads (4), got 3"
