"""What gRPC is imported with, and that nothing of it is left for other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from adaserve_jax.star.grpc_direct import DIRECT, VARIABLE, _is_known

TELL = f"import os; from adaserve_jax.star.grpc_direct import grpc; print(grpc.seen, os.environ.get({VARIABLE!r}))"


@pytest.mark.parametrize("asked", [None, "something_else"])
def test_grpc_is_asked_for_direct_reads_while_it_is_imported_unless_somebody_asks_otherwise(
    asked: str | None, tmp_path: Path
) -> None:
    (tmp_path / "grpc.py").write_text(f"import os\nseen = os.environ.get({VARIABLE!r})\n")
    paths = [str(tmp_path), str(Path(__file__).parents[2])]
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    if asked is not None:
        environment[VARIABLE] = asked
    told = subprocess.run([sys.executable, "-c", TELL], env=environment, check=True, capture_output=True, timeout=60)
    ours = DIRECT if _is_known(version("grpcio")) else None
    assert told.stdout.decode().strip() == (f"{ours} None" if asked is None else f"{asked} {asked}")


def test_versions_that_are_not_known_are_left_as_they_are() -> None:
    known = {"1.75.1": True, "1.85.1": True, "1.86.0rc1": False, "2.0.0": False}
    assert {each: _is_known(each) for each in known} == known
