"""The progress of the engine's warm-up: a bar on a terminal, a line per tenth of the work in a log file."""

from __future__ import annotations

import threading

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

LINES = 10


class WarmUpBar:
    """Shows each kind of work on a console; callable from any thread."""

    def __init__(self, console: Console):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._console = console
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}
        self._lines: dict[str, int] = {}
        self._lock = threading.Lock()
        self._closed = False

    def update(self, what: str, done: int, total: int) -> None:
        """`done` of `total` parts of `what` are ready."""
        with self._lock:
            if self._closed:
                return
            if self._console.is_terminal:
                self._draw(what, done, total)
            else:
                self._tell(what, done, total)

    def _draw(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._progress.start()
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)

    def _tell(self, what: str, done: int, total: int) -> None:
        tenth = LINES * done // max(total, 1)
        if tenth > self._lines.get(what, -1):
            self._lines[what] = tenth
            self._console.print(f"{what} {done}/{total}", highlight=False)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._progress.stop()
