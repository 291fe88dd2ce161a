"""The embedded pair behind `adaserve serve`, as a program, and client packages that run in an environment of their own.

Client packages pin versions that the server's packages exclude (aiperf an older rich), so `make test-clients` installs
them apart from the suite, and their programs run as subprocesses.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.bench.scripts import imported
from tests.conftest import ROOT

with imported("server.http_load") as modules:
    adaserve, sample, served = (getattr(modules["http_load"], name) for name in ("adaserve", "sample", "served"))

ENVIRONMENT = ROOT / os.environ.get("CLIENTS_VENV", ".venv-clients")
TOKENIZER = ROOT / "adaserve_jax" / "models" / "demo" / "target"
OPTIONS = {"max_requests": 8, "token_edges": (16, 64), "row_edges": (8,), "max_choices": 4}
LONGEST_RUN_S = 600


@dataclass(frozen=True)
class Clients:
    """Programs of client packages, pointed at one server.

    url: of the server. folder: where they run; they write their caches and results below it.
    """

    url: str
    folder: Path

    def run(self, command: str, *arguments: str | Path, offline: bool = True) -> str:
        """Run an installed command and return what it prints. Fails, with its output, if it fails.

        offline: say so to the model hub's library. aiperf then takes a folder's path for a name on the hub.
        """
        environment = os.environ | {
            "HOME": str(self.folder), "HF_HOME": str(self.folder / "hf"), "HF_HUB_OFFLINE": "1" if offline else "",
            "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "unused", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "PYTHONPATH": "", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
        }  # fmt: skip
        done = subprocess.run(
            [ENVIRONMENT / "bin" / command, *map(str, arguments)],
            cwd=self.folder, env=environment, capture_output=True, text=True, timeout=LONGEST_RUN_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command} failed: {done.stdout[-6000:]}{done.stderr[-6000:]}"
        return done.stdout

    def generated(self) -> float:
        """Return how many tokens the server has generated."""
        return sample(int(self.url.rpartition(":")[2]), "adaserve_generation_tokens_total")

    def report(self, program: str) -> dict[str, Any]:
        """Run a program of this folder and return the JSON in its last line."""
        printed = self.run("python", Path(__file__).parent / program, self.url)
        return json.loads(printed.splitlines()[-1])


@pytest.fixture(scope="session")
def demo_url() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
        with served(adaserve(**OPTIONS)) as server:
            yield f"http://127.0.0.1:{server.port}"


@pytest.fixture
def clients(demo_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> Clients:
    """Skips the tests of a module whose PACKAGE is not installed."""
    package = request.module.PACKAGE
    if not list(ENVIRONMENT.glob(f"lib/python*/site-packages/{package}")):
        pytest.skip(f"CLIENT NOT CHECKED: {package} is not in {ENVIRONMENT.name}; `make test-clients` installs it")
    return Clients(demo_url, tmp_path)
