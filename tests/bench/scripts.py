"""Import modules of benchmarks/ or scripts/ for a test, and forget them afterwards."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from tests.conftest import ROOT

FOLDER = ROOT / "benchmarks"


@contextmanager
def imported(*names: str, folder: Path = FOLDER) -> Iterator[dict[str, ModuleType]]:
    """Yield modules by the last part of their name: "starsd.table1" of benchmarks/, or a script of `folder`.

    Everything that they import from these folders is forgotten too.
    """
    before = list(sys.path)
    package = "benchmarks." if folder == FOLDER else ""
    if not package:
        sys.path.insert(0, str(folder))
    try:
        yield {name.rpartition(".")[2]: importlib.import_module(package + name) for name in names}
    finally:
        sys.path[:] = before
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith((f"{FOLDER}/", f"{folder}/")):
                del sys.modules[name]
