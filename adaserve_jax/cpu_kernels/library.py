"""Compile the C++ kernels with this machine's compiler and register them with XLA.

The library is compiled once per machine, for its own processor, and kept beside the compiled programs. Where there is
no compiler, `fingerprint` is "" and XLA's own operations run instead: slower, and right.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import jax

from adaserve_jax.user_folders import cache_folder

HANDLERS = (
    "product_f32", "product_bf16", "product_i8", "product_i4", "grouped_f32", "grouped_bf16", "grouped_i8",
    "grouped_i4", "packed_attention", "beam_attention",
)  # fmt: skip
OPTIONS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared", "-w")
SWITCH = "ADASERVE_CPU_KERNELS"
"""Environment variable: "0" leaves every CPU kernel to XLA."""
_SOURCES = Path(__file__).parent
_log = logging.getLogger(__name__)


@cache
def fingerprint() -> str:
    """Return a name of the registered library that changes with its code and compiler; "" if there is none.

    Compiles and registers it at the first call of a process.
    """
    if os.environ.get(SWITCH) == "0" or jax.default_backend() != "cpu":
        return ""
    command = _compiler()
    if command is None:
        _log.warning("no C++ compiler (CXX, c++, g++, clang++, ziglang) was found: XLA's slower operations are used")
        return ""
    try:
        name = _name(command)
        library = ctypes.CDLL(str(_compiled(name, command)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        _log.warning("CPU kernels were not compiled by %s, XLA's are used: %s", shlex.join(command), detail)
        return ""
    for handler in HANDLERS:
        function = jax.ffi.pycapsule(getattr(library, f"adaserve_{handler}"))
        jax.ffi.register_ffi_target(target(handler, name), function, platform="cpu")
    return name


def target(handler: str, name: str | None = None) -> str:
    """Return the name that a handler of the library `name` (None: this process's) is registered by.

    It changes with the code, so that a compiled program from a disk never calls another version's handler.
    """
    return f"adaserve_{handler}_{name or fingerprint()}"


@cache
def instruction_sets() -> str:
    """Return the instruction sets of this processor, for which code is made."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compiler() -> list[str] | None:
    """Return the command of a C++ compiler: $CXX, or the first found. None: there is none."""
    if "CXX" in os.environ:
        return shlex.split(os.environ["CXX"])
    for command in ("c++", "g++", "clang++"):
        if shutil.which(command):
            return [command]
    return [sys.executable, "-m", "ziglang", "c++"] if find_spec("ziglang") else None


def _name(command: list[str]) -> str:
    """Return a hash of all that decides what the library is: sources, XLA's headers, compiler and processor."""
    compiler = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    facts = (version("jaxlib"), compiler, *OPTIONS, platform.machine(), instruction_sets())  # jaxlib has the headers
    digest = hashlib.sha256("\0".join(facts).encode())
    for path in [*sorted(_SOURCES.glob("*.h")), _SOURCES / "kernels.cc"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compiled(name: str, command: list[str]) -> Path:
    """Return the library's file, compiled first if no process of this machine did it yet."""
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    library = folder / f"{name}.so"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as work:
                made = Path(work, library.name)
                include = f"-I{jax.ffi.include_dir()}"
                arguments = [*command, *OPTIONS, include, str(_SOURCES / "kernels.cc"), "-o", str(made)]
                subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=300)
                made.replace(library)
    return library


def _folder() -> Path:
    chosen = jax.config.values["jax_compilation_cache_dir"]
    return (Path(chosen) if chosen else cache_folder()) / "kernels"  # "" is no folder, as for jax
