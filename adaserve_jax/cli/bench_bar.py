"""A bench run as it is shown while it runs: a line for each point that ended, and below them how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.text import Text

from adaserve_jax.bench.plan import BenchPlan, Point
from adaserve_jax.bench.watching import Watch
from adaserve_jax.cli.points import point_line
from adaserve_jax.cli.terminal import notes
from adaserve_jax.results.schema import ResultRow

REFRESHES_PER_S = 2
"""Drawing takes the processor from what is measured, so it is seldom."""
GUESSED_MORE_S = 2.0
"""What a point may take beside the time in which requests arrive: warm-up, and the last requests."""


class BenchBar(Watch):
    """Keeps rows as they come. guess_s: how long a point may take, until one was measured."""

    def __init__(self, guess_s: float, console: Console, progress: Progress):
        self.rows: list[ResultRow] = []
        self._guess_s, self._console, self._progress = guess_s, console, progress
        self._task = progress.add_task("", total=None)
        self._name, self._flight = "", 0
        self._total = self._done = self._kept = 0
        self._took_s = 0.0
        self._began_s: float | None = None

    def opened(self, todo: Sequence[Point], done: Sequence[ResultRow]) -> None:
        self.rows += done
        self._kept = self._done = len({row.point for row in done})
        self._total = len(todo) + self._done
        if self._kept:
            self._say(
                f"{self._kept} of {self._total} points are there already; relative targets stay those of their "
                f"baseline latency, {done[0].baseline_s * 1e3:.3g} ms"
            )
        self._progress.update(self._task, total=self._total, completed=self._done)

    def begins(self, point: Point) -> None:
        self._name, self._began_s = point.name, time.monotonic()

    def in_flight(self, requests: int) -> None:
        self._flight = requests

    def ended(self, point: Point, rows: Sequence[ResultRow], notes: Sequence[str]) -> None:
        if self._began_s is not None:
            self._took_s += time.monotonic() - self._began_s
        self.rows += rows
        self._done += 1
        self._progress.update(self._task, completed=self._done)
        self._say(point_line(self._done, self._total, rows))
        for note in notes:
            self._say(f"  {note}")

    def left_s(self, now_s: float) -> float:
        """Seconds to the end, if every point takes as long as those so far did."""
        measured = self._done - self._kept
        each_s = self._took_s / measured if measured else self._guess_s
        spent_s = 0.0 if self._began_s is None else now_s - self._began_s
        left = self._total - self._done
        return max(0.0, each_s - spent_s) + each_s * (left - 1) if left else 0.0

    def state(self) -> str:
        """What is shown beside the bar."""
        if self._began_s is None:
            return ""
        minutes, seconds = divmod(round(self.left_s(time.monotonic())), 60)
        return (
            f"{self._done}/{self._total} points, {self._name}: {self._flight} in flight, about {minutes}:{seconds:02d} "
            "left"
        )

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)


@contextmanager
def bench_bar(plan: BenchPlan) -> Iterator[BenchBar]:
    """The bar of a run, removed at its end; lines only, unless on a terminal."""
    console = notes()
    said = _Said()
    with Progress(
        BarColumn(),
        said,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        refresh_per_second=REFRESHES_PER_S,
    ) as progress:
        bar = BenchBar(plan.duration_s + GUESSED_MORE_S, console, progress)
        said.text = bar.state
        yield bar


class _Said(ProgressColumn):
    """A text that is asked for whenever the bar is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.text: Callable[[], str] = str

    def render(self, task: Task) -> Text:
        return Text(self.text())
