"""Limits of control groups, from files as Linux has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from adaserve_jax.memory import ledger as module
from adaserve_jax.memory.ledger import cgroup_limit, process_memory

UNLIMITED_V1 = str(2**63 - 4096)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/user/app", {"user/app/memory.max": "4096", "user/memory.max": "max"}, 4096),
        ("0::/user/app", {"user/app/memory.max": "8192", "user/memory.max": "4096"}, 4096),
        ("0::/", {"memory.max": "12288"}, 12288),
        ("0::/user", {"user/memory.max": "max"}, None),
        ("0::/of/the/host", {"memory.max": "4096"}, 4096),
        ("0::/../../other", {"memory.max": "4096"}, 4096),
        ("3:cpu,cpuacct:/\n2:memory:/pod\n0::/", {"memory/pod/memory.limit_in_bytes": "65536"}, 65536),
        ("2:memory:/pod", {"memory/memory.limit_in_bytes": UNLIMITED_V1}, int(UNLIMITED_V1)),
        ("3:cpu:/", {"memory/memory.limit_in_bytes": "4096"}, None),
    ],
)
def test_the_least_limit_of_the_groups_around_the_process(
    tmp_path: Path, groups: str, files: dict[str, str], limit: int | None
) -> None:
    write(tmp_path / "mounts", files)
    (tmp_path / "cgroup").write_text(groups + "\n")
    assert cgroup_limit(tmp_path / "cgroup", tmp_path / "mounts") == limit


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_limit(tmp_path / "gone", tmp_path) is None


def test_here_it_is_no_more_than_the_machine_has() -> None:
    size, source = process_memory()
    assert 0 < size <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert source in ("the machine's memory", "the limit of the control group")


@pytest.mark.parametrize(("allowed", "limited"), [(4096, True), (2**62, False), (None, False)])
def test_the_least_of_group_and_machine_holds(
    monkeypatch: pytest.MonkeyPatch, allowed: int | None, limited: bool
) -> None:
    monkeypatch.setattr(module, "cgroup_limit", lambda: allowed)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    expected = (allowed, "the limit of the control group") if limited else (physical, "the machine's memory")
    assert process_memory() == expected
