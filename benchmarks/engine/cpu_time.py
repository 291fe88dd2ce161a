"""CPU time of processes, and how much of the machine others took meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CpuTimer:
    """Wall time, and the share of all cores' time that others took meanwhile (None where /proc/stat is missing).

    servers: processes that belong to what is measured, beside this one.
    """

    def __init__(self, *servers: int) -> None:
        self._servers = servers
        self._busy_s, self._own_s = busy_s(), self._own()
        self._started = time.perf_counter()

    def read(self) -> tuple[float, float | None]:
        wall_s = time.perf_counter() - self._started
        own_s, busy = self._own() - self._own_s, busy_s()
        if busy is None or self._busy_s is None:
            return wall_s, None
        return wall_s, max(0.0, busy - self._busy_s - own_s) / (wall_s * (os.cpu_count() or 1))

    def _own(self) -> float:
        return time.process_time() + sum(map(cpu_s, self._servers))


def busy_s() -> float | None:
    """Seconds, over all cores, that were neither idle nor waiting for a disk; stolen ones count."""
    try:
        values = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = values
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
