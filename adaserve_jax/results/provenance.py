"""Code and machine that a measurement ran on, found without importing jax."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
import secrets
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from adaserve_jax.errors import CheckpointError

UNKNOWN = "unknown"
SAMPLES, SAMPLE_BYTES = 16, 1 << 16
"""Parts of a file of safetensors that `weights_hash` reads, and their length."""


@functools.cache
def source_commit() -> str:
    """Return `commit_of` this package's checkout, as it was when this process first asked; "unknown" for an installed
    package, whatever lies around it."""
    own = Path(__file__).resolve()
    return commit_of(own.parent) if _git(own.parent, "ls-files", "--error-unmatch", own.name) else UNKNOWN


def commit_of(folder: Path) -> str:
    """Return the commit of a checkout, with "-dirty" if tracked files differ, or "unknown"."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return UNKNOWN
    dirty = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if dirty else commit


def new_run_id() -> str:
    """Return a unique id; ids sort by time."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hex, of settings that JSON can hold, in any order."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def machine_name() -> str:
    """Return processor, cores and memory, e.g. "Intel Xeon, 2 cores, 16 GiB, Linux x86_64", without the host name."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_cpu_model()}, {cores} cores, {memory_gib:.0f} GiB, {platform.system()} {platform.machine()}"


def code_and_machine(package_version: str) -> dict[str, Any]:
    """Return the columns of result rows that name the code and the machine."""
    return {"commit": source_commit(), "package_version": package_version, "machine": machine_name()}


def count_parameters(folder: Path, begins: str | tuple[str, ...] = "") -> int | None:
    """Return the number of parameters of a checkpoint, from the headers of its safetensors or of the arrays that
    `adaserve convert` wrote; None if there are none to read. begins: how the names of the tensors of safetensors to
    count begin; arrays are all counted."""
    files = sorted(folder.glob("*.safetensors"))
    arrays = sorted(folder.glob("weights/*/zarr.json"))
    try:
        if files:
            headers = [_header(path) for path in files]
            named = [(name, each) for header in headers for name, each in header.items() if name != "__metadata__"]
            return sum(math.prod(each["shape"]) for name, each in named if name.startswith(begins))
        return sum(math.prod(json.loads(path.read_text())["shape"]) for path in arrays) if arrays else None
    except (OSError, ValueError, KeyError, TypeError, CheckpointError):
        return None


def model_hash(folder: Path) -> str:
    """Return the SHA-256, in hex, of everything that a checkpoint's times depend on: config.json, and names, sizes and
    headers (names, shapes and types of all tensors) of the weights. Raises OSError, CheckpointError: a wrong header."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        digest.update(json.dumps(_header(path), sort_keys=True).encode())
    for path in sorted(folder.glob("weights/*/zarr.json")):
        digest.update(f"{path.parent.name} ".encode() + path.read_bytes())
    return digest.hexdigest()


def weights_hash(folder: Path) -> str:
    """Return the SHA-256, in hex, of `model_hash` and of samples of the weights' bytes, by which two trainings of one
    model differ. Raises as `model_hash`."""
    digest = hashlib.sha256(model_hash(folder).encode())
    chunks = (path for path in folder.glob("weights/*/c/**/*") if path.is_file())
    for path in sorted([*folder.glob("*.safetensors"), *chunks]):
        last = max(path.stat().st_size - SAMPLE_BYTES, 0)
        with path.open("rb") as file:
            if path.suffix != ".safetensors":  # one of very many
                digest.update(file.read(SAMPLE_BYTES // SAMPLES))
                continue
            for part in range(SAMPLES):
                file.seek(last * part // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _header(path: Path) -> dict[str, Any]:
    """Read the header of a safetensors file: u64 little-endian length, then JSON. Raises OSError, CheckpointError."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length < path.stat().st_size else b""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not a readable safetensors file: its header must be a JSON object")
    return cast("dict[str, Any]", header)


def _git(folder: Path, *args: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or UNKNOWN
