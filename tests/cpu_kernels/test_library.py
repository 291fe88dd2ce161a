"""The library is compiled once, found by every later process, and done without where it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from adaserve_jax.cpu_kernels.library import SWITCH, fingerprint, target
from adaserve_jax.pallas_kernels.paged_tree_attention.api import unsupported

REPORT = """
import logging; logging.basicConfig()
import jax, jax.numpy as jnp
from adaserve_jax.cpu_kernels.library import fingerprint
from adaserve_jax.models.quantize import product
from adaserve_jax.models.layers import Linear
from flax import nnx
linear = Linear(3, 4, ("vocab", "embed"), nnx.Rngs(0), jnp.float32)
assert jnp.allclose(linear(jnp.ones((4, 2))), product(linear.weight[...], jnp.ones((4, 2))), atol=1e-6)
from adaserve_jax.models.experts import grouped_product
weights, x = jnp.arange(24.0).reshape(2, 3, 4), jnp.eye(4)
expected = jnp.concatenate([weights[0][:, :1], weights[1][:, 1:]], axis=1)
assert jnp.allclose(grouped_product(weights, x, jnp.array([1, 3])), expected, atol=1e-6)
print(fingerprint() or "none")
"""


def in_a_process(cache: Path, **environment: str) -> tuple[str, str]:
    """The fingerprint that a new process reports, and what it logs."""
    settings = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache), **environment}
    done = subprocess.run([sys.executable, "-c", REPORT], env=settings, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


@pytest.mark.slow
def test_a_second_process_finds_the_library_of_the_first(tmp_path: Path) -> None:
    cache = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    name = fingerprint()
    library = cache / "kernels" / f"{name}.so"
    made = library.stat().st_mtime_ns
    assert in_a_process(cache)[0] == name
    assert library.stat().st_mtime_ns == made
    assert target("product_f32") == f"adaserve_product_f32_{name}"


@pytest.mark.slow
def test_without_a_compiler_xla_computes(tmp_path: Path) -> None:
    found, log = in_a_process(tmp_path, CXX="no-such-compiler")
    assert found == "none"
    assert "CPU kernels were not compiled by no-such-compiler, XLA's are used" in log


@pytest.fixture
def broken_compiler(tmp_path: Path) -> str:
    broken = tmp_path / "c++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo "no room for $#" >&2; exit 3; }\n')
    broken.chmod(0o755)
    return str(broken)


@pytest.mark.slow
def test_a_compiler_that_fails_is_quoted(tmp_path: Path, broken_compiler: str) -> None:
    found, log = in_a_process(tmp_path, CXX=broken_compiler)
    assert found == "none" and "no room for" in log


@pytest.mark.slow
def test_an_empty_variable_is_no_folder(tmp_path: Path, broken_compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found, _ = in_a_process(Path(), CXX=broken_compiler, JAX_COMPILATION_CACHE_DIR="", XDG_CACHE_HOME=str(tmp_path))
    assert found == "none" and not (tmp_path / "kernels").exists()


@pytest.mark.slow
def test_a_switch_turns_them_off(tmp_path: Path) -> None:
    found, log = in_a_process(tmp_path, **{SWITCH: "0"})
    assert found == "none" and "kernels" not in log


def test_shapes_that_the_attention_kernel_lacks_are_named() -> None:
    import jax.numpy as jnp

    fits = {"head_dim": 64, "page_size": 16, "group": 3, "dtype": jnp.dtype("float32")}
    assert unsupported("cpu", **fits) == ""
    assert "is for f32, not bfloat16" in unsupported("cpu", **{**fits, "dtype": jnp.dtype("bfloat16")})
    assert "multiple of 16, got 24" in unsupported("cpu", **{**fits, "head_dim": 24})
