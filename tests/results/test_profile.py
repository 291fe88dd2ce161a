"""Lines fitted to times, and the profile file: round trip, what it refuses, and what it holds for."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.profile import Identity, Profile, Timings, fit_line, read_profile, write_profile
from adaserve_jax.results.provenance import model_hash
from adaserve_jax.types import Limits

LIMITS = Limits(16, (4, 16, 64), 64, 1024, 16, 512, 4, 3)
IDENTITY = Identity("a processor, 2 cores", "cpu: cpu", "t" * 64, "d" * 64, LIMITS, {"dtype": "f32", "row_edges": [16]})


def timings(*, verify_slope: float = 2e-6, level_slope: float = 1e-7) -> Timings:
    """16 rows in groups of 8; verify: 10 ms + 0.1 ms a token, and a slope; a level: 0.5 ms per width, and a slope."""
    made = Timings(typical_context=256, context_rows=8)
    for context in (64, 768):
        for tokens in LIMITS.token_edges:
            groups = -(-min(tokens, 16) // 8)
            made.verify[tokens, 16, context] = 0.01 + 1e-4 * tokens + verify_slope * context * groups
            made.catchup[tokens, 16, context] = 1e-3 + 1e-5 * tokens + 1e-7 * context * groups
        for width in (1, 3):
            for depth in (1, 2, 4):
                level = 5e-4 * width + level_slope * context * 2
                made.search[16, width, depth, context] = 2e-4 + depth * level
    return made


def profile(**changes) -> Profile:
    values = {
        "name": "small", "made_at": "2026-01-01T00:00:00+00:00", "commit": "abc", "package_version": "0.1.0",
        "jax_version": "0.10.2", "identity": IDENTITY, "timings": timings(), "baseline_s": 0.011, "acceptance": 0.7,
    }  # fmt: skip
    return Profile(**{**values, **changes})


def test_known_slopes_are_recovered():
    samples = timings().samples()
    assert samples.verify_s[64, 16] == pytest.approx(0.01 + 64e-4 + 2e-6 * 256 * 2)
    assert samples.verify_s[4, 16] == pytest.approx(0.01 + 4e-4 + 2e-6 * 256)  # 4 rows at most: one group
    assert list(samples.verify_per_context_s.values()) == pytest.approx([2e-6] * 3)
    assert samples.draft_level_s[16, 3] == pytest.approx(15e-4 + 1e-7 * 512)
    assert samples.level_per_context_s[16, 1] == pytest.approx(1e-7)
    assert samples.catchup_s[64] == pytest.approx(1e-3 + 64e-5 + 1e-7 * 512)
    assert samples.catchup_per_context_s[16] == pytest.approx(1e-7)
    assert (samples.context, samples.context_rows) == (256, 8)


def test_a_time_at_one_context_has_no_slope_and_noise_gives_none_below_zero():
    one = Timings(0, 8, {(4, 4, 0): 0.02}, {}, {(4, 2, 3, 0): 0.009})
    assert one.samples().verify_s == {(4, 4): 0.02}
    assert one.samples().verify_per_context_s == {(4, 4): 0.0}
    assert one.samples().draft_level_s == {(4, 2): 0.009}  # one depth only: the whole call
    assert fit_line(np.array([0.0, 100.0]), np.array([0.02, 0.01]))[1] == 0.0


def test_a_line_is_of_least_relative_error_and_never_far_below_what_was_measured():
    load, seconds = np.array([0.0, 100.0, 200.0]), np.array([1.0, 2.0, 3.5])
    base, slope = fit_line(load, seconds)

    def error(base: float, slope: float) -> float:
        return float((((base + slope * load) / seconds - 1) ** 2).sum())

    rng = np.random.default_rng(0)
    tries = [error(base + a, slope + b) for a, b in rng.normal(0, [0.05, 0.0005], (500, 2))]
    assert error(base, slope) < min(tries)
    base, slope = fit_line(np.array([100.0, 200.0]), np.array([0.1, 1.0]))
    assert base == pytest.approx(0.025) and slope > 0


def test_a_profile_is_read_as_it_was_written(tmp_path: Path):
    path = tmp_path / "profile.json"
    written = profile(c1=2, c2=-1, errors={"verify": {"steps": 3, "median": 0.1, "p90": 0.2}})
    write_profile(path, written)
    assert read_profile(path) == written
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]
    assert len(path.read_text().splitlines()) < 100  # a line for each timing, not for each number


def test_it_holds_for_what_it_was_measured_with():
    profile().check(IDENTITY, "p.json")
    profile().check(replace(IDENTITY, limits=replace(LIMITS, num_pages=4)), "p.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machine": "another"}, "machine is 'a processor, 2 cores' in it, and 'another' now"),
        ({"device": "gpu: H100"}, "device is 'cpu: cpu' in it, and 'gpu: H100' now"),
        ({"target": "x"}, "target is 'tttt"),
        ({"draft": None}, "and None now"),
        ({"limits": replace(LIMITS, token_edges=(4, 16, 128))}, r"token_edges is \(4, 16, 64\) in it"),
        (
            {"limits": replace(LIMITS, max_depth=6)},
            "max_depth is 4 in it, and 6 now; measure again with `adaserve prof",
        ),
        ({"settings": {"dtype": "bf16", "row_edges": [16]}}, "dtype is 'f32' in it, and 'bf16' now"),
    ],
)
def test_it_is_refused_elsewhere(changes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        profile().check(replace(IDENTITY, **changes), "p.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(kind="machine"), "is no profile: expected an object of kind 'adaserve profile'"),
        (lambda values: values.update(version=9), "has version 9, and this program reads version 1"),
        (lambda values: values.pop("timings"), "field 'timings' is wrong: Field required"),
        (lambda values: values.update(speed=1), "field 'speed' is wrong: Unexpected"),
        (
            lambda values: values["identity"]["limits"].pop("max_depth"),
            "field 'identity.limits.max_depth' is wrong: Field required",
        ),
        (lambda values: values["timings"].update(verify=[]), "field 'timings.verify' is wrong: .* at least 1 item"),
        (lambda values: values["timings"]["verify"][0].pop(), "field 'timings.verify.*: Field required"),
        (lambda values: values["timings"]["verify"].append(3), "must be rows of sizes and their seconds"),
        (lambda values: values["timings"].update(search=[[]]), "must be rows of sizes and their seconds"),
        (lambda values: values["timings"].update(search=[[[1], 2, 3, 0.1]]), "must be rows of sizes and their seconds"),
        (lambda values: values.update(baseline_s=math.inf), "field 'baseline_s' is wrong: .* a finite number"),
        (lambda values: values.update(acceptance=1.5), "field 'acceptance' is wrong: .* less than 1"),
        (
            lambda values: values["timings"].update(switching=[[1, 1, 0.1], [2, 2, 0.2]]),
            "switching must have a time for every lag with every number of rows",
        ),
        (
            lambda values: values.update(identity=3),
            "field 'identity' is wrong: .* a dictionary or an instance of Identity",
        ),
        (
            lambda values: values.update(serving={"verify": 0.0, "draft": 1.0}),
            "field 'serving.verify' is wrong: .* greater than 0",
        ),
        (lambda values: values.update(serving={"verify": 1.0}), "field 'serving.draft' is wrong: Field required"),
        (lambda values: values.update(serving={"verify": 1.0, "draft": 1.0, "x": 1.0}), "'serving.x' .*: Unexpected"),
        (
            lambda values: values.update(serving={"verify": 1.0, "draft": 1.0, "verify_by_size": [[1, 1, 0.0]]}),
            "field 'serving.verify_by_size.* greater than 0",
        ),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, change, message: str):
    path = tmp_path / "p.json"
    write_profile(path, profile())
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=message):
        read_profile(path)


def test_a_place_that_takes_no_file_is_told(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write profile .*p.json: .*; choose another --out"):
        write_profile(tmp_path / "file" / "p.json", profile())


def test_files_that_are_not_there_or_no_json_are_named(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"cannot read profile .*gone.json: No such .*; make one with `adaserve profile`"
    ):
        read_profile(tmp_path / "gone.json")
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(ConfigError, match=r"p.json: invalid JSON"):
        read_profile(tmp_path / "p.json")


def test_the_hash_of_a_model_follows_its_shapes_and_not_its_numbers(tmp_path: Path):
    from safetensors.numpy import save_file

    hashes = []
    for number, (value, shape, hidden) in enumerate([(0, 4, 8), (1, 4, 8), (0, 5, 8), (0, 4, 9)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"hidden_size": hidden}))
        save_file({"w": np.full((shape, 2), value, np.float32)}, folder / "model.safetensors")
        hashes.append(model_hash(folder))
    assert hashes[0] == hashes[1] and len(set(hashes)) == 3


def test_switching_costs_are_kept_and_older_files_have_none(tmp_path: Path):
    path = tmp_path / "p.json"
    made = replace(timings(), switching={(1, 1): 0.001, (1, 16): 0.002, (1024, 1): 0.01, (1024, 16): 0.2})
    write_profile(path, profile(timings=made))
    assert read_profile(path).timings == made
    assert read_profile(path).timings.samples().switch_s == made.switching
    values = json.loads(path.read_text())
    values["timings"]["switching"].pop()
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="switching must have a time for every lag with every number of rows"):
        read_profile(path)
    del values["timings"]["switching"], values["identity"]["limits"]["extension_pages"]
    path.write_text(json.dumps(values))
    assert read_profile(path).timings == timings()
    assert read_profile(path).identity == IDENTITY
