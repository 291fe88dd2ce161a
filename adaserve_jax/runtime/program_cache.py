"""Executables on disk, found by what a program is made from, so that a start need not trace it again.

JAX's own cache finds a program by its lowered form: it saves XLA's work, but not tracing and lowering, which then take
most of a start. Here a program is found by its key, its function, the shapes of its arguments, and the source of every
package that device programs are written in. Where these changed but the program did not, its lowered text finds it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from adaserve_jax.cpu_kernels.library import fingerprint, instruction_sets
from adaserve_jax.results.whole_file import PRIVATE, write_whole

SOURCES = ("*.py", "cpu_kernels/**/*.py", "models/**/*.py", "pallas_kernels/**/*.py", "runtime/**/*.py", "tree/**/*.py")
"""Modules of the package that may be traced; all others run on the host."""
RETRIEVED_EVENT = "/jax/compilation_cache/cache_retrieval_time_sec"
LAYOUT = 3
"""Version of the files; those of another one are not read. Files of versions 1 and 2 may lack their functions."""
UNUSED_LIMIT_S = 30 * 24 * 3600
"""Time without a load after which a file is deleted: each change of source, version or settings leaves files behind."""
_retrieved: set[str] = set()
"""Programs that JAX's own cache had, by their text. XLA's CPU client writes such a program without its functions, and
every call of it would fail. JAX gives them to later engines of the process from memory, without an event and whatever
the settings, so the set is the process's, and its names do not depend on settings.
"""
_log = logging.getLogger(__name__)


class ProgramCache:
    """Folder of executables, in use inside its `with` block; its methods may be called by several threads."""

    def __init__(self, folder: Path | None):
        """Use this folder, which need not exist; None: nothing is kept."""
        self._folder = folder
        self._here = threading.local()

    def __enter__(self) -> ProgramCache:
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            _delete_unused(self._folder)  # last: what was needed may be as old, but has been loaded now
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def executable(self, key: tuple[Any, ...], function: Any, arguments: tuple[Any, ...]) -> Callable:
        """Return a jitted function compiled for arguments of these shapes: from the folder, else compiled and kept.

        key: of the program among those of its source; it tells apart what only options of `jax.jit` do.
        """
        devices = _devices(arguments)
        by_source = None if self._folder is None else _name_by_source(key, function, arguments)
        if self._folder is None or by_source is None or len(devices) > 1:
            return function.lower(*arguments).compile()
        if (found := _load(self._folder / by_source, devices)) is not None:
            return found
        lowered = function.lower(*arguments)
        # An argument that a program does not read is not in its text, but its shape is checked at each call.
        shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(arguments)]
        self._here.program = program = _digest(devices, lowered.in_tree, shapes, lowered.out_tree, lowered.as_text())
        by_text = self._folder / _digest(_environment(), program)
        if (found := _load(by_text, devices)) is None:
            found = lowered.compile()
            if program in _retrieved or not _save(by_text, found):
                return found
        _link(by_text, self._folder / by_source)
        return found

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == RETRIEVED_EVENT:
            _retrieved.add(getattr(self._here, "program", ""))


def _devices(arguments: tuple[Any, ...]) -> list[Any]:
    """Return the devices of the arguments, or this process's first one if they have none."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments))
    found = {device for sharding in shardings if sharding is not None for device in sharding.device_set}
    return sorted(found, key=lambda device: device.id) or jax.local_devices()[:1]


def _load(path: Path, devices: list[Any]) -> Callable | None:
    """Return the executable of a file, to run on these devices; None if there is none, or if it cannot be loaded."""
    try:
        loaded = pickle.loads(path.read_bytes())
        with contextlib.suppress(OSError):  # a folder that is only read keeps what it has
            os.utime(path)  # of all its names, which are links to one file
        return deserialize_and_load(*loaded, backend=devices[0].client, execution_devices=devices)
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever a damaged file or another XLA makes of it: it is compiled again
        _log.warning("the program in %s cannot be loaded and is compiled again: %s", path, error)
        return None


