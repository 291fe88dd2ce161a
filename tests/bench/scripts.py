"""Import modules of benchmarks/ for a test, and forget them afterwards."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

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
