"""benchmarks/device.py: its arithmetic, its order of parts, and that it finds what is wrong. The whole run is a
benchmark, not a test."""

import json
import time
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
import typer
from typer.testing import CliRunner

from adaserve_jax.types import CostSamples
from benchmarks.kernels.attention_specs import TINY
from tests.bench.scripts import modules_of

NAMES = ("device", "kernels.ceilings", "kernels.kernels", "nightjar.elastic")


modules = modules_of(*NAMES)


@pytest.fixture
def ceilings(modules):
    return modules["ceilings"].Ceilings("float32", 0, 10e9, 0, 1e12)


def test_bounds_are_memory_below_the_knee_and_compute_above(modules, ceilings):
    samples = CostSamples({(1, 1): 0.08, (256, 4): 0.1}, {}, {})
    small, large = modules["device"].step_times(samples, ceilings, 100_000_000, 400_000_000)
    assert (small.tokens, small.rows, small.bound_s) == (1, 1, pytest.approx(0.04))  # 400 MB at 10 GB/s
    assert small.of_bound == pytest.approx(0.5)
    assert large.bound_s == pytest.approx(0.0512)  # 2 x 1e8 x 256 operations at 1e12/s


def test_steps_stand_beside_the_times_of_the_data_sheet(modules, ceilings):
    samples = CostSamples({(1, 1): 0.08, (256, 4): 0.1}, {}, {})
    steps = modules["device"].step_times(samples, ceilings, 1, 1, lambda tokens, rows: tokens / rows)
    assert [step.computed_s for step in steps] == [1, 64]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"), ("TPU v6 lite", "v6e"), ("TPU7x", "tpu7x"), ("NVIDIA H100 PCIe", None), ("cpu", None),
    ],
)  # fmt: skip
def test_a_data_sheet_is_found_by_jaxs_name_of_the_device(modules, kind, name):
    sheet = modules["device"].data_sheet(kind)
    assert (None if sheet is None else sheet.name) == name


