"""Import modules of benchmarks/ for a test, and forget them afterwards."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from tests.conftest import ROOT

FOLDER = ROOT / "benchmarks"


@contextmanager
def imported(*names: str) -> Iterator[dict[str, ModuleType]]:
    """Yield modules by the last part of their name: "starsd.table1"; forget what they import from benchmarks/ too."""
    try:
        yield {name.rpartition(".")[2]: importlib.import_module(f"benchmarks.{name}") for name in names}
    finally:
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(f"{FOLDER}/"):
                del sys.modules[name]


def modules_of(*names: str, left_out: str = ""):
    """Return a fixture: `imported(*names)`. left_out: what names of modules begin with; the one that is no more than
    that is `main`."""

    @pytest.fixture(scope="module")
    def modules() -> Iterator[dict[str, ModuleType]]:
        with imported(*names) as found:
            yield {name.removeprefix(left_out).lstrip("_") or "main": module for name, module in found.items()}

    return modules
