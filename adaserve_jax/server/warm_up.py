"""The progress bar of the engine's warm-up."""

from __future__ import annotations

import threading

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class WarmUpBar:
    """Draws the engine's progress on a console, one line per kind of work; callable from any thread."""

    def __init__(self, console: Console):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console)
        self._tasks: dict[str, TaskID] = {}
        self._lock = threading.Lock()
        self._closed = False

    def update(self, what: str, done: int, total: int) -> None:
        """`done` of `total` parts of `what` are ready."""
        with self._lock:
            if self._closed:
                return
            if what not in self._tasks:
                self._progress.start()
                self._tasks[what] = self._progress.add_task(what, total=total)
            self._progress.update(self._tasks[what], completed=done, total=total)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._progress.stop()
