"""A program that was compiled once is loaded without being traced again, and never in the place of another."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax.cpu_kernels.library import SWITCH, fingerprint
from adaserve_jax.runtime.compile import Declared, compile_all, use_compile_cache
from adaserve_jax.runtime.program_cache import UNUSED_LIMIT_S
from tests.conftest import ROOT

traced: list[str] = []
X = jax.ShapeDtypeStruct((3,), jnp.float32)


class Scaled(NamedTuple):
    value: jax.Array
    factor: jax.Array


def scale(x: jax.Array, *, factor: float, note: str = "") -> Scaled:
    traced.append("scale")
    return Scaled(x * factor, jnp.float32(factor))


@dataclass(frozen=True)
class Shift:
    """A method of frozen settings, as the programs of models are."""

    by: int

    def shifted(self, x: jax.Array) -> jax.Array:
        traced.append("shift")
        return x + self.by


def shift_in_place(x: jax.Array) -> jax.Array:
    traced.append("in place")
    return x + 1


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    fingerprint()  # the CPU's kernels are compiled once, in the folder that all tests share
    before = jax.config.values["jax_compilation_cache_dir"]
    use_compile_cache(tmp_path)
    traced.clear()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def compiled(function: Any, *arguments: Any, key: str = "one") -> Any:
    """Give each test programs of its own: JAX has those of the process in memory, and they are not kept then."""
    return compile_all([Declared((key,), function, arguments)])[key,]


def test_a_second_start_traces_nothing_and_computes_the_same(folder: Path) -> None:
    for _ in range(2):
        found = compiled(jax.jit(partial(scale, factor=3.0)), X)(np.float32([1, 2, 3]))
        assert isinstance(found, Scaled) and found.value.tolist() == [3, 6, 9] and found.factor == 3
        assert compiled(jax.jit(Shift(2).shifted), X)(np.float32([1, 2, 3])).tolist() == [3, 4, 5]
    assert traced == ["scale", "shift"]


def ignore(x: jax.Array, unread: jax.Array) -> jax.Array:
    return x * 7


def test_programs_differ_by_the_shape_of_an_argument_that_they_do_not_read(folder: Path) -> None:
    """Their texts are the same. Medusa heads have no K/V, so that their commits are such programs."""
    for length in (4, 16):
        unread = jax.ShapeDtypeStruct((length,), jnp.int32)
        found = compiled(jax.jit(ignore), X, unread)(np.float32([1, 2, 3]), np.zeros(length, np.int32))
        assert found.tolist() == [7, 14, 21]


def test_an_argument_that_is_given_away_stays_so(folder: Path) -> None:
    for _ in range(2):
        given = jnp.zeros(3)
        assert compiled(jax.jit(shift_in_place, donate_argnums=0), X)(given).tolist() == [1, 1, 1]
        assert given.is_deleted()
    assert traced == ["in place"]
    kept = jnp.zeros(3)
    assert compiled(jax.jit(shift_in_place), X, key="other")(kept).tolist() == [1, 1, 1]
    assert not kept.is_deleted()


def test_the_compiler_says_of_a_loaded_program_what_it_said_of_the_first(folder: Path) -> None:
    program = jax.jit(shift_in_place, donate_argnums=0)
    first, second = (compiled(program, X).memory_analysis() for _ in range(2))
    for name in ("argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes", "temp_size_in_bytes"):
        assert getattr(first, name) == getattr(second, name)


def test_other_settings_shapes_and_flags_are_other_programs(folder: Path) -> None:
    ones = np.ones(3, np.float32)
    for factor in (2.0, 5.0):
        assert compiled(jax.jit(partial(scale, factor=factor)), X)(ones).value.tolist() == [factor] * 3
    for by in (1, 7):
        assert compiled(jax.jit(Shift(by).shifted), X)(ones).tolist() == [1 + by] * 3
    assert compiled(jax.jit(Shift(1).shifted), jax.ShapeDtypeStruct((2,), jnp.int32))(np.arange(2)).tolist() == [1, 2]
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", not before)
    try:
        compiled(jax.jit(Shift(1).shifted), X)
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
    assert traced == ["scale", "scale", "shift", "shift", "shift", "shift"]


def test_what_is_written_otherwise_and_lowered_to_the_same_is_compiled_once(folder: Path) -> None:
    for note in ("a", "b"):
        compiled(jax.jit(partial(scale, factor=9.0, note=note)), X)
    assert traced == ["scale", "scale"]
    files = [path.stat().st_ino for path in (folder / "programs").iterdir()]
    assert len(files) == 3 and len(set(files)) == 1, "two sources, one lowered text, one executable"


def test_what_cannot_be_told_apart_is_traced_each_time(folder: Path) -> None:
    for amount in (1, 2):

        def add(x: jax.Array, amount: int = amount) -> jax.Array:
            traced.append("add")
            return x + amount

        assert compiled(jax.jit(add), X)(np.zeros(3, np.float32)).tolist() == [amount] * 3
    assert traced == ["add", "add"] and not (folder / "programs").exists()


def test_a_damaged_file_is_compiled_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    function = jax.jit(Shift(9).shifted)
    compiled(function, X)
    for path in (folder / "programs").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    function.clear_cache()
    assert compiled(function, X)(np.zeros(3, np.float32)).tolist() == [9, 9, 9]
    assert "cannot be loaded and is compiled again" in caplog.text


def test_files_that_no_start_has_used_for_long_are_deleted(folder: Path) -> None:
    for by in (21, 22):
        compiled(jax.jit(Shift(by).shifted), X)
    for path in (folder / "programs").iterdir():
        os.utime(path, (0, time.time() - UNUSED_LIMIT_S + 3600))
    compiled(jax.jit(Shift(21).shifted), X)  # loaded, and so used now
    for path in (folder / "programs").iterdir():
        os.utime(path, (0, path.stat().st_mtime - 7200))
    traced.clear()
    compiled(jax.jit(Shift(21).shifted), X)
    assert traced == [] and len(list((folder / "programs").iterdir())) == 2, "one program under two names"


START = """
import sys
import numpy as np, jax
from adaserve_jax.runtime.compile import use_compile_cache
from tests.runtime.test_program_cache import Shift, X, compiled
use_compile_cache(sys.argv[1])
function = jax.jit(Shift(4).shifted)
for engine in range(3):
    if sys.argv[2] == "changing":  # settings that are a part of the names on disk
        jax.config.update("jax_traceback_in_locations_limit", 10 + engine)
    assert compiled(function, X)(np.zeros(3, np.float32)).tolist() == [4, 4, 4]
"""


@pytest.mark.parametrize(("settings", "files"), [pytest.param("same", 2, marks=pytest.mark.slow), ("changing", 3 * 2)])
@pytest.mark.slow
def test_a_program_that_jax_had_cached_runs_and_is_not_kept(tmp_path: Path, settings: str, files: int) -> None:
    """Nor is it when another engine of the process asks for it, which JAX has in memory then."""
    start = [sys.executable, "-c", START, tmp_path, settings]
    without_kernels = os.environ | {SWITCH: "0"}  # of the CPU, which a new folder would have them compile
    subprocess.run(start, check=True, cwd=ROOT, env=without_kernels)
    kept = list((tmp_path / "programs").iterdir())
    for path in kept:
        path.unlink()
    subprocess.run(start, check=True, cwd=ROOT, env=without_kernels)
    assert len(kept) == files and list((tmp_path / "programs").iterdir()) == []


def test_a_folder_that_cannot_be_written_only_costs_time(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "programs").write_text("a file in its place")
    caplog.set_level("INFO")
    assert compiled(jax.jit(Shift(5).shifted), X)(np.zeros(3, np.float32)).tolist() == [5, 5, 5]
    assert "a program could not be kept" in caplog.text
