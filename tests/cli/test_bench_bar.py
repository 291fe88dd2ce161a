"""What is shown while a bench runs: points done, requests in flight, how long it will take."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from adaserve_jax.bench.plan import BenchPlan
from adaserve_jax.cli import bench as module
from adaserve_jax.cli.bench import BenchBar, bench_bar
from adaserve_jax.results.schema import ALL_CLASSES
from tests.results.points import row

POINTS = BenchPlan(("a", "b"), (1.0, 2.0), 10.0).points


def rows_of(number: int, **changes: object) -> list:
    return [row(slo_class=ALL_CLASSES, point=POINTS[number].name, **changes)]


def test_what_is_left_follows_from_what_points_took(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO())
    bar = BenchBar(12.0, console, Progress(console=console))
    assert bar.state() == ""
    bar.opened(POINTS[1:], rows_of(0))  # one is there already: it says nothing of how long points take
    bar.begins(POINTS[1])
    bar.in_flight(7)
    assert bar.left_s(100.0) == 36.0
    assert bar.state() == "1/4 points, b@1/s: 7 requests in flight, about 0 min 36 s left"
    assert bar.left_s(104.0) == 32.0 and bar.left_s(150.0) == 24.0
    now[0] = 120.0
    bar.ended(POINTS[1], rows_of(1, label="tuned", max_prefill_tokens=512, max_requests=16), ("a note",))
    bar.begins(POINTS[2])
    assert bar.left_s(125.0) == 15.0 + 20.0
    now[0] = 150.0
    bar.ended(POINTS[2], rows_of(2, valid=False, invalid_reason="interrupted"), ())
    assert [each.point for each in bar.rows] == [POINTS[i].name for i in (0, 1, 2)]
    told = console.file.getvalue()
    assert "1 of 4 points are there already" in told and "  a note" in told
    assert "2/4 b@1/s (tuned: 512 prefill tokens, 16 requests a step): 3 requests" in told
    assert "3/4 b@2/s: INVALID: interrupted" in told


def test_a_terminal_has_a_bar_and_it_is_removed(monkeypatch: pytest.MonkeyPatch):
    screen = io.StringIO()
    monkeypatch.setattr(module, "notes", lambda: Console(file=screen, force_terminal=True, width=100))
    with bench_bar(BenchPlan(("a",), (1.0,), 10.0)) as bar:
        bar.opened(POINTS, ())
        bar.begins(POINTS[0])
        bar.in_flight(3)
        bar.ended(POINTS[0], rows_of(0), ())
    shown = screen.getvalue()
    assert "1/4 points, a@1/s: 3 requests in flight" in shown and "1/4 a@1/s: 3 requests" in shown
    assert shown.rstrip("\r\n").endswith("\x1b[2K"), "the bar's line is cleared"