@pytest.fixture
def run(modules, monkeypatch, tmp_path):
    """Run the command on measurements that only note their names; returns the file, and what was measured."""
    device, kernels, swaps, noted = modules["device"], modules["kernels"], modules["elastic"].Swaps, []

    def note(name, result):
        noted.append(name)
        if name in failing:
            raise MemoryError(f"{name} needs more")
        return result

    ceilings = modules["ceilings"].Ceilings("float32", 0, 10e9, 0, 1e12)
    times = device.ProgramTimes(1, 4, "float32", 1.0, 1.0, 1.0, None, [device.StepTime(1, 1, 0.1, 0.05)], [], [], 64)
    monkeypatch.setattr(device, "measure_ceilings", lambda _: note("ceilings", ceilings))
    monkeypatch.setattr(device, "measure_programs", lambda *_: note("programs", times))
    monkeypatch.setattr(device, "measure_serving", lambda *_: note("bench", []))
    monkeypatch.setattr(device, "measure_step_parts", lambda *_: note("parts", []))
    monkeypatch.setattr(device, "run_swaps", lambda *_: (note("swaps", swaps(1, 1, 1, 1, 1, 1)), None))
    monkeypatch.setattr(device, "show_swaps", lambda *_: None)
    monkeypatch.setattr(device, "as_result", lambda timed: {"pages": 1})
    monkeypatch.setattr(device, "result_table", lambda rows: "")
    monkeypatch.setattr(kernels, "conformance", lambda full: note("conformance", []))
    monkeypatch.setattr(kernels, "time_kernels", lambda ceilings, full: note("times", []))
    monkeypatch.setattr(kernels, "time_picks", lambda: note("picks", []))
    monkeypatch.setattr(device, "source_commit", lambda: commit[0])
    commit, failing = ["abc"], set()
    app = typer.Typer()
    app.command()(device.device)

    def call(*options, fails=(), at="abc"):
        commit[0] = at
        noted.clear()
        failing.clear()
        failing.update(fails)
        done = CliRunner().invoke(app, ["--out", str(tmp_path / "device.json"), *options], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return json.loads((tmp_path / "device.json").read_text()), list(noted)

    return call


ORDER = ["ceilings", "conformance", "programs", "bench", "times", "picks", "parts", "swaps"]


def test_parts_are_measured_by_priority_and_a_part_that_fails_stops_no_other(run):
    found, noted = run(fails=("programs", "times"))
    assert noted == ORDER
    assert found["errors"] == {
        "programs": "MemoryError: programs needs more", "kernels.times": "MemoryError: times needs more"
    }  # fmt: skip
    assert found["bench"] == [] and found["kernels"] == {"conformance": [], "picks": []} and "programs" not in found


def test_the_same_command_measures_what_is_missing_and_nothing_else(run):
    run(fails=("programs",))
    found, noted = run()
    assert noted == ["programs"] and found["errors"] == {} and found["programs"]["target_params"] == 1
    assert run("--swaps", "3")[1] == ["swaps"]
    assert run("--max-requests", "4", "--swaps", "3")[1] == ["programs", "bench", "parts"]
    assert run("--max-requests", "4", "--swaps", "3", at="def")[1] == ORDER


def test_what_other_settings_measured_is_not_kept(run):
    run()
    found, _ = run("--max-requests", "4", fails=("programs", "bench"))
    assert "programs" not in found and "bench" not in found
    assert found["settings"].keys().isdisjoint({"programs", "bench"}) and "swaps" in found["settings"]


def test_no_part_is_begun_after_the_time(run, modules, monkeypatch):
    later = iter([0.0, 1.0, 59.0])
    monkeypatch.setattr(modules["device"], "time", SimpleNamespace(monotonic=lambda: next(later, 61.0)))
    found, noted = run("--minutes", "1")
    assert noted == ORDER[:2]
    assert found["not_begun"] == ["programs", "bench", "kernels.times", "kernels.picks", "parts", "swaps"]
    monkeypatch.setattr(modules["device"], "time", time)
    assert run("--minutes", "1")[1] == ORDER[2:]


def test_parts_that_need_the_ceilings_say_so(run):
    found, noted = run(fails=("ceilings",))
    assert noted == ["ceilings", "conformance", "bench", "picks", "parts", "swaps"]
    assert found["errors"]["programs"] == "ConfigError: needs the part ceilings, which was not measured"


def test_best_seconds_is_the_time_of_one_call(modules, monkeypatch):
    ceilings = modules["ceilings"]
    monkeypatch.setattr(ceilings, "BATCH_S", 0.0)
    calls = []

    def call():
        calls.append(1)
        ceilings.time.sleep(0.01)
        return jnp.zeros(())

    assert ceilings.best_seconds(call) == pytest.approx(0.01, rel=0.5)
    assert len(calls) == ceilings.REPEATS + 2


@pytest.mark.slow
def test_conformance_tells_right_from_wrong_and_from_what_does_not_run(modules, monkeypatch):
    kernels = modules["kernels"]
    right = kernels.api.paged_tree_attention
    assert [each.ok for each in kernels.check_attention(TINY["tree"], ["xla", "cpu"])] == [True, True]
    monkeypatch.setattr(kernels.api, "paged_tree_attention", lambda *args, **options: right(*args, **options) * 1.001)
    (wrong,) = kernels.check_attention(TINY["tree"], ["xla"])
    assert (wrong.ok, wrong.error > 1) == (False, True)

    def broken(*args, **options):
        raise ValueError("no such layout")

    monkeypatch.setattr(kernels.api, "paged_tree_attention", broken)
    (failed,) = kernels.check_attention(TINY["tree"], ["xla"])
    assert (failed.ok, failed.error, failed.detail) == (False, None, "ValueError: no such layout")


@pytest.mark.slow
def test_the_naive_form_is_the_same_attention(modules, ceilings):
    kernels = modules["kernels"]
    spec = TINY["chain"]
    case = kernels.make_case(spec, seed=0)
    # The naive form reads whole pages: what is not of a context must be finite.
    case = case._replace(k_pool=jnp.nan_to_num(case.k_pool), v_pool=jnp.nan_to_num(case.v_pool))
    tokens = kernels.packed_tokens(spec, *case[5:-1])
    arrays = (*case[:5], kernels.LAYER, tokens)
    ours = kernels.api.paged_tree_attention(*arrays)
    assert jnp.abs(kernels.naive_attention(*arrays) - ours).max() < 1e-5


@pytest.mark.slow
def test_every_implementation_of_a_cpu_is_timed_beside_the_naive_form(modules, ceilings, monkeypatch):
    kernels = modules["kernels"]
    monkeypatch.setattr(kernels, "in_turns", lambda calls: {name: (call(), 0.12)[1] for name, call in calls.items()})
    times = kernels.time_attention(TINY["chain"], ceilings, naive=True)
    assert [(each.implementation, each.seconds) for each in times] == [("xla", 0.01), ("cpu", 0.01), ("naive", 0.01)]
    # Two requests of 4 tokens over 16 and 5: (21 + 8) tokens x K, V x 2 heads x 64 x 4 bytes, queries and results.
    assert times[0].floor_s == pytest.approx((29 * 2 * 2 * 64 * 4 + 2 * 8 * 4 * 64 * 4) / 10e9)


@pytest.mark.slow
def test_a_shape_is_timed_with_its_window_softcap_and_sinks(modules, ceilings, monkeypatch):
    kernels = modules["kernels"]
    spec, given = TINY["capped_windowed_sinks_prefill"], []
    right = kernels.api.paged_tree_attention

    def noted(*args, **options):
        given.append((options["window"], options["softcap"], options["sinks"].shape))
        return right(*args, **options)

    monkeypatch.setattr(kernels.api, "paged_tree_attention", noted)
    monkeypatch.setattr(kernels, "in_turns", lambda calls: {name: (call(), 0.12)[1] for name, call in calls.items()})
    times = kernels.time_attention(spec, ceilings, naive=True)
    assert [each.implementation for each in times] == ["xla", "cpu"]
    assert set(given) == {(spec.window, spec.softcap, (spec.group * spec.kv_heads,))}


def test_swaps_are_judged_by_copies_of_the_same_run(modules):
    swaps = modules["elastic"].Swaps(256, 82, 41, 1, 1, 1)
    swaps.seconds |= {
        "copy_cache": [2.0, 1.0, 3.0], "copy_pages": [0.1, 0.2, 0.3], "expand": [0.1, 0.4, 0.2],
        "move": [0.1, 0.1, 0.5], "contract": [0.001, 0.4, 0.002], "draft_ready": [0.0001] * 3,
    }  # fmt: skip
    swaps.verify |= {"8 x 8": 0.01}
    swaps.verify_extended |= {"8 x 8": 0.011}
    assert swaps.expansion == pytest.approx(0.2 / 2.0)
    assert swaps.contraction == pytest.approx(0.5 / 0.2)  # sums by round: 0.101, 0.5, 0.502
    assert swaps.extended_step == {"8 x 8": pytest.approx(1.1)}
    assert swaps.judged() == {"expansion": True, "contraction": False, "dispatch": False}


def test_the_copy_that_swaps_are_held_against_copies(modules):
    pool = jnp.zeros((2, 9, 1, 4, 8))
    copied = modules["elastic"]._copier(pool, 3)()
    for into in copied:
        assert into.shape == (4, 2, 1, 4, 8)
        assert (into[:3] == 1).all() and (into[3:] == 0).all()
