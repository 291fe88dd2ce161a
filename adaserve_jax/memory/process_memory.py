"""How much memory this process may use: what its control groups allow, or else what the machine has. Imports no jax."""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS, MOUNTS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_LIMIT_FILES = {"": "memory.max", "memory": "memory.limit_in_bytes"}
"""By controller as /proc names it: version 2 has no name, version 1 its own."""


def process_memory() -> tuple[int, str]:
    """Bytes, and what limits them: the least of the limits of the control groups and the physical memory."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    allowed = cgroup_limit()
    if allowed is not None and allowed < physical:
        return allowed, "the limit of the control group"
    return physical, "the machine's memory"


def cgroup_limit(cgroups: Path = CGROUPS, mounts: Path = MOUNTS) -> int | None:
    """The least memory limit of the control groups that this process is in, and of those around them; None: no limit.

    cgroups: of /proc/self/cgroup's form; mounts: where the groups' files are.
    """
    try:
        lines = cgroups.read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in set(controllers.split(",")) & set(_LIMIT_FILES):
            limits += _limits_along(mounts / controller, path, _LIMIT_FILES[controller])
    return min(limits, default=None)


def _limits_along(mount: Path, path: str, name: str) -> list[int]:
    """Limits of a group and of those above it. In a container its path is often that of the host, while the files at
    the mount are its own."""
    folder = mount / path.lstrip("/")
    found = []
    for group in (each for each in (folder, *folder.parents) if each.is_relative_to(mount)):
        try:
            text = (group / name).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            found.append(int(text))
    return found