def _delete_unused(folder: Path) -> None:
    """Delete the files that no start has written or loaded for UNUSED_LIMIT_S, as far as that is possible."""
    oldest = time.time() - UNUSED_LIMIT_S
    with contextlib.suppress(OSError):  # there is no folder yet, it is only read, or another start deletes too
        for path in folder.iterdir():
            if path.stat().st_mtime < oldest:
                path.unlink()


def _save(path: Path, executable: Any) -> bool:
    """Keep an executable. Return False, and only log, if it cannot be kept: later starts then take longer."""
    try:
        path.parent.mkdir(exist_ok=True, mode=0o700)
        write_whole(path, pickle.dumps(serialize(executable)), mode=PRIVATE)
    except (OSError, TypeError, ValueError, NotImplementedError, RuntimeError, pickle.PickleError) as error:
        _log.info("a program could not be kept in %s: %s", path.parent, error)
        return False
    return True


def _link(path: Path, other: Path) -> None:
    """Make the file known under another name too."""
    try:
        other.unlink(missing_ok=True)
        other.hardlink_to(path)
    except OSError as error:
        _log.info("%s could not be linked: %s", other, error)


def _name_by_source(key: tuple[Any, ...], function: Any, arguments: tuple[Any, ...]) -> str | None:
    """Return the file name of a program by what it is made from; None if that cannot be described."""
    leaves, tree = jax.tree.flatten(arguments)
    try:
        described = _describe(function)
    except TypeError:
        return None
    shapes = [(x.shape, x.dtype, getattr(x, "weak_type", False), getattr(x, "sharding", None)) for x in leaves]
    return _digest(_environment(), _sources(), _devices(arguments), key, described, tree, shapes)


def _describe(value: Any) -> Any:
    """Return a value as texts and tuples that are equal for equal programs only, but for options of `jax.jit`.

    Raises:
        TypeError: a value has no such text.
    """
    if hasattr(value, "lower") and hasattr(value, "__wrapped__"):  # jitted
        return _describe(value.__wrapped__)
    if isinstance(value, functools.partial):
        return _describe(value.func), _describe(value.args), _describe(value.keywords)
    if inspect.ismethod(value):
        return value.__func__.__qualname__, _describe(value.__self__)
    if inspect.isfunction(value) and value.__closure__ is None and "<" not in value.__qualname__:
        return value.__module__, value.__qualname__
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__qualname__, tuple(_describe(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, Mapping):
        return tuple((name, _describe(value[name])) for name in sorted(value))
    if isinstance(value, tuple | list):
        return type(value).__name__, tuple(map(_describe, value))
    if value is None or isinstance(value, bool | int | float | str | Enum | np.dtype | jax.ShapeDtypeStruct):
        return repr(value)
    raise TypeError(type(value))


@functools.cache
def _sources() -> str:
    root = Path(__file__).parent.parent
    files = sorted({path for pattern in SOURCES for path in root.glob(pattern)})
    return _digest(*((path.relative_to(root).as_posix(), path.read_bytes()) for path in files))


def _environment() -> tuple[Any, ...]:
    """Return what else decides what is compiled: versions, device, settings of JAX and flags of XLA."""
    settings = {name: value for name, value in jax.config.values.items() if "cache" not in name}
    flags = {name: os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    devices = [(device.id, device.device_kind) for device in jax.devices()]
    return (
        LAYOUT,
        jax.__version__,
        version("jaxlib"),
        devices,
        jax.devices()[0].client.platform_version,
        settings,
        flags,
        instruction_sets(),
        fingerprint(),
    )


def _digest(*parts: Any) -> str:
    found = hashlib.sha256()
    for part in parts:
        text = part if isinstance(part, bytes) else repr(part).encode()
        found.update(b"%d:" % len(text))
        found.update(text)
    return found.hexdigest()
