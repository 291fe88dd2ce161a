"""Settings that hold for every test: no network, one device kind, a shared compile cache, repeatable hypothesis runs.

The environment is set at import, before any test module imports jax or transformers.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.assertion import rewrite
from hypothesis import settings

if TYPE_CHECKING:
    from adaserve_jax import LLM
    from adaserve_jax.engine.thread_engine import LocalEngine

ROOT = Path(__file__).resolve().parent.parent

os.environ["HF_HUB_OFFLINE"] = "1"
# Every HTTP client reads the certificates that it trusts; no test asks the internet, and reading one certificate is
# quickest.
os.environ.setdefault("SSL_CERT_FILE", str(ROOT / "tests" / "no_authority.pem"))
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
for _library in ("OMP", "OPENBLAS"):  # threads of several workers would wait for each other
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1":
    # XLA's older code for fusions and LLVM's first level compile much sooner, and the programs run about as fast.
    _flags = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_backend_optimization_level=1"
    if _flags not in os.environ.get("XLA_FLAGS", ""):  # a worker has them of the process that started it
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flags}"

OPTIMISED = (
    "models/test_decoder.py", "models/test_quantize.py",
    "runtime/test_adapters.py", "runtime/test_compile.py", "runtime/test_sizing.py", "runtime/test_programs.py",
    "bench/test_device_benchmark.py", "bench/test_throughput_benchmark.py",
    "engine/test_attention.py", "engine/test_device_memory.py",
    "engine/test_exactness.py", "engine/test_off_path.py",
)  # fmt: skip
"""Where the last bits of numbers count, or what a program looks like: programs are optimised, but for the older code
for fusions. Elsewhere code is made sooner, without most of XLA's optimisations. In `make test-slow` all code is made as
users run it."""

settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("repeatable")


def _has_gpu() -> bool:
    import jax

    return jax.default_backend() == "gpu"


LONGEST = (
    "engine/test_drafting.py", "server/test_tools.py", "runtime/test_mesh.py",
    "engine/test_learning.py", "models/test_checkpoint_formats.py", "pallas_kernels/test_paged_tree_attention.py",
    "server/test_serve.py", "cluster/test_local.py",
)  # fmt: skip
"""Files that take long, the longest first, as `--durations` of a run without a compile cache has them. They go first,
so that no worker is left alone with one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files, and skip, with a reason that is printed, tests whose device or library is not here."""
    place = {ROOT / "tests" / name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
    missing = {"torch": importlib.util.find_spec("torch") is None}
    missing["gpu"] = any("gpu" in item.keywords for item in items) and not _has_gpu()
    reasons = {
        "torch": "PARITY NOT CHECKED: torch is not installed; `make test` installs it",
        "gpu": "no CUDA device; set JAX_PLATFORMS=cuda where there is one",
    }
    for item in items:
        for marker, absent in missing.items():
            if absent and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reasons[marker]))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Rewrite the assertions of all test files once, before workers start: each of them would rewrite them all.

    Not where it is unsafe to fork, nor while branches are counted in each process.
    """
    workers = getattr(session.config.option, "numprocesses", None)
    unwanted = sys.dont_write_bytecode or sys.platform != "linux" or "coverage" in sys.modules
    if not workers or unwanted or rewrite.assertstate_key not in session.config.stash:
        return
    files = sorted((ROOT / "tests").rglob("test_*.py"), key=lambda file: -file.stat().st_size)
    _configured.append(session.config)
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        pool.map(_rewrite, files, chunksize=1)


_configured: list[pytest.Config] = []
"""Configuration of the run, for the processes that rewrite assertions."""


def _rewrite(file: Path) -> None:
    """Write the bytecode of a test file as pytest does when it imports it, if it can be written."""
    (config,) = _configured
    # These functions are pytest's own: a version without them fails here, and its tests would take as long as before.
    with contextlib.suppress(SyntaxError, OSError):  # the import of the file tells its error
        cached = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
        if rewrite.try_makedirs(cached.parent) and rewrite._read_pyc(file, cached) is None:
            source_hash, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, cached)


def pytest_collection_finish() -> None:
    """Exempt all that is loaded now from garbage collection, each pass of which would take a second."""
    gc.collect()
    gc.freeze()


def _is_optimised(file: Path) -> bool:
    return file.relative_to(ROOT / "tests").as_posix().startswith(OPTIMISED)


@contextlib.contextmanager
def optimised() -> Iterator[None]:
    """Compile with XLA's optimisations meanwhile, in this process."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module", autouse=True)
def optimised_files(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile with XLA's optimisations in the files that OPTIMISED names."""
    with optimised() if _is_optimised(request.path) else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def compiling(programs: str) -> Iterator[None]:
    """Compile these programs with XLA's optimisations, in one worker at a time: the others find them in the cache."""
    folder = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{programs}.lock").open("w") as lock, optimised():
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def times_folder(factory: pytest.TempPathFactory, engine: str) -> str:
    """Return the folder that keeps the times which the first worker of this run measures of a shared engine."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"times-{engine}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return str(folder)


@pytest.fixture(scope="session")
def demo_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    """The embedded pair in the thread mode; shared by all tests, so leave it idle and on `adaserve`."""
    from adaserve_jax.config import EngineConfig
    from adaserve_jax.engine.thread_engine import LocalEngine
    from tests.engines import DEMO

    engine = LocalEngine(EngineConfig(**DEMO), warm_folder=times_folder(tmp_path_factory, "demo"))
    with compiling("demo"):
        engine.start()
    yield engine
    assert engine.stats().compiles_after_ready == 0
    engine.close()


@pytest.fixture(scope="session")
def deterministic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The embedded pair in deterministic mode; leave it idle, on any policy."""
    from adaserve_jax import LLM
    from adaserve_jax.config import EngineConfig
    from adaserve_jax.engine.thread_engine import LocalEngine
    from tests.engines import EXACT

    folder = times_folder(tmp_path_factory, "deterministic")
    engine = LocalEngine(EngineConfig(eq8_eq9=True, **EXACT), warm_folder=folder)
    with compiling("deterministic"):
        engine.start()
    with LLM.over(engine) as llm:
        yield llm
        assert llm.stats().compiles_after_ready == 0


@pytest.fixture(scope="session", autouse=True)
def one_command_tree() -> Iterator[None]:
    """Build the commands of a command line once: typer builds them at every call, which takes a tenth of a second."""
    if "typer" not in sys.modules:  # no collected test runs a command line in this process
        yield
        return
    import typer.main
    import typer.testing

    once = functools.cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", once)
        patch.setattr(typer.testing, "_get_command", once)
        yield
