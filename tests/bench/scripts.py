"""Files of benchmarks/, imported as they are when one of them runs as a script, and forgotten afterwards."""

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
    """The modules by name. Whatever of the folder, or of benchmarks, they import themselves is forgotten too."""
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path[:] = before
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith((f"{FOLDER}/", f"{folder}/")):
                del sys.modules[name]
