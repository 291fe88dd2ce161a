"""Loops that numba compiles, on a machine that lets nothing be kept."""

import os
import subprocess
import sys

CODE = """
from adaserve_jax.compiled import compiled
names = {}
exec(compile("def twice(x): return 2 * x", "/proc/nowhere/loops.py", "exec"), names)
print(compiled(names["twice"])(21))
"""


def test_a_machine_that_lets_no_cache_be_written_compiles_anew() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "XDG_"))}
    result = subprocess.run(
        [sys.executable, "-c", CODE], env=env | {"HOME": "/proc/nowhere"}, capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "42", result.stderr
