"""Policies from files outside the package: `my_policy.py`, or `my_policy.py:NAME` where a file has several.

A file is ordinary Python that is run when its policy is asked for; each module-level `Policy` in it is one policy. Its
neighbours are not on the path of imports: what it says is in one file, whose hash tells versions of it apart.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from adaserve_jax.errors import ConfigError
from adaserve_jax.scheduler.policies import Policy

SUFFIX = ".py"


def names_a_file(name: str) -> bool:
    """Whether the name of a policy is that of a file, or of a policy in one."""
    return name.partition(":")[0].endswith(SUFFIX)


def policy_from_file(name: str) -> Policy:
    """The policy that `FILE.py` or `FILE.py:NAME` names; FILE is relative to the working directory.

    Runs the file. Raises ConfigError: there is no such file, it fails, or it has no such policy, or several and none is
    named.
    """
    file, colon, wanted = name.partition(":")
    path = _path(name)
    policies = {key: value for key, value in vars(_run(path)).items() if isinstance(value, Policy)}
    if colon and wanted in policies:
        return policies[wanted]
    if not policies:
        raise ConfigError(
            f"policy file {path} holds no Policy; it must assign one at module level: NAME = Policy(about, controller, "
            "selector=...)"
        )
    listed = ", ".join(f"{file}:{key}" for key in policies)
    if colon:
        raise ConfigError(f"policy file {path} has no policy {wanted!r}; it has {listed}")
    if len(policies) > 1:
        raise ConfigError(f"policy file {path} holds {len(policies)} policies; name one of {listed}")
    return next(iter(policies.values()))


def file_hashes(names: Iterable[str]) -> dict[str, str]:
    """SHA-256, hex, of the file of each policy that is from one; the others are left out. Raises ConfigError: there is
    no such file."""
    return {name: hashlib.sha256(_path(name).read_bytes()).hexdigest() for name in names if names_a_file(name)}


def _path(name: str) -> Path:
    path = Path(name.partition(":")[0])
    if not path.is_file():
        raise ConfigError(
            f"policy {name}: there is no file {path} in {Path.cwd()}; give the path of a Python file with a Policy"
        )
    return path


def _run(path: Path) -> ModuleType:
    """The module that a file makes, run anew each time: it may have been edited since. Files of one name in several
    folders are modules of their own, and one that fails is none."""
    source = path.resolve()
    name = f"{__name__}.{path.stem}_{hashlib.sha256(bytes(source)).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None and spec.loader is not None, "the suffix of Python's sources has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their own module up while they are made
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        where = _where(error, source)
        raise ConfigError(f"policy file {path} fails{where}: {type(error).__name__}: {error}") from error
    return module


def _where(error: Exception, source: Path) -> str:
    """ " in line N" of the file, where the error came through one of its lines; an error of syntax says so itself."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == source]
    return f" in line {lines[-1]}" if lines else ""
