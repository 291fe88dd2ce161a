"""benchmarks/device.py: its arithmetic, on small arrays. The whole run is a benchmark, not a test."""

import importlib.util
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from adaserve_jax.types import CostSamples


@pytest.fixture(scope="module")
def device():
    spec = importlib.util.spec_from_file_location("device", Path(__file__).parents[2] / "benchmarks" / "device.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["device"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["device"]


def test_bounds_are_memory_below_the_knee_and_compute_above(device):
    ceilings = device.Ceilings("float32", 0, 10e9, 0, 1e12)
    samples = CostSamples({(1, 1): 0.08, (256, 4): 0.1}, {}, {})
    small, large = device.step_times(samples, ceilings, 100_000_000, 400_000_000)
    assert (small.tokens, small.rows, small.bound_s) == (1, 1, pytest.approx(0.04))  # 400 MB at 10 GB/s
    assert small.of_bound == pytest.approx(0.5)
    assert large.bound_s == pytest.approx(0.0512)  # 2 x 1e8 x 256 operations at 1e12/s


def test_best_seconds_is_the_time_of_one_call(device, monkeypatch):
    monkeypatch.setattr(device, "BATCH_S", 0.0)
    calls = []

    def call():
        calls.append(1)
        device.time.sleep(0.01)
        return jnp.zeros(())

    assert device.best_seconds(call) == pytest.approx(0.01, rel=0.5)
    assert len(calls) == device.REPEATS + 2
